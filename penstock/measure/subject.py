"""Subject: what is measured, a model whose nodes can be run one at a time."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from penstock.ir import Call, Graph

Values = Mapping[str, Any]
Tell = Callable[[int, int], None]
"""is told how many of how many pieces of work are done"""


class Run(Protocol):
    """One forward of a node, kept until its backward: whole, or the input part and then the weight part."""

    @property
    def adds_loss(self) -> bool: ...

    def take_outputs(self) -> dict[str, Any]: ...

    def backward(self, gradients: Mapping[str, Tensor]) -> None: ...

    def input_grad(self, gradients: Mapping[str, Tensor]) -> None: ...

    def weight_grad(self) -> None: ...


class Subject(Protocol):
    """A captured model on its example batch, which stands for one microbatch."""

    @property
    def graph(self) -> Graph: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def calls(self) -> Mapping[str, Call]: ...

    @property
    def live(self) -> Mapping[str, Any]: ...

    def inputs(self) -> dict[str, Any]: ...

    def ready(self, node: str, values: Values, is_split: bool) -> Callable[[], Run]: ...

    def idle(self, values: Values, is_split: bool) -> Callable[[], Run]: ...

    def whole(self) -> Callable[[], list[Tensor]]: ...

    def undisturbed(self) -> AbstractContextManager[None]: ...


def silent(done: int, total: int) -> None:
    """Tells nobody."""
