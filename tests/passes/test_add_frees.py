"""add_frees: everything is freed once, as early as its last use allows."""

import pytest

from penstock.ir import Action, Free, Overlap, Send
from penstock.ir import ComputeAction as Compute
from penstock.passes import AddFrees, AddTransfers
from penstock.schedules import SCHEDULES, build
from tests.passes.corpus import some_cuts


def uses(action: Action, stage: int, microbatch: int) -> bool:
    parts = (action.forward, action.backward) if isinstance(action, Overlap) else (action,)
    return any(isinstance(a, Compute | Send) and (a.stage, a.microbatch) == (stage, microbatch) for a in parts)


@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_is_freed_directly_after_its_last_use(name: str, shape: int) -> None:
    schedule = build(name, 3, 4)
    program = AddFrees()(AddTransfers()(schedule.with_cuts(some_cuts(schedule.num_stages, shape))))
    for order, stages in zip(program.orders, program.placement.stages, strict=True):
        assert sum(isinstance(a, Free) for a in order) == len(stages) * 4
        busy = [a for a in order if not isinstance(a, Free)]
        for stage in stages:
            for microbatch in range(4):
                last = max(place for place, a in enumerate(busy) if uses(a, stage, microbatch))
                done = [a for a in order[: order.index(Free(stage, microbatch))] if not isinstance(a, Free)]
                assert done == busy[: last + 1]
