"""Text and CSV: torch's grammar both ways, our extension of it, and cells that say nothing."""

import csv
import io
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FormatError
from penstock.ir import (
    Backward,
    Cuts,
    Forward,
    Free,
    InputGrad,
    Orders,
    Overlap,
    Placement,
    Program,
    Recv,
    Reduce,
    Reshard,
    Schedule,
    Send,
    Unshard,
    WeightGrad,
    format_lines,
    parse_action,
    read_orders,
    write_csv,
)

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

stages, microbatches = st.integers(0, 99), st.integers(0, 999)
stage_pairs = st.lists(stages, min_size=2, max_size=2, unique=True)
actions = st.one_of(
    *(st.builds(make, stages, microbatches) for make in (Forward, Backward, InputGrad, WeightGrad, Free)),
    *(st.builds(make, stages) for make in (Reduce, Unshard, Reshard)),
    st.builds(
        lambda make, pair, m: make(pair[0], m, pair[1]), st.sampled_from([Send, Recv]), stage_pairs, microbatches
    ),
    st.builds(Overlap, st.builds(Forward, stages, microbatches), st.builds(Backward, stages, microbatches)),
)
orders = st.lists(st.lists(actions, min_size=2, max_size=6), min_size=1, max_size=4).map(Orders.of)


# ------------------------------------------------------------------------------------------------------------ cells


@given(actions)
def test_parsing_undoes_printing(action):
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("cell", "action"),
    [
        ("0SEND_F3>1", Send(0, 3, 1)),
        ("5RECV_F0<2", Recv(5, 0, 2)),
        ("5SEND_B0>2", Send(5, 0, 2)),
        ("2RECV_B0<5", Recv(2, 0, 5)),
    ],
)
def test_a_message_may_name_its_peer(cell, action):
    assert parse_action(cell) == action


@pytest.mark.parametrize(
    "cell",
    [
        *("2F0x", "2F0 ", "2F", "F0", "2f0", "-1F0", "+1F0", "01F0", "2F00", "2F1.0", "1234567F0", "٢F0"),
        *("1UNSHARD0", "1REDUCE", "nan", "", "-", "3SEND_F", "3SEND_X1", "3SEND_F1>"),
        *("(2F2;1B0)", "(2F2,1B0)OVERLAP_F_B", "(2F2;1X0)OVERLAP_F_B", "(2F2;1B0)OVERLAP_F_B1"),
    ],
)
def test_a_cell_must_match_as_a_whole(cell):
    with pytest.raises(FormatError, match="not an action"):
        parse_action(cell)


def test_either_half_of_an_overlapped_pair_may_come_first():
    assert parse_action("(1B0;2F2)OVERLAP_F_B") == parse_action("(2F2;1B0)OVERLAP_F_B")


@pytest.mark.parametrize("cell", ["(2F2;1I0)OVERLAP_F_B", "(1B0;2B2)OVERLAP_F_B", "(2F2;1REDUCE_GRAD)OVERLAP_F_B"])
def test_an_overlapped_pair_is_a_forward_and_a_full_backward(cell):
    with pytest.raises(FormatError, match=r"a forward and a full backward.*\ntry: two cells, one after the other: "):
        parse_action(cell)


@pytest.mark.parametrize(
    "cell", ["4SEND_F0>1", "1SEND_B0>4", "1RECV_F0<4", "4RECV_B0<1", "2SEND_F0>2", "0SEND_B0", "0RECV_F0"]
)
def test_values_go_to_later_stages_and_gradients_to_earlier_ones(cell):
    with pytest.raises(FormatError, match="values must go to later stages"):
        parse_action(cell)


@pytest.mark.parametrize("cell", ["1SEND_F0<4", "4RECV_F0>1"])
def test_the_arrow_points_the_way_of_the_message(cell):
    with pytest.raises(FormatError, match="a send must name its peer with >"):
        parse_action(cell)


# ---------------------------------------------------------------------------------------------------------- documents


@given(orders)
def test_csv_text_is_read_back(table):
    assert read_orders(write_csv(table)) == table


@given(orders)
def test_plain_text_is_read_back(table):
    assert read_orders(format_lines(table)) == table


def test_an_empty_cell_is_a_bubble():
    assert read_orders("0F0,,,0B0\n,1F0,1B0,\n") == Orders.of(
        [[Forward(0, 0), Backward(0, 0)], [Forward(1, 0), Backward(1, 0)]]
    )


def test_a_dash_is_a_bubble_in_plain_text():
    assert read_orders("0F0 - 0B0\n- 1F0 1B0") == read_orders("0F0,0B0\n1F0,1B0")


def test_a_rank_without_actions_prints_as_a_bubble():
    assert format_lines(Orders.of([[Forward(0, 0), Backward(0, 0)], []])) == "0F0 0B0\n-"


def test_blanks_around_cells_and_other_line_ends_do_no_harm():
    assert read_orders(" 0F0 ,0B0\r\n1F0, 1B0\r\n\r\n") == read_orders("0F0,0B0\n1F0,1B0")


def test_a_byte_order_mark_does_no_harm(tmp_path):
    (tmp_path / "orders.csv").write_text("0F0,0B0\r\n", encoding="utf-8-sig")
    assert Schedule.from_csv(tmp_path / "orders.csv") == Schedule.from_csv("0F0,0B0\n")


def test_a_single_cell_is_a_document_and_not_a_path():
    assert read_orders("0F0") == Orders.of([[Forward(0, 0)]])


