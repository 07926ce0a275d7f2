"""Parity: what a model and its stages give for one batch, and how far apart the two are."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import Captured
from penstock.ir import Partition, leaves, transform
from penstock.stages import Sequence

_SEED = 5

_NOISE = 1e-3
"""A gradient smaller than this part of the largest one is rounding around zero, as that of a key's bias always is;
its difference is measured against that part, and not against itself."""


@dataclass(frozen=True)
class Batch:
    """What a model is called with; if `is_scored`, its first output is a loss and backward starts there."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_scored: bool

    def other(self) -> "Batch":
        """Other data of the same form: the rows in another order, numbers with the other sign."""
        return Batch(transform(self.args, _turn), transform(dict(self.kwargs), _turn), self.is_scored)

    def copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in memory of their own, as a model may write into them."""
        return transform(self.args, _copy), transform(dict(self.kwargs), _copy)


@dataclass(frozen=True)
class Outcome:
    """What came of one forward and backward, by name."""

    outputs: dict[str, Tensor | None]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]

    def items(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor under a name that says what it is."""
        for kind in ("outputs", "gradients", "buffers"):
            for name, tensor in getattr(self, kind).items():
                yield f"{kind} {name}", tensor


@dataclass(frozen=True)
class Difference:
    """The largest relative difference between two outcomes, and where it is."""

    size: float
    where: str


def of_model(model: nn.Module, batch: Batch) -> Outcome:
    """The outcome of the model itself."""
    return of_call(model, model, batch)


def of_call(model: nn.Module, call: Callable[..., Any], batch: Batch) -> Outcome:
    """The outcome of something that is called in the place of the model."""

    def run(args: Any, kwargs: Any) -> list[Tensor]:
        output = tensors_of(call(*args, **kwargs))
        roots = _roots(output, batch.is_scored)
        torch.autograd.backward([output[place] for place in roots], list(roots.values()))
        return output

    return _outcome(model, batch, run)


def of_stages(captured: Captured, partition: Partition, batch: Batch, is_split: bool = False) -> Outcome:
    """The outcome of the model's stages, one after another."""
    sequence = Sequence(captured, partition, is_split)

    def run(args: Any, kwargs: Any) -> list[Tensor]:
        output = tensors_of(sequence(*args, **kwargs))
        sequence.backward(_roots(output, batch.is_scored))
        return output

    return _outcome(captured.model, batch, run)


def difference(expected: Outcome, found: Outcome) -> Difference:
    """How far two outcomes are apart; infinitely, if one has what the other lacks."""
    ones, others = dict(expected.items()), dict(found.items())
    if ones.keys() != others.keys():
        return Difference(float("inf"), f"only one has {sorted(ones.keys() ^ others.keys())[0]}")
    floor = _NOISE * max((_size(tensor) for name, tensor in ones.items() if name.startswith("gradients")), default=0.0)
    distances = {name: _distance(ones[name], others[name], floor) for name in ones}
    where = max(distances, key=lambda name: distances[name], default="")
    return Difference(distances[where], where) if where else Difference(0.0, "")


def tensors_of(output: object) -> list[Tensor]:
    """The tensors of an output, left to right."""
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]


def _outcome(model: nn.Module, batch: Batch, run: Callable[[Any, Any], list[Tensor]]) -> Outcome:
    """Run from a fixed seed and clean gradients; the buffers of the model are put back."""
    model.zero_grad(set_to_none=True)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = batch.copies()
    torch.manual_seed(_SEED)
    output = run(args, kwargs)
    outcome = Outcome(
        {str(place): tensor.detach().clone() for place, tensor in enumerate(output)},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
    )
    for name, buffer in model.named_buffers():
        buffer.data.copy_(before[name])
    model.zero_grad(set_to_none=True)
    return outcome


def _roots(output: list[Tensor], is_scored: bool) -> dict[int, Tensor | None]:
    """Where backward starts, by the place in the output, and with which gradients."""
    if is_scored:
        return {0: None}
    generator = torch.Generator().manual_seed(_SEED)
    distinct = {id(tensor): place for place, tensor in reversed(list(enumerate(output))) if tensor.requires_grad}
    return {
        place: torch.randn(output[place].shape, generator=generator).to(output[place].dtype)
        for place in sorted(distinct.values())
    }


def _distance(expected: Tensor | None, found: Tensor | None, floor: float) -> float:
    if expected is None or found is None:
        return 0.0 if expected is found else float("inf")
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return float("inf")
    if torch.equal(expected, found):
        return 0.0
    distance = (expected.double() - found.double()).abs().max().item()
    scale = max(_size(expected), floor)
    # A comparison with what is not a number is always false: it must not pass for equality.
    return distance / scale if scale > 0 and distance == distance else float("inf")


def _size(tensor: Tensor | None) -> float:
    return tensor.double().abs().max().item() if tensor is not None and tensor.numel() else 0.0


def _turn(leaf: object) -> object:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    return -leaf.flip(0) if leaf.is_floating_point() else leaf.flip(0)


def _copy(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
