"""Belongings: which rank has which parameters of a plan, and which ones several ranks have."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.errors import PlanError, RunError
from penstock.ir import Graph, Plan
from penstock.runtime.checksum import checksum
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.tied import Shared, Tied
from penstock.stages import Stage

_SAMPLES = 1024


def shared_parameters(plan: Plan, stages: Mapping[int, Stage], rank: int) -> tuple[Shared, ...]:
    """The parameters of this rank that other ranks use too, in the order of the graph."""
    users = ranks_of_parameters(plan)
    own = {plan.graph.tensor_of(name): tensor for name, tensor in _named(stages)}
    return tuple(
        Shared(name, own[name], tuple(sorted(ranks)))
        for name, ranks in users.items()
        if len(ranks) > 1 and rank in ranks
    )


def written_buffers(graph: Graph, stages: Iterable[Stage]) -> list[tuple[nn.Module, str]]:
    """The buffers that the forward of some stages writes: the modules that have them, and how they call them."""
    written = {name for update in graph.updates for name in update.names}
    named = [
        (stage, name) for stage in stages for name, _ in stage.named_buffers(remove_duplicate=False) if name in written
    ]
    return [(stage.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for stage, name in named]


def ranks_of_parameters(plan: Plan) -> dict[str, set[int]]:
    """The ranks that use each parameter, in the order of the graph; tied ones by their first name."""
    users: dict[str, set[int]] = {}
    for index, nodes in enumerate(plan.partition.runs(plan.graph)):
        for node in nodes:
            for name in node.parameters:
                users.setdefault(plan.graph.tensor_of(name), set()).add(plan.schedule.placement[index])
    return users


def check_alike(plan: Plan, tied: Tied, groups: ProcessGroups) -> None:
    """Refuse parameters that several ranks use and that do not begin with the same numbers everywhere."""
    names = [name for name, ranks in ranks_of_parameters(plan).items() if len(ranks) > 1]
    if groups.is_local or not names:
        return
    own = {shared.name: shared.parameter for shared in tied.shared if not isinstance(shared.parameter, DTensor)}
    sums = torch.tensor([checksum([{name: own[name]}]) if name in own else 0 for name in names])
    for name, column in zip(names, groups.gather(sums).t().tolist(), strict=True):
        if len(set(column) - {0}) > 1:
            raise RunError(
                "a parameter that several ranks use has not the same numbers on all of them",
                name=name,
                ranks=[rank for rank, number in enumerate(column) if number],
                hint="seed every rank alike before the model is made, or load the same state on every rank",
            )


def check_replicas(groups: ProcessGroups, stages: Mapping[int, Stage]) -> None:
    """Refuse replicas that do not begin with the same numbers; called before parameters are sharded over them."""
    if groups.replica_control is None:
        return
    here = checksum({name: _sample(tensor)} for name, tensor in _named(stages))
    # Over all ranks of the pipeline: every rank of every replica comes to the same.
    whole = checksum([{"ranks": groups.gather(torch.tensor([here]))}])
    found = groups.gather_replicas(torch.tensor([whole])).flatten().tolist()
    if len(set(found)) > 1:
        other = next(replica for replica, number in enumerate(found) if number != found[0])
        raise RunError(
            "the replicas do not begin with the same numbers",
            replicas=(0, other),
            hint="seed every rank alike before the model is made, or load the same state on every rank",
        )


def _sample(parameter: Tensor) -> Tensor:
    """Some of the numbers, from the first to the last: those of other seeds differ everywhere."""
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES)]


def own_parameters(stages: Mapping[int, Stage]) -> dict[str, nn.Parameter]:
    """The parameters of the stages by their original names, tied ones once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, tensor in _named(stages):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _named(stages: Mapping[int, Stage]) -> list[tuple[str, nn.Parameter]]:
    return [pair for stage in stages.values() for pair in stage.named_parameters(remove_duplicate=False)]


def check_model(plan: Plan, model: nn.Module) -> None:
    """Refuse a model whose parameters are not those that were planned for."""
    parameters = model.named_parameters(remove_duplicate=False)
    found = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in parameters}
    planned = {value.name: (value.spec.shape, value.spec.dtype) for value in plan.graph.parameters}
    for name in (*planned, *found):
        if planned.get(name) != found.get(name):
            raise PlanError(
                "the plan is for another model",
                name=name,
                planned=_shown(planned.get(name)),
                model=_shown(found.get(name)),
                hint="plan this model",
            )


def _shown(form: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing of this name" if form is None else f"{form[1]}{list(form[0])}"
