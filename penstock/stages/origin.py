"""Origin: where in the model a stage took its parts from, and whether the model still has them there."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from penstock.errors import PartitionError


class Origin:
    """The modules, and the parameters and buffers without a module around them, of one stage."""

    def __init__(self, model: nn.Module, leaves: Iterable[str], state: Iterable[str]) -> None:
        # In a tuple: what belongs to the model is no part of the stage.
        self._model = (model,)
        self._modules = {name: model.get_submodule(name) for name in leaves}
        inside = tuple(f"{name}." for name in self._modules)
        self._places: list[tuple[str, Any, str, object]] = []
        for path in dict.fromkeys(state):
            if not path.startswith(inside):
                parent, _, name = path.rpartition(".")
                owner = model.get_submodule(parent)
                kind = owner._parameters if name in owner._parameters else owner._buffers
                self._places.append((path, kind, name, kind.get(name)))

    def around(self) -> Iterator[nn.Module]:
        """The modules of the model that the parts are inside of."""
        for name in self._modules:
            words = name.split(".")
            for end in range(len(words)):
                yield self._model[0].get_submodule(".".join(words[:end]))

    def check_modules(self) -> None:
        """Refuse to play with a module that the model has replaced since the split."""
        for name, module in self._modules.items():
            if self._model[0].get_submodule(name) is not module:
                raise PartitionError(
                    "a module was replaced after the split", module=name, hint="capture and split again"
                )

    def check_tensors(self) -> None:
        """Refuse to go on with a tensor in whose place the model has another by now."""
        for path, kind, name, tensor in self._places:
            if kind.get(name) is not tensor:
                raise PartitionError(
                    "a parameter or buffer was replaced after the split",
                    name=path,
                    hint="write into it (with torch.no_grad(): tensor.copy_(...)), or capture and split again",
                )
