"""Plans without measurements: for any model, and for a chain under every schedule in many sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from torch import nn

import penstock
from penstock.api import example_batch
from penstock.api.measuring import measured_model
from penstock.capture import Captured, capture
from penstock.ir import Backward, Graph, Plan, Profile, WeightGrad
from penstock.planner import Measured, PlanOptions, search
from penstock.runtime import model_part
from penstock.schedules import SCHEDULES
from tests.small_models import WIDTH, chain, noise

ROWS = 10
RANKS = (1, 2, 3, 4)
DEPTHS = {name: scheduler.allowed_stages_per_rank or (1, 2, 3) for name, scheduler in SCHEDULES.items()}
SIZES = [(name, ranks, depth) for name in SCHEDULES for ranks in RANKS for depth in DEPTHS[name]]
BATCHES = tuple((noise(ROWS, WIDTH, seed=2 * step), noise(ROWS, WIDTH, seed=2 * step + 1)) for step in range(3))


@cache
def the_chain(stages: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model with a block for every stage, and its initial state."""
    model = chain(stages)
    return model, {name: value.clone() for name, value in model.state_dict().items()}


def fresh_chain(stages: int) -> nn.Module:
    """The chain in its initial state, without gradients."""
    model, state = the_chain(stages)
    model.load_state_dict(state)
    model.zero_grad()
    return model


@cache
def chain_graph(stages: int) -> Graph:
    """The graph of the chain."""
    return penstock.capture(fresh_chain(stages), (BATCHES[0][0],)).graph


def quick_plan(model: nn.Module, *batch: Any, partitioner: Any = "uniform", **choices: Any) -> Plan:
    """A plan from `penstock.plan`, always the same: nothing is measured, and the first candidate is taken."""
    with mock.patch.object(example_batch, "measure", _unmeasured):
        return penstock.plan(model, *batch, partitioner=partitioner, budget_seconds=0.0, **choices)


def _unmeasured(captured: Captured, loss_fn: Any = None, speed: Any = None, budget: float = 0.0) -> Profile:
    return Profile.uniform(measured_model(captured, loss_fn is not None).graph)


@cache
def chain_plan(name: str, ranks: int, depth: int, microbatches: int) -> Plan:
    """A plan for the chain with one block per stage."""
    graph = chain_graph(ranks * depth)
    models = {microbatches: Measured(graph, Profile.uniform(graph))}
    options = PlanOptions(ranks, schedule=name, partitioner="uniform", stages_per_rank=depth, budget_seconds=0.0)
    return search(models, options)


def accumulates_in_order(plan: Plan) -> bool:
    """Whether every stage adds up the gradients of its weights from the first microbatch to the last."""
    added = [action for order in plan.schedule.orders for each in order for action in each.parts]
    passes = [action for action in added if isinstance(action, Backward | WeightGrad)]
    stages = [[action.microbatch for action in passes if action.stage == s] for s in range(plan.num_stages)]
    return all(order == sorted(order) for order in stages)


@contextmanager
def shared_recordings() -> Iterator[None]:
    """Plans and pipelines over one model share its recordings."""
    with (
        mock.patch.object(example_batch, "record_model", _recorded),
        mock.patch.object(model_part.Captured, "planned", _planned),
    ):
        yield


_PLANNED = Captured.planned
_CAPTURED: dict[nn.Module, Captured] = {}
_RECORDED: dict[Any, Captured] = {}


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], granularity: Any) -> Captured:
    if kwargs:
        return capture(model, args, kwargs, granularity)
    key = (model, str(granularity), *(arg.shape for arg in args))
    if key not in _RECORDED:
        _RECORDED[key] = capture(model, args, kwargs, granularity)
    return _RECORDED[key]


def _planned(model: nn.Module, graph: Any, *granularity: Any) -> Captured:
    if model not in _CAPTURED:
        _CAPTURED[model] = _PLANNED(model, graph, *granularity)
    return _CAPTURED[model]
