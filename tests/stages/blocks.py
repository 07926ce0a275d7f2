"""Blocks: modules that use their weights in every way that a split backward meets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Does(nn.Module):
    """Parts and a function of them and the input."""

    def __init__(self, forward: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self._forward = nn.ModuleList(parts), forward

    def forward(self, x: Tensor) -> Tensor:
        """The function of the input and the parts."""
        return self._forward(x, *self.parts)


class Holds(nn.Module):
    """A parameter that is a part."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))


def frozen(module: nn.Module, name: str) -> nn.Module:
    """The module with one parameter frozen."""
    module.get_parameter(name).requires_grad_(False)
    return module


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that are always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def _tied(x: Tensor, one: nn.Linear) -> Tensor:
    return one(torch.tanh(one(x)))


def _lora(x: Tensor, base: nn.Module, down: nn.Module, up: nn.Module) -> Tensor:
    return base(x) + 0.5 * up(down(functional.dropout(x, 0.1)))


def _in_place(x: Tensor, one: nn.Module, two: nn.Module) -> Tensor:
    return two(one(x).relu_()).add_(x)


def _embedded(x: Tensor, embedding: nn.Module) -> Tensor:
    return x * embedding(torch.tensor([0, 1, 1, 5]))


def _half(x: Tensor, one: nn.Module, norm: nn.Module, two: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = two(norm(one(x)))
    return x.float()


def _checkpointed(x: Tensor, *parts: nn.Module) -> Tensor:
    return checkpoint(lambda x: parts[1](functional.dropout(parts[0](x).relu(), 0.3)), x, use_reentrant=False)


def _by_name(x: Tensor, one: nn.Linear) -> Tensor:
    return functional.linear(x, bias=one.bias, weight=one.weight)


def _hooked(x: Tensor, one: nn.Module, two: nn.Module) -> Tensor:
    x = one(x)
    x.register_hook(lambda gradient: gradient * 3)
    return two(x)


def _experts(x: Tensor, weights: Holds) -> Tensor:
    return functional.linear(x[:2], weights.weight[0]).sum() + x @ weights.weight[1].T


def _without_gradients(x: Tensor, one: nn.Module, two: nn.Module) -> Tensor:
    with torch.no_grad():
        factor = one(x)
    return two(x) * factor + one(x.detach())


WAITING: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(8, 6), rows(4, 8)),
    "linear without a bias": (lambda: nn.Linear(8, 6, bias=False), rows(4, 8)),
    "linear with a bias of one element": (
        lambda: Does(lambda x, a, b: functional.linear(x, a.weight, b.weight), Holds(6, 8), Holds(1)),
        rows(4, 8),
    ),
    "linear with a frozen bias": (lambda: frozen(nn.Linear(8, 6), "bias"), rows(4, 8)),
    "linear of one row": (lambda: nn.Linear(8, 6), rows(8)),
    "linear of three dimensions": (lambda: nn.Linear(8, 6), rows(2, 4, 8)),
    "linear of four dimensions": (lambda: nn.Linear(8, 6), rows(2, 3, 4, 8)),
    "linear of a value that is turned": (lambda: Does(lambda x, a: a(x.mT), nn.Linear(4, 6)), rows(3, 4, 8)),
    "linear of a matrix that is turned": (lambda: Does(lambda x, a: a(x.T), nn.Linear(4, 6)), rows(4, 8)),
    "linear in double precision": (lambda: nn.Linear(8, 6).double(), rows(4, 8, dtype=torch.float64)),
    "linear in half precision": (lambda: nn.Linear(8, 6).bfloat16(), rows(4, 8, dtype=torch.bfloat16)),
    "linear of nothing": (lambda: nn.Linear(8, 6), rows(0, 8)),
    "layers": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)), rows(4, 8)),
    "arguments by name": (lambda: Does(_by_name, nn.Linear(8, 6)), rows(4, 8)),
    "addmm": (lambda: Does(lambda x, w, b: torch.addmm(b.weight, x, w.weight), Holds(8, 6), Holds(6)), rows(4, 8)),
    "matmul": (lambda: Does(lambda x, w: x @ w.weight, Holds(8, 6)), rows(2, 4, 8)),
    "views of a weight": (lambda: Does(_experts, Holds(2, 6, 8)), rows(4, 8)),
    "a weight used twice": (lambda: Does(_tied, nn.Linear(8, 8)), rows(4, 8)),
    "low-rank adapters": (
        lambda: Does(_lora, frozen(nn.Linear(8, 6, bias=False), "weight"), nn.Linear(8, 2), nn.Linear(2, 6)),
        rows(4, 8),
    ),
    "in place": (lambda: Does(_in_place, nn.Linear(8, 8), nn.Linear(8, 8)), rows(2, 4, 8)),
    "an input used twice": (lambda: Does(lambda x, a, b: a(x) * b(x), nn.Linear(8, 6), nn.Linear(8, 6)), rows(4, 8)),
    "hooks on values": (lambda: Does(_hooked, nn.Linear(8, 8), nn.Linear(8, 6)), rows(4, 8)),
    "no gradients in between": (lambda: Does(_without_gradients, nn.Linear(8, 8), nn.Linear(8, 8)), rows(4, 8)),
    "autocast": (lambda: Does(_half, nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 6)), rows(2, 4, 8)),
    "autocast of a convolution": (
        lambda: Does(_half, nn.Conv1d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 1)),
        rows(2, 3, 8),
    ),
    "a checkpoint": (lambda: Does(_checkpointed, nn.Linear(8, 16), nn.Linear(16, 8)), rows(4, 8)),
    "an embedding": (lambda: Does(_embedded, nn.Embedding(7, 8)), rows(4, 8)),
    "an embedding with padding": (lambda: Does(_embedded, nn.Embedding(7, 8, padding_idx=-2)), rows(4, 8)),
    "an embedding scaled by frequency": (
        lambda: Does(_embedded, nn.Embedding(7, 8, scale_grad_by_freq=True)),
        rows(4, 8),
    ),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), rows(2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 0), dilation=2, groups=2), rows(2, 4, 9, 9)),
    "conv2d without a bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), rows(2, 4, 9, 9)),
    "conv2d with a frozen bias": (lambda: frozen(nn.Conv2d(4, 6, 3), "bias"), rows(2, 4, 9, 9)),
    "conv2d, channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        rows(2, 4, 9, 9).to(memory_format=torch.channels_last),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), rows(2, 2, 4, 4, 4)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), rows(2, 4, 5)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 6, 3, padding=1, groups=2), rows(2, 4, 5, 5)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2), rows(2, 2, 4, 4, 4)),
}
"""blocks whose weight gradients wait, at least some"""