@pytest.mark.parametrize(
    ("document", "row", "column", "cell"),
    [
        ("0F0,0B0\n1F0,oops", 2, 2, "'oops'"),
        ("0F0,0B0x\n1F0,1B0", 1, 2, "'0B0x'"),
        ("0F0 0B0\n1F0 - 1X0", 2, 3, "'1X0'"),
        ("0F0,9999F0", 1, 2, "'9999F0'"),
        ("0F0,0SEND_B0", 1, 2, "'0SEND_B0'"),
        ("0F0,0F70000", 1, 2, "'0F70000'"),
    ],
)
def test_a_bad_cell_is_refused_with_row_column_and_cell(document, row, column, cell):
    with pytest.raises(FormatError) as refused:
        read_orders(document)
    assert {"row": row, "column": column, "cell": cell}.items() <= refused.value.values.items()


@pytest.mark.parametrize("source", ["no-such-file.csv", "a\0b", "\ud800"])
def test_a_source_must_be_text_or_a_file(source):
    with pytest.raises(FormatError, match="cannot read the schedule file"):
        read_orders(source)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="cannot read the schedule file"):
        read_orders(tmp_path / "binary.csv")


def test_text_that_is_no_csv_is_refused_with_its_row():
    with pytest.raises(FormatError, match=r"not CSV \(row: 2"):
        read_orders("0F0,0B0\n1F0,1\rB0")


@pytest.mark.parametrize("document", ["", "\n\n"])
def test_an_empty_document_is_refused(document):
    with pytest.raises(FormatError, match="a schedule must have at least one row"):
        Schedule.from_csv(document)


@pytest.mark.parametrize("source", [5, b"0F0,0B0", None])
def test_a_document_is_read_from_a_path_or_a_text(source):
    with pytest.raises(FormatError, match=r"from a str or a pathlib.Path \(got: (int|bytes|NoneType)\)"):
        Schedule.from_csv(source)


@pytest.mark.parametrize("name", ["my orders.csv", "4 ranks, 8 microbatches", "0F0,0B0", "0F0"])
def test_a_line_that_names_a_file_is_its_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("0F0,0F1,0B0,0B1")
    assert (
        read_orders(name)
        == read_orders(str(tmp_path / name))
        == Orders.of([[Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)]])
    )


def test_a_text_that_cannot_be_written_is_refused_and_the_old_one_stays(tmp_path):
    table = Orders.of([[Forward(0, 0)]])
    with pytest.raises(FormatError, match=r"the file \(file: /nonexist/x, reason: no such directory: /nonexist\)"):
        write_csv(table, "/nonexist/x")
    with pytest.raises(FormatError, match="cannot write the file"):
        write_csv(table, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_absurdly_many_cells_are_refused(monkeypatch):
    monkeypatch.setattr("penstock.ir.text.MAX_ACTIONS", 3)
    with pytest.raises(FormatError, match=r"too many cells \(cells: 4, limit: 3\)"):
        read_orders("0F0,0F1\n1F0,1F1")


# ------------------------------------------------------------------------------------- what the orders themselves show


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("0F0,1F0\n1B0,0B0", r"a stage must be on one rank \(stage: 0, ranks: \[0, 1\]\)"),
        ("0F0,2F0", r"every stage must have actions \(stage: 1, stages: 3\)"),
        ("0F0,0B0\n,", r"every rank must have actions \(rank: 1, ranks: 2\)"),
        (",", "a schedule must have actions"),
    ],
)
def test_orders_without_a_placement_are_refused(document, problem):
    with pytest.raises(FormatError, match=problem):
        Schedule.from_csv(document)


def test_placement_and_microbatches_are_inferred():
    schedule = Schedule.from_csv("0F0,0F4,(0F1;3B2)OVERLAP_F_B\n1F0,2F0")
    assert (schedule.placement, schedule.num_microbatches) == (Placement((0, 1, 1, 0)), 5)


def test_cuts_without_messages_are_a_chain():
    assert Program.from_csv("0F0,0B0\n1F0,1B0").cuts == Cuts.chain(2)


# -------------------------------------------------------------------------------------------------------------- torch


def torch_rows(*rows):
    """The cells of rows of text as torch's own actions."""
    from torch.distributed.pipelining.schedules import _Action

    return [[_Action.from_str(cell) for cell in row.split()] for row in rows]


def torch_csv(rows):
    """CSV as torch's `_dump_csv` writes it: a missing action is an empty cell, lines end as csv has it."""
    buffer = io.StringIO()
    csv.writer(buffer).writerows(["" if action is None else str(action) for action in row] for row in rows)
    return buffer.getvalue()


@needs_torch
def test_a_schedule_that_torch_wrote_is_read():
    rows = torch_rows("0F0 0F1 1F0 1I0 0B0 1W0", "2F0 3F0 (2F1;3B0)OVERLAP_F_B")
    rows[1].insert(0, None)
    schedule = Schedule.from_csv(torch_csv(rows))
    assert str(schedule) == "0F0 0F1 1F0 1I0 0B0 1W0\n2F0 3F0 (2F1;3B0)OVERLAP_F_B"


@needs_torch
def test_a_lowered_program_that_torch_wrote_is_read():
    lines = ("0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD", "1RECV_F0 1F0 1I0 1SEND_B0 1W0")
    assert str(Program.from_csv(torch_csv(torch_rows(*lines)))) == "\n".join(lines)


@needs_torch
@pytest.mark.parametrize(
    "cell", ["2F0", "1I3", "1W3", "0B2", "1UNSHARD", "2REDUCE_GRAD", "3SEND_F1", "3RECV_B1", "(2F2;1B0)OVERLAP_F_B"]
)
def test_torch_reads_our_cells_as_its_own(cell):
    from torch.distributed.pipelining.schedules import _Action

    assert str(_Action.from_str(str(parse_action(cell)))) == cell
