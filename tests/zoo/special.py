"""Special: small models that each do one thing that cutting a model can get wrong."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.zoo.batch import WIDTH, Example, noise, ready
from tests.zoo.scored import Scored


class Deciding(nn.Module):
    """A block that goes one of two ways by the content of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.plus, self.minus = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """One linear layer or the other."""
        return x + (self.plus(x) if x.sum() > 0 else self.minus(x))


class Chain(Scored):
    """Blocks in a row."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def answer(self, *inputs: Any) -> Any:
        """Each block gets what the one before it returned."""
        x = inputs[0]
        for block in self.blocks:
            x = block(x)
        return x


def _chain(*blocks: nn.Module) -> Example:
    return ready(Chain(*blocks), noise(4, WIDTH), labels=noise(4, WIDTH, seed=1))


def control_flow() -> Example:
    """Data-dependent control flow inside a block."""
    torch.manual_seed(0)
    return _chain(*[Deciding() for _ in range(6)])


class Cube(torch.autograd.Function):
    """A function whose backward is not what autograd would find: it is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """The cube."""
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of the cube, scaled."""
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2 * ctx.scale, None


class Cubing(Scored):
    """The function is applied inside blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))

    def answer(self, x: Tensor) -> Tensor:
        """Linear layers and cubes."""
        for layer in self.layers:
            x = x + Cube.apply(layer(x), 0.5)
        return x


def custom_function() -> Example:
    """A custom autograd.Function between blocks."""
    torch.manual_seed(0)
    return ready(Cubing(), noise(4, WIDTH), labels=noise(4, WIDTH, seed=1))


class InPlace(Scored):
    """Activations written over the result of the block before them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.act = nn.ReLU(inplace=True)

    def answer(self, x: Tensor) -> Tensor:
        """A linear layer, then in place: relu, a sum, a part set to zero."""
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number % 3 == 0:
                x = self.act(x)
            elif number % 3 == 1:
                x += 1.0
            else:
                x[:, ::2] *= 0.5
        return x


def in_place() -> Example:
    """In-place activations next to cuts."""
    torch.manual_seed(0)
    return ready(InPlace(), noise(4, WIDTH), labels=noise(4, WIDTH, seed=1))


class Turned(nn.Module):
    """A block that returns its result as a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Not contiguous."""
        return torch.tanh(self.linear(x)).transpose(1, 2)


def non_contiguous() -> Example:
    """Values that are not contiguous go from block to block."""
    torch.manual_seed(0)
    return ready(Chain(*[Turned() for _ in range(6)]), noise(4, 8, 8), labels=noise(4, 8, 8, seed=1))


def channels_last() -> Example:
    """Values in channels-last order go from block to block."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(6)]
    model = Chain(*blocks).to(memory_format=torch.channels_last)
    x = noise(2, 4, 8, 8).to(memory_format=torch.channels_last)
    return ready(model, x, labels=noise(2, 4, 8, 8, seed=1))


@dataclass
class Carried:
    """What goes from block to block as a dataclass."""

    x: Tensor
    skip: Tensor | None
    number: int


class Pair(NamedTuple):
    """What goes from block to block as a named tuple."""

    x: Tensor
    skip: Tensor | None


class Carrying(Scored):
    """Blocks that hand on a structure; `first` and `last` are how it is begun and ended."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def answer(self, x: Tensor) -> Any:
        """The structure of the last block, taken apart."""
        carried = self.blocks[0].begin(x)
        for block in self.blocks:
            carried = block(carried)
        return self.blocks[0].end(carried)


def _carrying(block: type[nn.Module]) -> Example:
    torch.manual_seed(0)
    return ready(Carrying(block), noise(4, WIDTH), labels=noise(4, WIDTH, seed=1))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class DictBlock(_Block):
    """A dict between blocks: tensors, None and an int."""

    def begin(self, x: Tensor) -> dict[str, Any]:
        """The first dict."""
        return {"x": x, "skip": x * 2, "none": None, "number": 0}

    def forward(self, c: dict[str, Any]) -> dict[str, Any]:
        """The next dict."""
        x = torch.tanh(self.linear(c["x"])) + c["skip"] * (c["number"] + 1)
        return {"x": x, "skip": c["skip"], "none": None, "number": c["number"] + 1}

    def end(self, c: dict[str, Any]) -> Tensor:
        """A tensor."""
        return c["x"] * c["number"]


class DataclassBlock(_Block):
    """A dataclass between blocks."""

    def begin(self, x: Tensor) -> Carried:
        """The first one."""
        return Carried(x, None, 0)

    def forward(self, c: Carried) -> Carried:
        """The next one; the first block finds no skip."""
        x = torch.tanh(self.linear(c.x))
        return Carried(x if c.skip is None else x + c.skip, c.x, c.number + 1)

    def end(self, c: Carried) -> Tensor:
        """A tensor."""
        return c.x * c.number


class ModelOutputBlock(_Block):
    """A transformers ModelOutput between blocks."""

    def begin(self, x: Tensor) -> BaseModelOutputWithPast:
        """The first one."""
        return BaseModelOutputWithPast(last_hidden_state=x)

    def forward(self, c: BaseModelOutputWithPast) -> BaseModelOutputWithPast:
        """The next one, with all values so far as a tuple."""
        x = c.last_hidden_state
        new = x + torch.tanh(self.linear(x))
        return BaseModelOutputWithPast(last_hidden_state=new, hidden_states=(*(c.hidden_states or ()), x))

    def end(self, c: BaseModelOutputWithPast) -> Tensor:
        """A tensor that depends on all of them."""
        return c.last_hidden_state + sum(c.hidden_states) / 7


class NestedBlock(_Block):
    """Nested tuples, a list, a named tuple, None and an int between blocks."""

    def begin(self, x: Tensor) -> Any:
        """The first structure."""
        return Pair(x, None), [x + 1, (x - 1, None)], 0

    def forward(self, c: Any) -> Any:
        """The next structure."""
        (x, skip), (more, (less, _)), number = c
        new = torch.tanh(self.linear(x)) + (0 if skip is None else skip)
        return Pair(new, x), [more * 0.5, (less + new, None)], number + 1

    def end(self, c: Any) -> Tensor:
        """A tensor."""
        return c[0].x + c[1][0] + c[1][1][0] * c[2]


def dict_between() -> Example:
    """A dict between stages."""
    return _carrying(DictBlock)


def dataclass_between() -> Example:
    """A dataclass between stages."""
    return _carrying(DataclassBlock)


def model_output_between() -> Example:
    """A ModelOutput between stages."""
    return _carrying(ModelOutputBlock)


def nested_between() -> Example:
    """Nested tuples, None and an int between stages."""
    return _carrying(NestedBlock)


class Cascade(Scored):
    """Blocks that also read the very first value and the block before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("steps", torch.zeros(()))

    def answer(self, x: Tensor) -> Tensor:
        """Long skips, and a buffer of the model itself that counts forwards."""
        self.steps += 1
        first = before = functional.gelu(x)
        for layer in self.layers:
            x, before = before + torch.tanh(layer(x)) * first, x
        return x / self.steps


def long_skips() -> Example:
    """Skips over several stages, and a buffer written between blocks."""
    torch.manual_seed(0)
    return ready(Cascade(), noise(4, WIDTH), labels=noise(4, WIDTH, seed=1))
