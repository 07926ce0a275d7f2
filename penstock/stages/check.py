"""Check: the stages, run in sequence, against the unsplit model: outputs, gradients and buffers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PartitionError
from penstock.ir import GRADIENT, Partition, compare_tensors, leaves, transform
from penstock.stages.distances import distances
from penstock.stages.sequence import Sequence

_SEED = 7
_WAY_OUT = "keep the modules on both sides of a cut in one block (basic_blocks), or cut elsewhere"


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
    wrong = compare_tensors("the model", distances(expected, found), {}).first_wrong
    if wrong is not None:
        raise PartitionError(
            "the stages differ from the model",
            number=wrong.name,
            difference=f"{wrong.relative:.3g}",
            limit=f"{wrong.tolerance:g}",
            hint=_WAY_OUT,
        )


def _step(
    captured: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor | None]:
    """The numbers of one forward and backward from a fixed seed, by name; everything is put back afterwards."""
    model = captured.model
    with captured.isolated(_SEED), captured.without_accumulation_hooks():
        output = run(*transform(args, _copied), **transform(kwargs, _copied))
        tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        _backward(run, tensors)
        numbers: dict[str, Tensor | None] = {f"output {n}": t.detach() for n, t in enumerate(tensors)}
        numbers |= {f"{GRADIENT}{name}": p.grad for name, p in model.named_parameters()}
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
