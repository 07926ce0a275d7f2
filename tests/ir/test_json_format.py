"""JSON documents: every record survives a round trip, and bad documents are refused with the path of the key."""

import json
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.ir import (
    RECORDS,
    Backward,
    Candidate,
    Choices,
    Cluster,
    Crossing,
    Curve,
    Cuts,
    DeviceLayout,
    DeviceSpeed,
    Forward,
    Free,
    Graph,
    Link,
    MessageCost,
    MessageCpu,
    Node,
    NodeBytes,
    NodeCost,
    Overhead,
    Overlap,
    Partition,
    Placement,
    Plan,
    Prediction,
    Profile,
    Program,
    Ragged,
    Recv,
    Replicas,
    Rows,
    Run,
    SavedTensors,
    Schedule,
    Search,
    Send,
    Series,
    StageCosts,
    StateBytes,
    StepMetrics,
    StorageGroup,
    TensorSpec,
    Trace,
    TrainingState,
    Update,
    Value,
    from_json,
    load_record,
    save_record,
    to_json,
)
from tests.selection import every_third

SPEC = TensorSpec((2, 3), "bfloat16", True)
VALUE = Value("layers.0", SPEC)
NODE = Node(
    "layers.0", ("x",), (VALUE,), ("layers.0.w", "tied"), ("layers.0.b",), False, "layers.0", "Block", True, True
)
STORAGE = StorageGroup(("layers.0",), ("layers.0",))
UPDATE = Update("layers.0", ("layers.0.b",))
PARAMETERS = (Value("layers.0.w", SPEC), Value("tied", SPEC))
GRAPH = Graph(
    nodes=(NODE, Node("mask", ("x",), (), from_inputs=True)),
    inputs=(Value("x", TensorSpec((), "int64")),),
    outputs=("layers.0", "x"),
    parameters=PARAMETERS,
    buffers=(Value("layers.0.b", SPEC),),
    tied=(("layers.0.w", "tied"),),
    storage=(STORAGE,),
    updates=(UPDATE,),
)
SAVED = SavedTensors(7, ("x", "layers.0"), 6, ("x",), ("layers.0",))
COST = NodeCost("layers.0", 0.1, 0.2, 0.1, 0.125, NodeBytes(7, 6, 5, 4, 3, 2, 1), SAVED)
CURVE = Curve(Series([0, 0.5]), Series([10, 20]))
CUTS = Cuts.of(3, [(0, 1), (0, 2), (1, 2)], without_gradient=[(0, 2)])
PLACEMENT = Placement((0, 1, 0))
SCHEDULE = Schedule.of(PLACEMENT, 2, [[Forward(0, 0), Overlap(Forward(2, 1), Backward(2, 0))], [Backward(1, 1)]])
PROGRAM = Program.of(
    PLACEMENT, 2, CUTS, [[Forward(0, 0), Send(0, 0, 1), Recv(2, 0, 0), Free(0, 1)], [Send(1, 1, 0), Recv(1, 0, 2)]]
)
STAGE_COSTS = StageCosts(
    forward=(0.1, 0.2, 0.3),
    input_grad=(0.1, 0.2, 0.3),
    weight_grad=(0.1, 0.2, 0.3),
    activation_bytes=(1, 2, 3),
    messages=(MessageCost(0, 1, 2, 3),),
    state=(StateBytes(1, 2, 3), StateBytes(), StateBytes()),
)
LINK = Link(0, 1, 1e-5, 1e9)
REPLICAS = Replicas(3, 1e-4, 1e8)
OVERHEAD = Overhead(1e-4, 3e-5, 1e-3, (MessageCpu(4096, 1e-6, 2e-6),), 1.25)
RANKS = {"overlap": 0.5, "slowness": (1, 1.5), "overhead": OVERHEAD}
CLUSTER = Cluster(2, (5, 6), 1e-3, None, (LINK, Link(1, 0)), REPLICAS, **RANKS)
PARTITION = Partition((("a", "b"), ("c",), ("ü\n\u2028",)))
CHOICES = Choices("linear", "zb_h1", (False, True, False))
PREDICTION = Prediction(4.5, 0.25, 4.0, 0.2, (10, 20), 4.25)
CANDIDATE = Candidate(CHOICES, 4, 12, PREDICTION)
LAYOUT = DeviceLayout(2, 4, 8, 1, 16, 2, "interleaved", 1, 4.5, 0.25, 20, 0.4)
SEARCH = Search((CANDIDATE, Candidate(CHOICES, 4, 12, PREDICTION, "slower")), ("memory is the limit",), (), (LAYOUT,))
HALVES = Partition((("layers.0",), ("mask",)))
PAIR = Schedule.of(Placement((0, 1)), 1, [[Forward(0, 0), Backward(0, 0)], [Forward(1, 0), Backward(1, 0)]])
REST = (StageCosts((0.1, 0.2), (0.1, 0.2), (0.1, 0.2)), CLUSTER, PREDICTION, SEARCH)
SPLIT = (("x", 1), ("table", None), ("labels", "samples"), ("ids", Rows(4)), ("patches", Ragged("grid", 7, -1)))
PLAN = Plan(GRAPH, HALVES, PAIR, Choices("linear", "gpipe", (False, True)), *REST, split=SPLIT)
TRACE = Trace(PROGRAM, Series(range(6)), Series(range(6)), Series([1, 2]), Series([3, 4]), (CURVE, CURVE))
STEP = StepMetrics(0, 2.5, 0.25, 8, 1.5)
SAMPLES = (
    *(SPEC, VALUE, NODE, STORAGE, UPDATE, GRAPH, COST.memory, SAVED, COST),
    Profile((COST,), 0.3, GRAPH.fingerprint, "cpu", (("torch", "2.13.0"),), (("layers.0", 12),)),
    DeviceSpeed(1e12, 1e11, 1e-6),
    TrainingState("adamw", "bf16"),
    *(Crossing(0, 1, (VALUE,)), PARTITION, CUTS, STAGE_COSTS.messages[0], STAGE_COSTS.state[0], STAGE_COSTS),
    *(LINK, REPLICAS, *OVERHEAD.messages, OVERHEAD, CLUSTER, PLACEMENT, SCHEDULE, PROGRAM, CURVE),
    *(TRACE, CHOICES, PREDICTION, CANDIDATE, LAYOUT, SEARCH, PLAN, Rows(4), Ragged("grid", 7)),
    *(STEP, Run(PLAN, (STEP, StepMetrics(1, None, 0.25, 8)), (TRACE,), (1, 2), 1e-7, (("torch", "2.13.0"),), 2)),
)
every_record = pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)


