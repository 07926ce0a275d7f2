"""The part of verify that follows what ranks hold: activations, freed values, gathered parameters, summed gradients."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir import Fact, Kind, Makers, Passes, Program, microbatch_of, stage_of
from penstock.passes.deadlock import action_at

_USERS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.SEND, Kind.RECV)
_COMPUTERS = _USERS[:4]


def check_frees(program: Program, passes: Passes) -> None:
    """Nothing is used after it is freed, nothing is freed twice."""
    freed = np.flatnonzero(program.table.kinds == Kind.FREE)
    codes = program.table.codes[freed]
    gone = np.full((program.num_stages, program.num_microbatches), np.iinfo(np.int64).max)
    gone[stage_of(codes), microbatch_of(codes)] = freed
    if len(np.unique(codes)) < len(codes):
        _, first = np.unique(codes, return_index=True)
        second = int(np.setdiff1d(np.arange(len(codes)), first)[0])
        raise ScheduleError("a stage's values are freed twice", **_where(program, int(freed[second])))
    uses = np.isin(passes.kind, _USERS)
    late = passes.index[uses] > gone[passes.stage[uses], passes.microbatch[uses]]
    if late.any():
        index = int(passes.index[uses][np.argmax(late)])
        raise ScheduleError("an action uses values after they are freed", **_where(program, index))


def check_reductions(program: Program, makers: Makers) -> None:
    """If any stage is reduced, every stage is, once, after its last weight gradient."""
    index = np.flatnonzero(program.table.kinds == Kind.REDUCE)
    if not len(index):
        return
    stage = stage_of(program.table.codes[index])
    times = np.bincount(stage, minlength=program.num_stages)
    if (times != 1).any():
        odd = int(np.argmax(times != 1))
        raise ScheduleError("every stage is reduced exactly once", stage=odd, times=int(times[odd]))
    early = index < makers[Fact.WEIGHT_GRADIENT].max(axis=1)[stage]
    if early.any():
        where = _where(program, int(index[np.argmax(early)]))
        raise ScheduleError("a stage is reduced before its last weight gradient", **where)


def check_shards(program: Program, passes: Passes) -> None:
    """If parameters move at all, a stage computes only while they are gathered, and moves alternate."""
    moves = np.isin(passes.kind, (Kind.UNSHARD, Kind.RESHARD))
    if not moves.any():
        return
    chosen = np.flatnonzero(moves | np.isin(passes.kind, _COMPUTERS))
    chosen = chosen[np.lexsort((passes.index[chosen], passes.stage[chosen]))]
    kind, stage = passes.kind[chosen], passes.stage[chosen]
    change = np.where(kind == Kind.UNSHARD, 1, np.where(kind == Kind.RESHARD, -1, 0))
    opens = np.concatenate(([True], stage[1:] != stage[:-1]))
    total = np.cumsum(change)
    gathered = total - np.repeat((total - change)[opens], np.diff(np.append(np.flatnonzero(opens), len(stage))))
    wrong = np.where(change == 0, gathered != 1, gathered != (change == 1))
    if wrong.any():
        where = _where(program, int(passes.index[chosen][np.argmax(wrong)]))
        raise ScheduleError("parameters are not sharded or gathered as the action needs", **where)


def check_in_flight(program: Program, makers: Makers, limit: int | None) -> None:
    """No rank holds more (stage, microbatch) than stated."""
    if limit is None:
        return
    held = in_flight(program, makers)
    if held.max() > limit:
        where = _where(program, int(np.argmax(held > limit)))
        raise ScheduleError("more microbatches in flight than stated", **where, most=int(held.max()), limit=limit)


def in_flight(program: Program, makers: Makers) -> NDArray[np.int64]:
    """Per index how many (stage, microbatch) its rank holds while the action runs."""
    change = np.zeros(len(program.table.codes) + 1, dtype=np.int64)
    np.add.at(change, makers[Fact.OUTPUT].ravel(), 1)
    np.add.at(change, makers[Fact.WEIGHT_GRADIENT].ravel() + 1, -1)
    # A rank ends with what it began, so one running sum over all ranks starts every rank at zero.
    return np.cumsum(change)[:-1]


def _where(program: Program, index: int) -> dict[str, Any]:
    rank = int(program.table.rank_of[index])
    return {
        "action": action_at(program, index),
        "rank": rank,
        "position": index - int(program.table.starts[rank]),
    }
