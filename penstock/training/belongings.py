"""Belongings: which rank has which parameters of a plan, and which ones several ranks have."""

from collections.abc import Mapping

from torch import nn

from penstock.errors import PlanError
from penstock.ir.graph import Graph, Value
from penstock.ir.plan import Plan
from penstock.runtime.tied import Shared
from penstock.split import Stage


def shared_parameters(plan: Plan, stages: Mapping[int, Stage], rank: int) -> tuple[Shared, ...]:
    """The parameters of this rank that other ranks use too, in the order of the graph."""
    users: dict[str, set[int]] = {}
    for index, nodes in enumerate(plan.partition.runs(plan.graph)):
        for node in nodes:
            for name in node.parameters:
                users.setdefault(plan.graph.tensor_of(name), set()).add(plan.schedule.placement[index])
    own = {plan.graph.tensor_of(name): tensor for name, tensor in _named(stages)}
    return tuple(
        Shared(name, own[name], tuple(sorted(ranks)))
        for name, ranks in users.items()
        if len(ranks) > 1 and rank in ranks
    )


def own_parameters(stages: Mapping[int, Stage]) -> dict[str, nn.Parameter]:
    """The parameters of the stages by their original names, tied ones once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, tensor in _named(stages):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _named(stages: Mapping[int, Stage]) -> list[tuple[str, nn.Parameter]]:
    return [pair for stage in stages.values() for pair in stage.named_parameters(remove_duplicate=False)]


def check_model(plan: Plan, model: nn.Module) -> None:
    """Refuse a model whose parameters or buffers are not those that were planned for."""
    found = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in _state(model)}
    planned = {value.name: (value.spec.shape, value.spec.dtype) for value in _planned(plan.graph)}
    for name in (*planned, *found):
        if planned.get(name) != found.get(name):
            raise PlanError(
                "the plan is for another model",
                name=name,
                planned=_shown(planned.get(name)),
                model=_shown(found.get(name)),
                hint="plan this model",
            )


def _planned(graph: Graph) -> tuple[Value, ...]:
    return graph.parameters


def _state(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _shown(form: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing of this name" if form is None else f"{form[1]}{list(form[0])}"