def document(record, /, **changed):
    return json.dumps({**json.loads(to_json(record)), **changed})


def refusal(text, record=None):
    with pytest.raises(FormatError) as refused:
        from_json(text, record)
    return refused.value


# -------------------------------------------------------------------------------------------------------- round trips


def test_there_is_a_sample_of_every_record():
    assert {type(record).__name__ for record in SAMPLES} == set(RECORDS)


@every_record
def test_a_record_survives_a_round_trip(record, tmp_path):
    text = to_json(record)
    assert from_json(text) == record
    assert to_json(from_json(text, type(record))) == text
    save_record(record, tmp_path / "record.json")
    assert load_record(tmp_path / "record.json", type(record)) == record
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_document_has_one_line_per_field():
    assert to_json(SCHEDULE).splitlines() == [
        '{"penstock": 1, "type": "Schedule", "value": {',
        '  "placement": {"ranks": [0, 1, 0]},',
        '  "num_microbatches": 2,',
        '  "table": ["0F0 (2F1;2B0)OVERLAP_F_B", "1B1"]',
        "}}",
    ]


def test_a_rank_without_actions_is_an_empty_text():
    empty = Schedule.of(Placement((0, 1)), 1, [[Forward(0, 0)], []])
    assert json.loads(to_json(empty))["value"]["table"] == ["0F0", ""]
    assert from_json(to_json(empty)) == empty


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_every_finite_number_survives(numbers):
    curve = Curve(Series(sorted(numbers)), Series(map(abs, numbers)))
    again = from_json(to_json(curve))
    assert again.seconds.values.tobytes() == curve.seconds.values.tobytes()
    assert again.held.values.tobytes() == curve.held.values.tobytes()


