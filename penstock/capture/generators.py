"""Generators: all that a forward may draw random numbers from, and whether it did."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.capture.attributes import own_attributes


@dataclass(frozen=True)
class Source:
    """A generator by the functions that tell and set its state."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def torch_sources(is_cuda: bool) -> list[Source]:
    """Torch's own generators: the one of the CPU, and those of the GPUs if they are in use."""
    found = [Source(torch.get_rng_state, torch.set_rng_state)]
    if is_cuda:
        found.append(Source(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    return found


def python_sources() -> list[Source]:
    """The generators of Python and of numpy that everyone shares."""
    return [
        Source(random.getstate, random.setstate),
        Source(np.random.get_state, np.random.set_state),
    ]


def own_sources(modules: Iterable[nn.Module]) -> list[Source]:
    """Generators that modules keep for themselves."""
    found = {id(thing): thing for module in modules for thing in own_attributes(module)}
    return [source for thing in found.values() if (source := _source_of(thing))]


def _source_of(thing: Any) -> Source | None:
    if isinstance(thing, torch.Generator):
        return Source(thing.get_state, thing.set_state)
    if isinstance(thing, random.Random):
        return Source(thing.getstate, thing.setstate)
    if isinstance(thing, np.random.RandomState):
        return Source(thing.get_state, thing.set_state)
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return Source(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


class States:
    """What some generators were at when this was made."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._states = [(source, source.get()) for source in sources]

    def have_moved(self) -> bool:
        """Whether one of them has been drawn from or seeded since."""
        return any(not _is_same(source.get(), state) for source, state in self._states)

    def put_back(self) -> None:
        """All of them to where they were."""
        for source, state in self._states:
            source.set(state)


def seed_generators(seed: int) -> None:
    """Seed all generators that everyone shares."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes no larger ones
    torch.manual_seed(seed)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and any(isinstance(item, Tensor | np.ndarray) for item in one):
        return all(map(_is_same, one, other))
    return bool(one == other)