def _force(x: Tensor, layer: nn.Module) -> Tensor:
    """The gradient of an energy, which is trained through."""
    (found,) = torch.autograd.grad(torch.tanh(layer(x)).square().sum(), x, create_graph=True)
    return found


class Solved(torch.autograd.Function):
    """A layer whose backward walks a graph that its forward made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_(), weight.detach().requires_grad_()
            result = functional.linear(*given)
        ctx.save_for_backward(*given, result)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        *given, result = ctx.saved_tensors
        return torch.autograd.grad(result, given, gradient)


def _adapted(x: Tensor, layer: nn.Module) -> Tensor:
    """The layer after one step of its own."""
    weights = dict(layer.named_parameters())
    loss = torch.func.grad(lambda own: torch.func.functional_call(layer, own, (x,)).square().mean())
    moved = loss(weights)
    return torch.func.functional_call(layer, {name: weights[name] - moved[name] for name in weights}, (x,))


AT_ONCE: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "all arguments by name": (
        lambda: Does(lambda x, a: functional.linear(input=x, weight=a.weight, bias=a.bias), nn.Linear(8, 6)),
        rows(4, 8),
    ),
    "linear with a frozen weight": (lambda: frozen(nn.Linear(8, 6), "weight"), rows(4, 8)),
    "a weight that is computed": (lambda: parametrizations.weight_norm(nn.Linear(8, 6)), rows(4, 8)),
    "a reentrant checkpoint": (
        lambda: Does(lambda x, a: checkpoint(a, x, use_reentrant=True), nn.Linear(8, 6)),
        rows(4, 8),
    ),
    "an embedding with a largest norm": (lambda: Does(_embedded, nn.Embedding(7, 8, max_norm=1.0)), rows(4, 8)),
    "lstm": (lambda: Does(lambda x, a: a(x)[0], nn.LSTM(8, 6)), rows(4, 2, 8)),
    "norm": (lambda: nn.LayerNorm(8), rows(4, 8)),
    "conv2d padded to the same size": (lambda: nn.Conv2d(4, 6, 2, padding="same"), rows(2, 4, 5, 5)),
    "conv1d of a single sample": (lambda: nn.Conv1d(4, 6, 3), rows(4, 9)),
    "attention": (lambda: Does(lambda x, a: a(x, x, x)[0], nn.MultiheadAttention(8, 2)), rows(4, 2, 8)),
    "a gradient in the forward": (lambda: Does(_force, nn.Linear(8, 6, bias=False)), rows(4, 8)),
    "a graph of its own": (
        lambda: Does(lambda x, a: Solved.apply(x, a.weight), nn.Linear(8, 6, bias=False)),
        rows(4, 8),
    ),
    "a mapped function": (lambda: Does(lambda x, a: torch.vmap(a)(x), nn.Linear(8, 6)), rows(4, 8)),
    "a function that is differentiated": (lambda: Does(_adapted, nn.Linear(8, 6)), rows(4, 8)),
}
"""blocks whose weight gradients are computed with the input gradients"""