# By their codes, without surrogates: for `st.text` hypothesis makes a table of all characters, which takes seconds.
@given(st.lists(st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF), max_size=20))
def test_every_name_survives(codes):
    name = "".join(map(chr, codes))
    assert from_json(to_json(Value(name, SPEC))).name == name


def test_an_integer_is_accepted_for_a_float():
    assert from_json(document(CURVE, value={"seconds": [0, 1], "held": [3, 4.5]})) == Curve(
        Series([0, 1]), Series([3, 4.5])
    )
    assert type(from_json(document(LINK).replace("1e-05", "1")).latency) is float


def test_numbers_of_numpy_are_written_as_numbers():
    assert from_json(to_json(Placement((np.int64(0), np.int64(1))))) == Placement((0, 1))


def test_memory_may_have_a_unit():
    cluster = json.loads(to_json(CLUSTER))["value"]
    assert from_json(document(CLUSTER, value={**cluster, "memory": "1KiB"})).memory == (1024, 1024)


def test_a_key_with_a_default_may_be_left_out():
    assert from_json(document(LINK, value={"source": 0, "target": 1})) == Link(0, 1)


# ---------------------------------------------------------------------------------------- what is refused when written


@pytest.mark.parametrize("thing", [{"ranks": [0]}, Forward(0, 0), "Placement", None])
def test_only_records_are_written(thing):
    with pytest.raises(FormatError, match="records of this type cannot be saved"):
        to_json(thing)


def test_a_value_of_the_wrong_type_is_not_written():
    costs = StageCosts((1.0,), (1.0,), (1.0,), activation_bytes=(1.5,))
    with pytest.raises(FormatError, match=r"valid integer \(path: value.activation_bytes.0, got: 1.5\)"):
        to_json(costs)


def test_nan_is_not_written():
    curve = Curve(Series([0, 1]), Series([0, 1]))
    object.__setattr__(curve, "held", Series([0, np.nan]))
    with pytest.raises(FormatError, match=r"cannot be written as JSON \(type: Curve"):
        to_json(curve)


def test_a_record_that_would_be_read_as_another_is_not_written():
    class NeverEqual(tuple):
        def __eq__(self, other):
            return False

        __hash__ = None

    with pytest.raises(FormatError, match="would differ when read back"):
        to_json(replace(PREDICTION, peaks=NeverEqual((1, 2))))


def test_an_old_file_survives_a_write_that_fails(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    save_record(PLACEMENT, path)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(FormatError, match=r"cannot write the file \(file: .*record.json, reason: disk full\)"):
        save_record(CUTS, path)
    assert load_record(path) == PLACEMENT
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["", ".", "none/record.json", "file/record.json"])
def test_a_path_that_cannot_be_written_is_named(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="cannot write the file"):
        save_record(PLACEMENT, tmp_path / name)


