"""The random generators that a forward may draw from: torch's, Python's, numpy's, and those that modules keep."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
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
    generators = [GeneratorAccess(torch.get_rng_state, torch.set_rng_state)]
    if is_cuda:
        generators.append(GeneratorAccess(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    return generators


def python_generators() -> list[GeneratorAccess]:
    """The global generators of Python and of numpy."""
    return [
        GeneratorAccess(random.getstate, random.setstate),
        GeneratorAccess(np.random.get_state, np.random.set_state),
    ]


def module_generators(modules: Iterable[nn.Module]) -> list[GeneratorAccess]:
    """Generators that modules keep as attributes."""
    attributes = {id(value): value for module in modules for value in module_attributes(module)}
    generators = []
    for value in attributes.values():
        if isinstance(value, torch.Generator | np.random.RandomState):
            generators.append(GeneratorAccess(value.get_state, value.set_state))
        elif isinstance(value, random.Random):
            generators.append(GeneratorAccess(value.getstate, value.setstate))
        elif isinstance(value, np.random.Generator):
            # Its state is an attribute.
            bits = value.bit_generator
            generators.append(GeneratorAccess(partial(getattr, bits, "state"), partial(setattr, bits, "state")))
    return generators


class GeneratorStates:
    """The states of some generators when this object was created; as a context, it restores them at exit."""

    def __init__(self, generators: Iterable[GeneratorAccess]) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators]

    @classmethod
    def of_process(cls, modules: Iterable[nn.Module] = ()) -> "GeneratorStates":
        """The states of all global generators, and of those that some modules keep."""
        is_cuda = torch.cuda.is_initialized()
        return cls([*python_generators(), *torch_generators(is_cuda), *module_generators(modules)])

    def have_moved(self) -> bool:
        """Whether a generator has been drawn from or seeded since."""
        return any(not _same_state(generator.get_state(), state) for generator, state in self._states)

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)

    def __enter__(self) -> None:
        """A no-op: the constructor has saved the states."""

    def __exit__(self, *_: object) -> None:
        self.restore()


def seed_python(seed: int) -> None:
    """Seed the global generators of Python and numpy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy accepts 32 bits


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    seed_python(seed)
    # Without a GPU in use, torch.manual_seed would queue a call with a formatted stack for each kind of device.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _same_state(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, dict):
        return all(_same_state(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and any(isinstance(item, Tensor | np.ndarray) for item in first):
        return all(map(_same_state, first, second))
    return bool(first == second)
