"""add_shard_moves: gathered when needed, a bounded number at a time, and sharded again at the end."""

from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Overlap, Program, Reshard, Unshard
from penstock.passes import AddShardMoves, lower, verify
from penstock.schedules import SCHEDULES, build


def lowered(name: str, ahead: int, stages_per_rank: int | None = None) -> Program:
    return lower(build(name, 2, 4, stages_per_rank), passes=["add_transfers", AddShardMoves(ahead)])


def most_gathered(program: Program, rank: int) -> int:
    held = peak = 0
    for action in program.orders[rank]:
        held += isinstance(action, Unshard) - isinstance(action, Reshard)
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "interleaved_zb"])
def test_no_more_stages_are_gathered_than_stated(name: str, ahead: int) -> None:
    program = lowered(name, ahead, stages_per_rank=4)
    assert [most_gathered(program, rank) for rank in range(2)] == [ahead, ahead]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_is_gathered_for_its_passes_and_sharded_at_the_end(name: str) -> None:
    program = lowered(name, ahead=1)
    verify(program)
    for order in program.orders:
        gathered = sorted(a.stage for a in order if isinstance(a, Unshard))
        assert gathered == sorted(a.stage for a in order if isinstance(a, Reshard))


def test_a_stage_is_dropped_before_the_next_is_gathered() -> None:
    program = AddShardMoves(ahead=1)(Program.from_csv("0F0 1F0 1B0 0B0"))
    assert str(program) == "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"


def test_the_next_stage_is_gathered_ahead_of_its_use() -> None:
    program = AddShardMoves(ahead=2)(Program.from_csv("0F0 1F0 1B0 0B0"))
    assert str(program) == "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 0B0 0RESHARD"


def test_both_stages_of_an_overlapped_pair_are_gathered_even_with_nothing_ahead() -> None:
    before = Program.from_csv("0F0 1F0 0F1 (1F1;1B0)OVERLAP_F_B 1B1 0F2 (1F2;0B0)OVERLAP_F_B 1B2 0B1 0B2")
    after = AddShardMoves(ahead=1)(before)
    pair = next(place for place, a in enumerate(after.orders[0]) if isinstance(a, Overlap) and a.backward.stage == 0)
    assert [str(action) for action in after.orders[0][pair - 1 : pair + 2]] == [
        "1UNSHARD",
        "(1F2;0B0)OVERLAP_F_B",
        "0RESHARD",
    ]
    verify(after)


@pytest.mark.parametrize("ahead", [0, 1.5, True, "2"])
def test_gathering_anything_but_a_count_is_refused(ahead: Any) -> None:
    with pytest.raises(ScheduleError, match=rf"ahead must be a whole number, 1 or more \(ahead: {ahead!r}\)"):
        AddShardMoves(ahead)