# ------------------------------------------------------------------------------------------- what is refused when read


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        ("[]", "penstock", "not a penstock document"),
        ('{"type": "Placement"}', "penstock", "not a penstock document"),
        (document(PLACEMENT, penstock=2), "penstock", "unsupported format version"),
        (document(PLACEMENT, penstock=0), "penstock", "unsupported format version"),
        (document(PLACEMENT, penstock=True), "penstock", "valid integer"),
        (document(PLACEMENT, penstock="1"), "penstock", "valid integer"),
        (document(PLACEMENT, type="Pickle"), "type", "unknown record type"),
        (document(PLACEMENT, type=3), "type", "unknown record type"),
        (document(PLACEMENT, extra=3), "extra", "not permitted"),
        ('{"penstock": 1, "type": "Placement"}', "value", "missing key"),
        (document(PLACEMENT, value={}), "value.ranks", "missing key"),
        (document(PLACEMENT, value=[]), "value", "an object"),
        (document(PLACEMENT, value={"ranks": "01"}), "value.ranks", "valid array"),
        (document(PLACEMENT, value={"ranks": [0, "1"]}), "value.ranks.1", "valid integer"),
        (document(PLACEMENT, value={"ranks": [0, True]}), "value.ranks.1", "valid integer"),
        (document(PLACEMENT, value={"ranks": [0, 1.0]}), "value.ranks.1", "valid integer"),
        (document(PLACEMENT, value={"ranks": [0, None]}), "value.ranks.1", "valid integer"),
        (document(PLACEMENT, value={"ranks": [0, 2**62]}), "value", "every rank must hold a stage"),
        (document(PLACEMENT, value={"ranks": [0], "a b": 1}), "value.a b", "unknown key"),
        (document(CURVE, value={"seconds": [0], "held": [float("nan")]}), "value.held.0", "finite number"),
        (document(CURVE, value={"seconds": [0], "held": [-float("inf")]}), "value.held.0", "finite number"),
        (document(CURVE).replace("0.5", "1e999"), "value.seconds.1", "finite number"),
        (document(CURVE).replace("0.5", "true"), "value.seconds.1", "valid number"),
        (document(LINK).replace("1e-05", '"1e-05"'), "value.latency", "valid number"),
        (document(LINK).replace("1e-05", "null"), "value.latency", "valid number"),
        (document(LINK).replace("1e-05", "-1"), "value", "latency must be finite seconds, 0 or more"),
        (document(CUTS).replace("[0, 1]", "[0, 1, 2]"), "value.edges.0", "at most 2 items"),
        (document(VALUE).replace("bfloat16", "float17"), "value.spec", "unknown dtype"),
        (document(CHOICES).replace("true", "1"), "value.recompute.1", "valid boolean"),
        (document(SCHEDULE).replace("1B1", "1B1 1X0"), "value.table", "not an action"),
        (document(SCHEDULE).replace("1B1", "1B9"), "value", "must be of a stage"),
        (document(SCHEDULE).replace('"1B1"', "7"), "value.table.1", "valid string"),
        (document(SCHEDULE).replace('"1B1"', "[]"), "value.table.1", "valid string"),
    ],
)
def test_a_bad_document_is_refused_with_the_path_of_the_key(text, path, problem):
    error = refusal(text)
    assert error.values["path"] == path
    assert problem in error.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (document(PLACEMENT) + "x", "not JSON"),
        pytest.param("[" * 100_000, "nested too deeply", id="deep"),
        pytest.param(
            document(PLACEMENT, value={"ranks": ["?"]}).replace('"?"', "9" * 5000), "not JSON", id="many digits"
        ),
        (document(PLACEMENT).replace('{"ranks"', '{"ranks": [0], "ranks"'), "repeated key"),
        ('"' + "\\", "not JSON"),
        pytest.param('"' + '\\"' * 200_000, "not JSON", id="many quotes"),
        (document(VALUE).replace("layers.0", "\\ud800"), "invalid JSON"),
        (document(VALUE).replace("layers.0", "\ud800"), "unable to parse"),
        (b"{}", "a document must be a str"),
        (None, "a document must be a str"),
    ],
)
def test_text_that_is_not_such_json_is_refused(text, problem):
    assert problem in refusal(text).problem


def test_a_bad_cell_is_refused_with_its_row_and_column():
    error = refusal(document(SCHEDULE).replace("1B1", "1B1 1X0"))
    assert (error.values["row"], error.values["column"], error.values["cell"]) == (2, 2, "'1X0'")


def test_the_hint_for_a_newer_document_is_a_newer_penstock():
    assert refusal(document(PLACEMENT, penstock=2, value={"new": "things"})).hint == "a newer penstock"


def test_a_record_of_another_type_than_expected_is_refused():
    error = refusal(to_json(PLACEMENT), Cuts)
    assert error.values == {"path": "type", "type": "Placement", "expected": "Cuts"}


def test_a_document_that_is_too_large_is_refused(monkeypatch, tmp_path):
    save_record(PLACEMENT, tmp_path / "record.json")
    monkeypatch.setattr("penstock.ir.json_format.MAX_JSON_BYTES", 20)
    for attempt in (
        lambda: to_json(PLACEMENT),
        lambda: from_json(" " * 21),
        lambda: load_record(tmp_path / "record.json"),
    ):
        with pytest.raises(FormatError, match="the document is too large"):
            attempt()


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(content, tmp_path):
    if content:
        (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"cannot read the file \(file: .*record.json"):
        load_record(tmp_path / "record.json")


