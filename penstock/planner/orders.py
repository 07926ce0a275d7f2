"""Orders: the plans that a draft can become, with the schedule asked for, those of the table, or one made for it."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.ir import Plan, Schedule
from penstock.planner.draft import GIVEN, Draft
from penstock.planner.fitting import excess
from penstock.planner.recompute import one_more
from penstock.planner.request import AUTO, Request
from penstock.planner.synthesis import synthesise
from penstock.schedules import SCHEDULES, build_on, find

_PROMISING = tuple(sorted(SCHEDULES, key=lambda name: not SCHEDULES[name].splits_backward))
"""all names, those first that are mostly faster"""


class Found(NamedTuple):
    """A plan and the draft that it was made of."""

    plan: Plan
    draft: Draft


def ordered(draft: Draft, request: Request) -> Iterator[Found]:
    """With the schedule asked for; for "auto" with every schedule of the table that suits the placement."""
    asked = request.schedule
    names = _PROMISING if asked == AUTO else (GIVEN,) if isinstance(asked, Schedule) else (find(asked).name,)
    for name in names:
        found = _with(draft.recomputing_all() if request.recompute == "full" else draft, name, asked)
        while found is not None and request.recompute == AUTO and excess(found.plan) > 0:
            flags = one_more(found.plan, draft.plain_costs, draft.thrifty_costs)
            if flags == found.plan.choices.recompute:
                break
            found = _with(draft.recomputing(flags), name, asked)
        if found is not None:
            yield found


def synthesised(draft: Draft, budget_seconds: float) -> Iterator[Found]:
    """With an order made for these costs and this memory; nothing where no order fits."""
    try:
        made = synthesise(draft.problem, budget_seconds=budget_seconds)
    except ScheduleError:
        return
    yield Found(draft.plan(made.best.schedule, AUTO, made.bound.seconds), draft)


def _with(draft: Draft, name: str, asked: str | Schedule) -> Found | None:
    """None where the schedule puts stages elsewhere, or does not work with so many of them."""
    if isinstance(asked, Schedule):
        return Found(draft.plan(asked, GIVEN), draft)
    built = build_on(draft.placement, name, draft.num_microbatches, draft.costs)
    return Found(draft.plan(built, name), draft) if built is not None else None
