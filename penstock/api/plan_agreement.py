"""agree_on_plan: the arguments of a Pipeline compared over all ranks, and the one plan that all ranks follow."""

import hashlib
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from penstock.ir import Plan, from_json, to_json
from penstock.runtime import Agreement, ProcessGroups, RankSync, RunOptions

_DIGITS = 12  # of a digest, so that a float holds it exactly


def agree_on_plan(
    model: nn.Module,
    plan: Plan,
    groups: ProcessGroups,
    sync: RankSync,
    loss_fn: object,
    options: RunOptions,
    **choices: Any,
) -> Plan:
    """Compare the arguments of all ranks, and return the plan that all of them follow.

    Ranks that searched for a plan with the same options may have different plans, because their measurements, or the
    lengths of their example batches, differ: then all ranks follow that of the first rank. `choices` are the options of
    the Pipeline that must be equal.
    """
    graph, orders, stages = plan.graph, plan.orders, plan.partition.stages
    summary = {
        "number of microbatches": plan.num_microbatches,
        "schedule": f"{plan.choices.schedule}, orders {_digest(orders.table.codes.tobytes())}",
        "placement": [orders.placement[stage] for stage in range(plan.num_stages)],
        "stages": f"{len(stages)} of {list(map(len, stages))} nodes {_digest(repr(stages).encode())}",
        "recompute": list(plan.choices.recompute),
    }
    given = {
        # Plans that were searched for are compared by the options of the search, given ones by their content.
        **(dict(plan.search.asked) or summary),
        "loss_fn": "none" if loss_fn is None else "given",
        **{name: repr(value) for name, value in choices.items()},
        # Ranks may have different deadlines.
        **{name: value for name, value in asdict(options).items() if name != "deadline_seconds"},
        "version of penstock": version("penstock"),
        "version of torch": str(torch.__version__),
        "version of Python": ".".join(map(str, sys.version_info[:2])),
        # The model without the shapes of its values: ranks may have planned with batches of different lengths.
        **{
            f"parameter {name}": f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            for name, tensor in model.named_parameters(remove_duplicate=False)
        },
        "model": f"{len(graph.nodes)} nodes, {graph.model_fingerprint[:_DIGITS]}",
    }
    plan_digest = _digest(repr((summary, graph.fingerprint)).encode())
    if sync.first_sync(Agreement.of_options(given), int(plan_digest, 16)):
        return plan
    return from_json(groups.broadcast_text_to_all(to_json(plan)), Plan)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
