"""StateOwners: which stage keeps each parameter and buffer in a checkpoint, where several have it."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.runtime.model_part import ModelPart

Forms = Callable[[Mapping[str, Tensor]], dict[str, tuple[str, list[int]]]]


@dataclass(frozen=True)
class StateOwners:
    """The same on every rank, but for `own`."""

    everywhere: dict[str, tuple[int, str, list[int]]]
    """for every tensor of the model its stage, type and shape, tied ones once"""
    own: dict[int, dict[str, str]]
    """for every stage of this process the tensors that it keeps, with the names that they have in it"""

    @classmethod
    def agreed(cls, part: ModelPart, forms_of: Forms) -> "StateOwners":
        """Ask all ranks; of several stages that have a tensor the first keeps it."""
        tensor_of = part.captured.graph.tensor_of
        here: dict[int, dict[str, str]] = {}
        for index, stage in part.stages.items():
            here[index] = {}
            for name in stage.state_dict():
                here[index].setdefault(tensor_of(name), name)
        states = {index: stage.state_dict() for index, stage in part.stages.items()}
        forms = {index: forms_of({name: states[index][own] for name, own in here[index].items()}) for index in here}
        everywhere: dict[str, tuple[int, str, list[int]]] = {}
        for index, found in sorted(_of_all(part, forms)):
            for name, (kind, shape) in found.items():
                everywhere.setdefault(name, (index, kind, shape))
        own = {i: {n: at for n, at in names.items() if everywhere[n][0] == i} for i, names in here.items()}
        return cls(everywhere, own)

    @property
    def kept(self) -> dict[str, int]:
        """The tensors that this process keeps, each with its stage."""
        return {name: index for index, names in self.own.items() for name in names}


def _of_all(part: ModelPart, forms: dict[int, Any]) -> Iterable[tuple[int, Any]]:
    """The tensors of the stages of all ranks."""
    groups = part.groups
    if groups.is_local:
        return forms.items()
    text = json.dumps(forms)
    told = [groups.broadcast_text(text if groups.rank == rank else "", rank) for rank in range(groups.num_ranks)]
    return [(int(index), found) for one in told for index, found in json.loads(one).items()]
