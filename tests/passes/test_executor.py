"""The executor that verify is tried against: it must itself tell a good run from a bad one, for the right reason."""

import threading

import pytest

from penstock.ir import Cuts, Program
from tests.passes.executor import Draft, execute, failure, unsplit
from tests.passes.transports import InOrder, Rendezvous, Transport, WrongRunError

LAWFUL = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
RING = ((0, 4), (1, 5), (2, 3))


def draft(text: str, cuts: Cuts | None = None) -> Draft:
    program = Program.from_csv(text, cuts)
    return Draft(program.placement, program.num_microbatches, program.cuts, program.orders)


@pytest.mark.parametrize("transport", [Rendezvous, InOrder])
def test_a_lawful_program_gives_the_gradients_of_the_unsplit_model(transport: type[Transport]) -> None:
    assert execute(draft(LAWFUL), transport) == unsplit(Cuts.chain(2), 2)


def test_the_result_depends_on_every_input() -> None:
    results = [unsplit(Cuts.chain(3), 2), unsplit(Cuts.chain(3), 1), unsplit(Cuts.of(3, [(0, 1), (0, 2), (1, 2)]), 2)]
    assert len({gradient for result in results for gradient in result.values()}) == 9


def test_a_ring_of_sends_hangs_only_where_sends_wait() -> None:
    text = "\n".join(
        [
            "0F0 0SEND_F0>4 3RECV_F0   3F0 3B0 0B0",
            "1F0 1SEND_F0>5 4RECV_F0<0 4F0 4B0 1B0",
            "2F0 2SEND_F0   5RECV_F0<1 5F0 5B0 2B0",
        ]
    )
    ring = draft(text, Cuts.of(6, RING, without_gradient=RING))
    execute(ring, InOrder)
    with pytest.raises(WrongRunError, match="hang"):
        execute(ring, Rendezvous)


def test_crossed_receives_swap_values_only_where_there_are_no_tags() -> None:
    crossed = draft(LAWFUL.replace("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0"))
    execute(crossed, Rendezvous)
    with pytest.raises(WrongRunError, match="wrong result"):
        execute(crossed, InOrder)


def test_a_receive_that_meets_a_receive_hangs_only_where_there_are_no_tags() -> None:
    text = "0F0 0RECV_B0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"
    execute(draft(text), Rendezvous)
    with pytest.raises(WrongRunError, match="hang"):
        execute(draft(text), InOrder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0F0 0B0", "done twice"),
        ("0F0 0B0 0W0", "done twice"),
        ("0F0", "wrong result"),
        ("0F0 0I0", "wrong result"),
        ("0B0 0F0", "before it exists"),
        ("(0F0;0B0)OVERLAP_F_B", "before it exists"),
        ("0F0 0FREE0 0B0", "before the weight gradient"),
        ("0F0 0B0 0FREE0 0FREE0", "freed already"),
        ("0F0 0REDUCE_GRAD 0B0", "before the last weight gradient"),
        ("0F0 0B0 1F0 1B0 1REDUCE_GRAD", "some stages are reduced"),
        ("0F0 0UNSHARD 0B0", "sharded parameters"),
        ("0RESHARD 0UNSHARD 0F0 0B0", "finds it so already"),
        ("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", "does not leave the rank"),
    ],
)
def test_one_rank_alone_goes_wrong(text: str, reason: str) -> None:
    cuts = Cuts.chain(2) if "1F0" in text and "REDUCE" not in text else Cuts.of(1 + text.count("1F0"), [])
    assert reason in failure(draft(text, cuts))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "before its values exist"),
        ("1RECV_F0 ", "", "before their receive is posted"),
        ("0SEND_F1", "", "hang"),
        ("0SEND_F1", "0SEND_F1 0SEND_F1", "done twice"),
        (" 1SEND_B1", "", "hang"),
        (" 1SEND_B1", " 1FREE1 1SEND_B1", "freed already"),
    ],
)
def test_two_ranks_go_wrong(old: str, new: str, reason: str) -> None:
    assert reason in failure(draft(LAWFUL.replace(old, new), Cuts.chain(2)))


def test_a_message_that_no_cut_asks_for_carries_nothing() -> None:
    assert "no cut leads there" in failure(draft(LAWFUL, Cuts.of(2, [])))


def test_runs_leave_no_threads_behind_beyond_the_pool() -> None:
    before = threading.active_count()
    for _ in range(50):
        failure(draft(LAWFUL))
    assert threading.active_count() <= max(before, 17)
