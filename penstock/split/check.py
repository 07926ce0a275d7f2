"""Check: the stages, run in sequence, against the unsplit model: outputs, gradients and buffers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PartitionError
from penstock.ir.containers import leaves, transform
from penstock.ir.partition import Partition
from penstock.split.sequence import Sequence

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_SEED = 7
_GRADIENT = "gradient of "
_WAY_OUT = "keep the modules on both sides of a cut in one block (basic_blocks), or cut elsewhere"
_FLOOR = 1e-3
"""A gradient that is zero in exact arithmetic holds rounding only: differences count against this share of the largest
gradient at least."""


def check(captured: Any, partition: Partition) -> None:
    """Raise a PartitionError that names the first number in which the stages differ from the model.

    The batch is the example with its samples in another order: what was frozen by mistake shows.
    """
    if captured.is_meta:
        return
    args, kwargs = captured.other_batch()
    expected = _step(captured, captured.whole, args, kwargs)
    stages = Sequence(captured, partition)
    found = _step(captured, stages, args, kwargs)
    gradients = [_largest(number) for name, number in expected.items() if name.startswith(_GRADIENT)]
    floor = _FLOOR * max(gradients, default=0.0)
    for name, number in expected.items():
        _compare(name, number, found.get(name), floor if name.startswith(_GRADIENT) else 0.0)


def _step(
    captured: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor | None]:
    """The numbers of one forward and backward from a fixed seed, by name; everything is put back afterwards."""
    model = captured.model
    with captured.undisturbed(_SEED), captured.without_parameter_hooks():
        output = run(*transform(args, _copied), **transform(kwargs, _copied))
        tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        _backward(run, tensors)
        numbers: dict[str, Tensor | None] = {f"output {n}": t.detach() for n, t in enumerate(tensors)}
        numbers |= {f"{_GRADIENT}{name}": p.grad for name, p in model.named_parameters()}
        numbers |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return numbers


def _copied(leaf: object) -> object:
    """The model may write into its inputs."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _backward(run: Callable[..., Any], tensors: list[Tensor]) -> None:
    """From fixed random gradients of all outputs that have any."""
    generator = torch.Generator().manual_seed(_SEED)
    gradients = {
        place: torch.randn(tensor.shape, generator=generator).to(tensor)
        for place, tensor in enumerate(tensors)
        if tensor.requires_grad
    }
    if isinstance(run, Sequence):
        run.backward(gradients)
    elif gradients:
        torch.autograd.backward([tensors[place] for place in gradients], list(gradients.values()))


def _compare(name: str, expected: Tensor | None, found: Tensor | None, floor: float) -> None:
    if expected is None and found is None:
        return
    if expected is None or found is None or expected.shape != found.shape:
        raise PartitionError(
            "the stages differ from the model", number=name, expected=expected, found=found, hint=_WAY_OUT
        )
    # Equal infinities have no difference.
    apart = expected != found
    difference = float((_exact(expected) - _exact(found))[apart].abs().max()) if bool(apart.any()) else 0.0
    scale = max(_largest(expected), floor, 1e-12)
    if not difference <= _TOLERANCE.get(expected.dtype, 0.0) * scale and not _are_nan(expected, found):
        raise PartitionError(
            "the stages differ from the model", number=name, difference=difference, largest=scale, hint=_WAY_OUT
        )


def _are_nan(expected: Tensor, found: Tensor) -> bool:
    """Whether the two differ only in that NaN is not equal to NaN."""
    return bool(((expected == found) | (expected.isnan() & found.isnan())).all())


def _exact(number: Tensor) -> Tensor:
    return number.to(torch.complex128 if number.is_complex() else torch.float64)


def _largest(number: Tensor | None) -> float:
    if number is None or not number.numel():
        return 0.0
    finite = _exact(number).abs()
    return float(finite[finite.isfinite()].max()) if bool(finite.isfinite().any()) else 0.0
