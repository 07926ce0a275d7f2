"""Plan and Run: checks, tables, and files."""

import math
from dataclasses import replace

import pytest

from penstock.api.simulation import schedule, simulate
from penstock.errors import FormatError, PartitionError, PlanError, RunError
from penstock.ir import (
    Backward,
    Candidate,
    Choices,
    Cluster,
    Curve,
    Cuts,
    Forward,
    Graph,
    Node,
    Partition,
    Placement,
    Plan,
    Prediction,
    Program,
    Run,
    Schedule,
    Search,
    Series,
    StageCosts,
    StateBytes,
    StepMetrics,
    TensorSpec,
    Trace,
    Value,
)

COSTS = StageCosts(
    forward=(0.25, 0.5),
    input_grad=(0.5, 0.5),
    weight_grad=(0.5, 1.0),
    activation_bytes=(3 * 2**20, 100),
    state=(StateBytes(parameters=5 * 2**30), StateBytes(parameters=2**41)),
)
SCHEDULE = Schedule.of(Placement((0, 1)), 1, [[Forward(0, 0), Backward(0, 0)], [Forward(1, 0), Backward(1, 0)]])
PREDICTED = Prediction(makespan=3.25, bubble=0.5, span=3.25, span_bubble=0.5, peaks=(2048, 100), lower_bound=3.0)
VALUES = [Value(name, TensorSpec((2, 4), requires_grad=True)) for name in ("embed", "block.0", "head")]
GRAPH = Graph(
    nodes=(
        Node("embed", ("x",), (VALUES[0],)),
        Node("block.0", ("embed",), (VALUES[1],)),
        Node("head", ("block.0",), (VALUES[2],)),
    ),
    inputs=(Value("x", TensorSpec((2,), "int64")),),
    outputs=("head",),
)
PLAN = Plan(
    graph=GRAPH,
    partition=Partition((("embed", "block.0"), ("head",))),
    schedule=SCHEDULE,
    choices=Choices("linear", "gpipe", (False, True)),
    costs=COSTS,
    cluster=Cluster(2),
    predicted=PREDICTED,
)


def test_a_plan_answers_with_its_sizes_and_its_bound():
    assert (PLAN.num_ranks, PLAN.num_stages, PLAN.num_microbatches) == (2, 2, 1)
    assert PLAN.lower_bound == 3.0


def test_the_cuts_of_a_plan_are_those_of_its_partition():
    assert PLAN.cuts == Cuts.chain(2)


def test_a_partition_of_another_graph_is_refused():
    with pytest.raises(PartitionError, match="every node must be in a stage"):
        replace(PLAN, partition=Partition((("embed",), ("head",))))


def test_a_plan_prints_as_a_table():
    assert str(PLAN).splitlines() == [
        "2 stages (linear) on 2 ranks, schedule gpipe, 1 microbatch, 1 stage recomputed",
        "step 3.25 s, bubble 50.0 %, at best 3 s",
        "peak per rank: 2 KiB, 100 B, without the state of an optimizer",
        "",
        "stage  rank  nodes  forward  backward  activations  parameters  first node",
        "    0     0      2   250 ms       1 s        3 MiB       5 GiB  embed",
        "    1     1      1   500 ms     1.5 s        100 B       2 TiB  head",
    ]


def test_a_name_cannot_change_the_terminal_that_a_plan_is_printed_on():
    hostile = replace(PLAN, choices=replace(PLAN.choices, schedule="\x1b[2Jgpipe"))
    assert "schedule ?[2Jgpipe, 1 microbatch" in str(hostile)
    assert "\x1b" not in hostile.describe()


def test_a_plan_describes_why_it_was_chosen_and_what_lost():
    slower = replace(PREDICTED, makespan=4.0)
    candidates = (
        Candidate(PLAN.choices, 1, 2, PREDICTED),
        Candidate(Choices("uniform", "1f1b", (False, False), "vee"), 4, 8, slower, "23 % slower"),
    )
    text = replace(PLAN, search=Search(candidates, ("Rank 0 is the busiest.",))).describe()
    assert text.splitlines()[8:] == [
        "Rank 0 is the busiest.",
        "",
        "  step  bubble   peak  messages   stages  microbatches  recomputed  schedule     cuts  why not",
        "3.25 s  50.0 %  2 KiB         2  2 given             1           1     gpipe   linear  chosen",
        "   4 s  50.0 %  2 KiB         8    2 vee             4           0      1f1b  uniform  23 % slower",
    ]


def test_the_first_candidate_is_the_chosen_one():
    lost = Candidate(PLAN.choices, 1, 2, PREDICTED, "slower")
    with pytest.raises(PlanError, match="must be the chosen one"):
        Search((lost,))


