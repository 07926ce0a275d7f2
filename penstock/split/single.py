"""Single: parameters and buffers that a stage has without the module around them, and whether they are still those."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from penstock.errors import PartitionError


class Single:
    """The places in the model from which a stage took single tensors."""

    def __init__(self, model: nn.Module, leaves: Iterable[str], state: Iterable[str]) -> None:
        inside = tuple(f"{leaf}." for leaf in leaves)
        self._places: list[tuple[str, Any, str, object]] = []
        for path in dict.fromkeys(state):
            if not path.startswith(inside):
                parent, _, name = path.rpartition(".")
                owner = model.get_submodule(parent)
                kind = owner._parameters if name in owner._parameters else owner._buffers
                self._places.append((path, kind, name, kind.get(name)))

    def check(self) -> None:
        """Refuse to go on with a tensor in whose place the model has another by now."""
        for path, kind, name, tensor in self._places:
            if kind.get(name) is not tensor:
                raise PartitionError(
                    "a parameter or buffer was replaced after the split",
                    name=path,
                    hint="write into it (with torch.no_grad(): tensor.copy_(...)), or capture and split again",
                )
