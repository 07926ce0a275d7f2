"""Orders: codes of actions, and arrays of them per rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.ir import (
    MAX_MICROBATCHES,
    MAX_STAGES,
    Backward,
    Forward,
    Free,
    InputGrad,
    Kind,
    Orders,
    Overlap,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
    WeightGrad,
    decode,
    encode,
    kind_of,
    microbatch_of,
    pack,
    peer_microbatch_of,
    peer_of,
    stage_of,
)
from penstock.ir import orders as module  # noqa: TID251

stages = st.integers(0, MAX_STAGES - 1)
microbatches = st.integers(0, MAX_MICROBATCHES - 1)
pairs = st.lists(stages, min_size=2, max_size=2, unique=True)
actions = st.one_of(
    *(st.builds(make, stages, microbatches) for make in (Forward, Backward, InputGrad, WeightGrad, Free)),
    *(st.builds(make, stages) for make in (Reduce, Unshard, Reshard)),
    st.builds(lambda make, pair, m: make(pair[0], m, pair[1]), st.sampled_from([Send, Recv]), pairs, microbatches),
    st.builds(Overlap, st.builds(Forward, stages, microbatches), st.builds(Backward, stages, microbatches)),
)


@given(st.lists(actions, max_size=20))
def test_decoding_undoes_encoding(order):
    assert decode(encode(order)) == tuple(order)


@given(st.sampled_from(Kind), stages, microbatches, stages, microbatches)
def test_every_part_of_a_code_is_read_back(kind, stage, microbatch, peer, peer_microbatch):
    code = pack(kind, stage, microbatch, peer, peer_microbatch)
    parts = [kind_of, stage_of, microbatch_of, peer_of, peer_microbatch_of]
    assert [int(part(code)[0]) for part in parts] == [kind, stage, microbatch, peer, peer_microbatch]


def test_codes_are_never_negative_so_that_they_sort_and_shift_safely():
    largest = pack(Kind.OVERLAP, MAX_STAGES - 1, MAX_MICROBATCHES - 1, MAX_STAGES - 1, MAX_MICROBATCHES - 1)
    assert largest[0] > 0


def test_packing_broadcasts_arrays_against_numbers():
    codes = pack(Kind.FORWARD, 3, np.arange(4))
    assert decode(codes) == tuple(Forward(3, microbatch) for microbatch in range(4))


def test_equal_codes_share_one_action_object():
    first, second = decode(pack(Kind.BACKWARD, np.array([1, 1]), 2))
    assert first is second


def test_a_code_of_no_kind_is_no_action():
    with pytest.raises(ValueError, match="15 is not a valid Kind"):
        decode(np.array([15]))


F, B = Forward, Backward
TWO_RANKS = Orders.of([[F(0, 0), F(0, 1), B(0, 0)], [F(1, 0), B(1, 0)]])


def test_orders_read_as_a_tuple_of_actions_per_rank():
    assert len(TWO_RANKS) == 2
    assert TWO_RANKS[1] == (F(1, 0), B(1, 0))
    assert list(TWO_RANKS) == [TWO_RANKS[0], TWO_RANKS[1]]


def test_the_orders_of_all_ranks_lie_end_to_end():
    assert TWO_RANKS.starts.tolist() == [0, 3, 5]
    assert TWO_RANKS.rank_of.tolist() == [0, 0, 0, 1, 1]
    assert TWO_RANKS.kinds.tolist() == [Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.FORWARD, Kind.BACKWARD]
    assert TWO_RANKS.rank(1).tolist() == TWO_RANKS.codes[3:].tolist()


def test_orders_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        TWO_RANKS.codes[0] = 0


def test_orders_do_not_change_with_the_array_they_were_made_from():
    codes = encode([F(0, 0)])
    orders = Orders([codes])
    codes[0] = encode([B(0, 0)])[0]
    assert orders[0] == (F(0, 0),)


def test_equal_orders_are_equal_and_hash_alike():
    same = Orders.of([[F(0, 0), F(0, 1), B(0, 0)], [F(1, 0), B(1, 0)]])
    assert same == TWO_RANKS
    assert hash(same) == hash(TWO_RANKS)
    assert TWO_RANKS != "orders"


def test_the_border_between_ranks_counts_for_equality():
    assert Orders.of([[F(0, 0)], [F(0, 1)]]) != Orders.of([[F(0, 0), F(0, 1)], []])


def test_select_keeps_the_chosen_actions_on_their_ranks():
    forwards = TWO_RANKS.select(TWO_RANKS.kinds == Kind.FORWARD)
    assert forwards == Orders.of([[F(0, 0), F(0, 1)], [F(1, 0)]])


def test_insert_puts_actions_before_an_index_and_at_the_ends():
    grown = TWO_RANKS.insert(
        np.array([5, 3, 3, 3]), np.array([1, 0, 1, 0]), encode([B(1, 9), Send(0, 7, 1), Recv(1, 7, 0), Send(0, 8, 1)])
    )
    assert grown == Orders.of(
        [
            [F(0, 0), F(0, 1), B(0, 0), Send(0, 7, 1), Send(0, 8, 1)],
            [Recv(1, 7, 0), F(1, 0), B(1, 0), B(1, 9)],
        ]
    )


def test_insert_finds_the_place_next_to_a_rank_without_actions():
    grown = Orders.of([[F(0, 0)], [], [F(2, 0)]]).insert(np.array([1, 1]), np.array([1, 2]), encode([F(1, 0), B(2, 1)]))
    assert grown == Orders.of([[F(0, 0)], [F(1, 0)], [B(2, 1), F(2, 0)]])


def test_passes_show_both_halves_of_an_overlapped_pair_under_its_index():
    passes = Orders.of([[F(0, 0), Overlap(F(1, 2), B(0, 3))]]).passes
    assert passes.index.tolist() == [0, 1, 1]
    assert passes.kind.tolist() == [Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD]
    assert list(zip(passes.stage.tolist(), passes.microbatch.tolist(), strict=True)) == [(0, 0), (1, 2), (0, 3)]


def test_orders_need_a_rank():
    with pytest.raises(ScheduleError, match="at least one rank"):
        Orders([])


def test_absurdly_many_actions_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_ACTIONS", 4)
    with pytest.raises(ScheduleError, match=r"too many actions \(actions: 5, limit: 4\)"):
        Orders.of(TWO_RANKS)


def test_orders_print_their_beginning():
    assert repr(TWO_RANKS) == "Orders(2 ranks, 5 actions: 0F0 0F1 0B0 | 1F0 1B0 ...)"
