"""What all ranks of a Pipeline must have been given alike, and which plan they follow if each has its own."""

import hashlib
from typing import Any

from penstock.ir import Plan, from_json, to_json
from penstock.runtime import Agreement, ProcessGroups, RankSync, RunOptions

_DIGITS = 12
"""of a digest, so that a float holds it exactly"""


def agreed(
    plan: Plan, groups: ProcessGroups, sync: RankSync, loss_fn: object, options: RunOptions, **choices: Any
) -> Plan:
    """The plan that all ranks follow, after they have compared what they were given.

    Ranks that searched for a plan, each by what it measured, may have found different ones for the same wishes: then
    all take that of the first rank.
    """
    lines = _lines(plan)
    given = {
        **(dict(plan.search.asked) or lines),
        "model": plan.graph.fingerprint,
        "loss_fn": "none" if loss_fn is None else "given",
        **{name: repr(value) for name, value in choices.items()},
        "seed": options.seed,
        "nonfinite": options.nonfinite,
        "check_inputs_every": options.check_inputs_every,
        "restore_gradients": options.restore_gradients,
    }
    if sync.establish(Agreement.of_options(given), int(_digest(repr(lines).encode()), 16)):
        return plan
    return from_json(groups.broadcast_text_to_all(to_json(plan)), Plan)


def _lines(plan: Plan) -> dict[str, object]:
    """What a plan makes the ranks do."""
    schedule, stages = plan.schedule, plan.partition.stages
    return {
        "number of microbatches": plan.num_microbatches,
        "schedule": f"{plan.choices.schedule}, orders {_digest(schedule.table.codes.tobytes())}",
        "placement": [schedule.placement[stage] for stage in range(plan.num_stages)],
        "stages": f"{len(stages)} of {list(map(len, stages))} nodes {_digest(repr(stages).encode())}",
        "recompute": list(plan.choices.recompute),
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
