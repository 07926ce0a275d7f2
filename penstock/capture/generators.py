"""The random generators that a forward may draw from: torch's, Python's, numpy's, and those that modules keep."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.capture.objects import module_attributes


@dataclass(frozen=True)
class GeneratorAccess:
    """The functions that return and set the state of a generator."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]


def torch_generators(is_cuda: bool) -> list[GeneratorAccess]:
    """Torch's default generators: that of the CPU, and those of the GPUs if these are in use."""
    found = [GeneratorAccess(torch.get_rng_state, torch.set_rng_state)]
    if is_cuda:
        found.append(GeneratorAccess(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    return found


def python_generators() -> list[GeneratorAccess]:
    """The global generators of Python and of numpy."""
    return [
        GeneratorAccess(random.getstate, random.setstate),
        GeneratorAccess(np.random.get_state, np.random.set_state),
    ]


def module_generators(modules: Iterable[nn.Module]) -> list[GeneratorAccess]:
    """Generators that modules keep as attributes."""
    found = {id(thing): thing for module in modules for thing in module_attributes(module)}
    return [access for thing in found.values() if (access := _access_of(thing))]


def _access_of(thing: Any) -> GeneratorAccess | None:
    if isinstance(thing, torch.Generator):
        return GeneratorAccess(thing.get_state, thing.set_state)
    if isinstance(thing, random.Random):
        return GeneratorAccess(thing.getstate, thing.setstate)
    if isinstance(thing, np.random.RandomState):
        return GeneratorAccess(thing.get_state, thing.set_state)
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return GeneratorAccess(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


class GeneratorStates:
    """The states of some generators at the time when this was made."""

    def __init__(self, generators: Iterable[GeneratorAccess]) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators]

    def have_moved(self) -> bool:
        """Whether one of them has been drawn from or seeded since."""
        return any(not _same_state(generator.get_state(), state) for generator, state in self._states)

    def restore(self) -> None:
        """Set all of them back."""
        for generator, state in self._states:
            generator.set_state(state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy accepts 32 bits
    torch.manual_seed(seed)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and any(isinstance(item, Tensor | np.ndarray) for item in one):
        return all(map(_same_state, one, other))
    return bool(one == other)