def test_a_bad_file_is_named_with_the_path_of_the_key(tmp_path):
    (tmp_path / "record.json").write_text(document(PLACEMENT, value={"ranks": ["0"]}))
    with pytest.raises(FormatError, match=r"valid integer \(file: .*record.json, path: value.ranks.0"):
        load_record(tmp_path / "record.json")


# --------------------------------------------------------------------------------------------------------------- fuzz

ODD = (None, True, 0, -1, 1.5, -0.0, 10**400, 1e308, float("nan"), "", "x", "0F0", [], [[]], [0, 1], {}, {"ranks": [0]})
# Records inside records that have a sample of their own.
TRIED_ALONE = ("plan", "graph", "partition", "costs", "cluster", "program")
# Records with more places have a third of the odd values at each.
FEW_PLACES = 30
# Left empty, these get a default, which is written out; so does a record without keys.
FILLED_IN = ("backward", "activation_bytes", "weight_grad_bytes", "state", "memory")


def places(tree, path=(), is_whole=True):
    """The path of every key and item of a tree.

    Unless it is the whole: of lists the first and the last item, and of records that are tried alone their own keys.
    """
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    if isinstance(tree, list) and not is_whole:
        items = items[:1] + items[1:][-1:]
    for key, item in items:
        yield (*path, key)
        inside = places(item, (*path, key), is_whole)
        is_near = is_whole or key not in TRIED_ALONE
        yield from inside if is_near else (place for place in inside if len(place) == len(path) + 2)


def mutations(tree, path, odds=ODD):
    """Copies of the tree with another value at the path, with an unknown key beside it, or with the item twice."""
    for odd in odds:
        yield changed(tree, path, lambda parent, key, odd=odd: parent.__setitem__(key, odd))
    yield changed(tree, path, duplicate)


def changed(tree, path, change):
    """The tree with a change at the end of the path; everything beside the path is shared."""
    tree = copy(tree)
    parent = tree
    for key in path[:-1]:
        parent[key] = copy(parent[key])
        parent = parent[key]
    change(parent, path[-1])
    return tree


def value_at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def duplicate(parent, key):
    if isinstance(parent, list):
        parent.insert(key, parent[key])
    else:
        parent[f"{key}_"] = parent[key]


def attempt(text):
    """The path of the refusal and an empty text, or None and the document as it is written again."""
    try:
        record = from_json(text)
    except FormatError as error:
        return error.values.get("path", ""), ""
    again = to_json(record)
    assert to_json(from_json(again)) == again
    return None, again


@pytest.mark.untraced
@every_record
def test_every_mutation_is_refused_near_its_place_or_read_as_written(record, is_whole):
    tree = json.loads(to_json(record))
    found = list(places(tree["value"], ("value",), is_whole))
    for number, place in enumerate(found):
        spelled = ".".join(map(str, place))
        for mutant in mutations(tree, place, every_third(ODD, number, is_whole or len(found) <= FEW_PLACES)):
            refused, again = attempt(json.dumps(mutant))
            if refused is not None:
                assert spelled.startswith(refused) or refused.startswith(spelled)
            elif place[-1] not in FILLED_IN and value_at(mutant, place) != {}:
                assert json.loads(again) == mutant
        attempt(json.dumps(changed(tree, place, lambda parent, key: parent.pop(key))))


@every_record
def test_every_mutation_of_the_frame_is_refused_or_read(record):
    tree = json.loads(to_json(record))
    for place in (("penstock",), ("type",), ("value",)):
        for mutant in mutations(tree, place):
            attempt(json.dumps(mutant))


@pytest.mark.untraced
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_characters_is_refused_or_read(data):
    text = to_json(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(start + 8, len(text))))
        text = text[:start] + data.draw(st.text('{}[]",:\\0159-.eEnultrasf NI', max_size=4)) + text[stop:]
    attempt(text)
