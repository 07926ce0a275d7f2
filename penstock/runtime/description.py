"""The text of `Pipeline.describe`: stages, parameters, values that cross, schedule and prediction."""

from collections.abc import Iterator

from penstock.ir import Plan
from penstock.runtime.model_part import ModelPart
from penstock.views import Cuts


def describe(plan: Plan, part: ModelPart, reduction: str) -> str:
    """Describe a pipeline for the terminal or a log."""
    return "\n".join((str(plan), "", Cuts()((plan.graph, plan.partition)), "", *_details(plan, part, reduction)))


def _details(plan: Plan, part: ModelPart, reduction: str) -> Iterator[str]:
    groups = part.groups
    position = "all ranks inside this process" if groups.is_local else f"rank {groups.rank} of {groups.num_ranks}"
    yield f"{position}, stages {', '.join(map(str, part.stages))}, {len(part.parameters)} parameters"
    if groups.num_replicas > 1:
        yield f"replica {groups.replica} of {groups.num_replicas}"
    for shared in part.tied.tied:
        yield f"{shared.name} is used on ranks {', '.join(map(str, shared.ranks))}: its gradients are summed"
    for index, stage in part.stages.items():
        if stage.split_backward_note:
            yield f"stage {index} does a full backward where the schedule splits it: {stage.split_backward_note}"
    yield f"recordings of the model: {part.captured.num_recordings}"
    if reduction:
        yield f"reduction of the loss: {reduction}"
