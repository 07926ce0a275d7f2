"""Compares the stages, run in sequence, with the unsplit model: outputs, gradients and buffers."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.capture import (
    Captured,
    DrawSeed,
    copy_leaf,
    dtype_name,
    in_double,
    isolated,
    tensors_in,
    without_accumulation_hooks,
)
from penstock.errors import PartitionError
from penstock.ir import GRADIENT, Distance, Partition, compare_tensors, map_leaves
from penstock.stages.sequence import StageSequence

_SEED = 7
Tensors = Mapping[str, Tensor | None]


def check(captured: Captured, partition: Partition) -> None:
    """Raise a PartitionError that names the first tensor in which the stages differ from the model.

    The batch is the example with its samples in another order, so that values frozen by mistake show.
    """
    if captured.is_meta:
        return
    args, kwargs = captured.other_batch()
    if captured.recording(args, kwargs).shared_draws:
        seed = DrawSeed(_SEED)
        whole, stages = partial(captured.run_unsplit_with_draws, seed), StageSequence(captured, partition, seed=seed)
    else:
        whole, stages = captured.run_unsplit, StageSequence(captured, partition)
    expected, actual = _run_step(captured, whole, args, kwargs), _run_step(captured, stages, args, kwargs)
    wrong = compare_tensors("the model", distances(expected, actual), {}).first_wrong
    if wrong is not None:
        raise PartitionError(
            "the stages differ from the model",
            tensor=wrong.name,
            difference=f"{wrong.relative:.3g}",
            limit=f"{wrong.tolerance:g}",
            hint="keep the modules on both sides of a cut in one block (basic_blocks), or cut elsewhere",
        )


def _run_step(
    captured: Captured, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor | None]:
    """The tensors of one forward and backward from a fixed seed, by name; the model is left as it was."""
    model = captured.model
    with isolated(model, _SEED), without_accumulation_hooks(model):
        output = run(*map_leaves(args, copy_leaf), **map_leaves(kwargs, copy_leaf))
        outputs = tensors_in(output)
        # Random gradients: with ones, errors that cancel out in a sum would not show.
        generator = torch.Generator().manual_seed(_SEED)
        gradients = {
            index: torch.randn(tensor.shape, generator=generator).to(tensor)
            for index, tensor in enumerate(outputs)
            if tensor.requires_grad
        }
        if isinstance(run, StageSequence):
            run.backward(gradients)
        elif gradients:
            torch.autograd.backward([outputs[index] for index in gradients], list(gradients.values()))
        tensors: dict[str, Tensor | None] = {f"output {n}": tensor.detach() for n, tensor in enumerate(outputs)}
        tensors |= {f"{GRADIENT}{name}": parameter.grad for name, parameter in model.named_parameters()}
        tensors |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return tensors


def distances(expected: Tensors, actual: Tensors) -> Iterator[Distance]:
    """The distance for every name in either; equal infinities, and NaN in the same places, count as equal."""
    for name in dict.fromkeys((*expected, *actual)):
        left, right = expected.get(name), actual.get(name)
        if left is None or right is None or left.shape != right.shape:
            yield Distance(name, 0.0 if left is None and right is None else float("inf"))
            continue
        first, second = in_double(left), in_double(right)
        differs = (first != second) & ~(first.isnan() & second.isnan())
        apart = float((first - second)[differs].abs().max()) if bool(differs.any()) else 0.0
        finite = first.abs()[first.isfinite()]
        largest = float(finite.max()) if finite.numel() else 0.0
        yield Distance(name, apart, largest, dtype_name(left.dtype))
