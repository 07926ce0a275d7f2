"""Trial: a loss function called on a batch and on two parts of it, to see how the one comes of the others."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.capture import (
    GeneratorStates,
    Microbatch,
    Recording,
    isolated,
    python_generators,
    torch_generators,
    uncompiled,
)
from penstock.ir import transform
from penstock.runtime.losses.case import Case
from penstock.runtime.losses.evidence import Evidence, Outcome, Part
from penstock.runtime.losses.loss_module import LossModule
from penstock.runtime.losses.rows import another, joined, rows, samples_dim, tensors
from penstock.runtime.losses.way import coarsest

LossFn = Callable[[Any, Any], Any]
Answer = Callable[[int, int], Outcome]
"""the outcome for the samples from a start on"""


@dataclass(frozen=True)
class Trial:
    """What was found, or in words why nothing was; the samples that were tried."""

    evidence: Evidence | None
    pieces: tuple[Microbatch, ...] = ()
    failure: str = ""
    is_final: bool = True
    """whether another microbatch would tell no more"""
    recording: Recording | None = None
    """of the model, by which the samples that were tried are counted"""


_MOST_SAMPLES = 8
RANDOM = "it draws random numbers"
NO_LABELS = "it has no number for this microbatch"
NOT_CUT = "it uses a value of the model that is not made of samples"


def try_function(loss_fn: LossFn, case: Case, place: int, as_pair: bool = False) -> Trial:
    """Three calls of a loss function, on a microbatch and on two parts of it, with nothing left behind.

    A single sample is joined by its partner; so is the first of several if a pair is asked for. `place` says where to
    cut, so that several trials cut elsewhere.
    """
    size = case.piece.size
    # Few samples tell as much as many.
    few = 1 if as_pair else min(size, _MOST_SAMPLES)
    output, target = rows((transform(case.output, _cut_off), case.piece.target), size, 0, few)
    size = few
    try:
        if size == 1:
            # Its entries in other places are an output that is in range.
            output, target, size = joined(output, another(output)), _pair(target, case.partner.target), 2
    except (ValueError, RuntimeError):
        return Trial(None, failure=NOT_CUT)
    dims = tuple(samples_dim(leaf, size) for leaf in tensors(output) if leaf.is_floating_point())

    module = LossModule(loss_fn)

    def answer(start: int, length: int) -> Outcome:
        leaves = transform(rows(output, size, start, length), _leaf)
        with from_the_same_start(module.buffers()):
            loss = loss_fn(transform(leaves, _copied), transform(rows(target, size, start, length), _copied))
            return outcome(loss, tensors(leaves))

    with isolated(module), uncompiled(), torch.enable_grad():
        return tried(answer, size, dims, place, lambda span: Microbatch((), {}, rows(target, size, *span), span[1]))


@contextmanager
def from_the_same_start(buffers: Iterable[Tensor]) -> Iterator[None]:
    """What is written into buffers inside is undone: the next call must find what this one found."""
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, content in kept:
            buffer.data.copy_(content)


def tried(
    answer: Answer,
    size: int,
    dims: tuple[int | None, ...],
    place: int,
    piece: Callable[[tuple[int, int]], Microbatch],
) -> Trial:
    """Ask for the whole and for two parts."""
    cut = 1 + (size // 2 - 1 + place) % (size - 1)
    spans = ((0, cut), (cut, size - cut))
    generators = GeneratorStates([*python_generators(), *torch_generators(torch.cuda.is_initialized())])  # type: ignore[no-untyped-call]
    try:
        whole = answer(0, size)
    except Exception as error:
        return Trial(None, failure=_shown(error))
    if generators.have_moved():
        return Trial(None, failure=RANDOM)
    if not whole.is_finite:
        return Trial(None, failure=NO_LABELS, is_final=False)
    used = [gradient is not None for gradient in whole.gradients]
    if any(dim is None and is_used for dim, is_used in zip(dims, used, strict=True)):
        return Trial(None, failure=NOT_CUT)
    try:
        parts = tuple(Part(answer(*span), *span) for span in spans)
    except Exception as error:
        return Trial(None, failure=f"it does not take a part of a microbatch: {_shown(error)}")
    return Trial(Evidence(whole, parts, dims), tuple(map(piece, spans)))


def outcome(loss: Any, given: Sequence[Tensor]) -> Outcome:
    """The loss of what was given, and its gradients."""
    leaves, number = [leaf for leaf in given if leaf.requires_grad], loss.reshape(())
    dtype = coarsest(number)
    gradients = torch.autograd.grad(number, leaves, allow_unused=True) if number.requires_grad else [None] * len(leaves)
    return Outcome(float(number.detach()), tuple(gradients), dtype)


def _pair(target: Any, partner: Any) -> Any:
    try:
        return joined(target, partner)
    except (ValueError, RuntimeError):
        return joined(target, target)


def _cut_off(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _leaf(leaf: object) -> object:
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().requires_grad_() if is_float else leaf  # type: ignore[attr-defined]


def _copied(leaf: object) -> object:
    """The function may write into what it is given."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