def test_a_plan_is_saved_and_loaded(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert hash(Plan.load(str(tmp_path / "plan.json"))) == hash(PLAN)


def test_a_file_of_another_record_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace('"type": "Plan"', '"type": "Schedule"'))
    with pytest.raises(FormatError, match=r"unexpected type \(file: .*plan.json, path: type"):
        Plan.load(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"partition": Partition((("embed",), ("block.0",), ("head",)))},
        {"costs": StageCosts.uniform(3)},
        {"choices": Choices("linear", "gpipe", (False,))},
        {"schedule": Schedule.of(Placement((0,)), 1, [[Forward(0, 0)]])},
    ],
)
def test_the_parts_agree_on_the_stages(changed):
    with pytest.raises(PlanError, match="must have the same number of stages"):
        replace(PLAN, **changed)


@pytest.mark.parametrize("changed", [{"cluster": Cluster(3)}, {"predicted": replace(PREDICTED, peaks=(1, 2, 3))}])
def test_the_parts_agree_on_the_ranks(changed):
    with pytest.raises(PlanError, match="must have the same number of ranks"):
        replace(PLAN, **changed)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"makespan": math.nan}, "makespan must be finite seconds"),
        ({"lower_bound": -1.0}, "lower bound must be finite seconds"),
        ({"lower_bound": 3.5}, "can exceed the makespan"),
        ({"span": 3.5}, "can exceed the makespan"),
        ({"bubble": 1.5}, "a bubble must be a share"),
        ({"span_bubble": math.nan}, "a bubble must be a share"),
        ({"peaks": (1, -1)}, "peak bytes must be 0 or more"),
    ],
)
def test_a_prediction_that_makes_no_sense_is_refused(changed, problem):
    with pytest.raises(PlanError, match=problem):
        replace(PREDICTED, **changed)


def test_a_prediction_sums_up_a_trace():
    program = Program(SCHEDULE.placement, 1, Cuts.chain(2), SCHEDULE.table)
    curves = (Curve(Series([0.0]), Series([8.0])), Curve(Series([0.0]), Series([9.0])))
    trace = Trace(program, Series([0, 3, 1, 2]), Series([1, 5, 2, 3]), Series([]), Series([]), curves)
    predicted = Prediction.of(trace, lower_bound=4.5)
    assert predicted == Prediction(5.0, trace.bubble, 5.0, trace.span_bubble, (8, 9), 4.5)
    assert predicted.peak_bytes(1) == trace.peak_bytes(1)


STEPS = tuple(StepMetrics(number, 3.0 - number / 10, seconds, 8) for number, seconds in enumerate((9.0, 2.0, 4.0, 3.0)))
RUN = Run(PLAN, STEPS, (simulate(PLAN),), (5, 6), 1e-7, (("torch", "2.13.0"),))


def test_a_run_is_saved_and_loaded(tmp_path):
    RUN.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == RUN


def test_a_plan_is_no_run(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(FormatError, match=r"unexpected type .*type: Plan, expected: Run"):
        Run.load(tmp_path / "plan.json")


def test_a_step_takes_what_most_take_after_the_first():
    assert RUN.step_seconds == 3.0
    assert replace(RUN, steps=STEPS[:1]).step_seconds == 9.0
    assert replace(RUN, steps=()).step_seconds is None


def test_a_step_of_several_batches_is_predicted_to_take_that_many_times_the_plan():
    assert RUN.predicted_seconds == PLAN.predicted.makespan
    assert replace(RUN, batches_per_step=3).predicted_seconds == 3 * PLAN.predicted.makespan


def test_the_last_recorded_step_is_the_trace():
    assert RUN.trace is RUN.traces[-1]
    assert replace(RUN, traces=()).trace is None


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_kept_as_none(figure, tmp_path):
    run = replace(RUN, steps=(StepMetrics(0, figure, 1.0, 8, figure), StepMetrics(1, 2.5, 1.0, 8)))
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json").steps[0] == StepMetrics(0, None, 1.0, 8, None)
    assert run.losses == (2.5,)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"steps": STEPS[::-1]}, "the steps of a run must be in order"),
        ({"peaks": (1,)}, "peaks must have one entry per rank"),
        ({"peaks": (1, -1)}, "peak bytes must be 0 or more"),
        ({"batches_per_step": 0}, r"batches_per_step must be a whole number, 1 or more \(got: 0\)"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(changed, problem):
    with pytest.raises(RunError, match=problem):
        replace(RUN, **changed)


def test_a_trace_of_other_ranks_is_refused():
    with pytest.raises(RunError, match=r"must have the ranks of the plan \(ranks: 3, planned: 2\)"):
        replace(RUN, traces=(simulate(schedule("gpipe", 3, 2)),))


@pytest.mark.parametrize(("seconds", "samples"), [(math.nan, 8), (-1.0, 8), (1.0, -1)])
def test_a_step_of_no_time_or_size_is_refused(seconds, samples):
    with pytest.raises(RunError, match=r"0 or more|0 samples or more"):
        StepMetrics(0, 1.0, seconds, samples)
