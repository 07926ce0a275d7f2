"""Example: a batch to plan with, made of the first samples without a trace in the order of the data."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset

from penstock.capture import GeneratorStates, python_generators, torch_generators
from penstock.errors import PlanError

_HINT = "plan=penstock.plan(model, kwargs=batch, ranks=..., microbatches=...)"


def example_of(loader: Any, batch_size: int) -> dict[str, Any]:
    """What a loader makes of the first samples of its data."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise PlanError("a stream of data has no sample to plan with that would not be missed later", hint=_HINT)
    if len(dataset) == 0:
        raise PlanError("the data has no sample to plan with", hint=_HINT)
    batch = loader.collate_fn([dataset[index] for index in range(min(batch_size, len(dataset)))])
    return dict(batch)


@contextmanager
def unnoticed() -> Iterator[None]:
    """Whatever is drawn inside, random numbers go on as if nothing had been."""
    states = GeneratorStates([*python_generators(), *torch_generators(torch.cuda.is_initialized())])  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        states.restore()
