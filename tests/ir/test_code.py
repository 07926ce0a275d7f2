"""The compact form: packing loses nothing, and arrays behave like single numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import (
    MAX_MICROBATCHES,
    MAX_STAGES,
    Backward,
    Forward,
    Free,
    InputGrad,
    Kind,
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
    with pytest.raises(ValueError):
        decode(np.array([15]))
