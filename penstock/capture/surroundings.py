"""Surroundings: everything outside the record that a forward may change, put back as it was."""

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from penstock.capture.book import has_same_numbers, other_state

_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def undisturbed(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Whatever happens inside, random generators, buffers and the modules' own attributes are left as they were.

    With a seed, all generators are seeded with it inside.
    """
    generators, buffers = _generators(), _buffers(model)
    modules = [(module, dict(module.__dict__), _inner(module)) for module in model.modules()]
    try:
        if seed is not None:
            seed_generators(seed)
        yield
    finally:
        for module, attributes, inner in modules:
            _restore(module, attributes, inner)
        for tensor, content in buffers:
            # Some kernels write buffers without counting a version, so content decides.
            if content is not None and not has_same_numbers(tensor, content):
                tensor.data.copy_(content)
        _set_generators(generators)


def _inner(module: nn.Module) -> dict[str, Any]:
    """Copies of the dicts, lists and sets of a module: what it keeps its parts, hooks and notes in."""
    return {
        # Ordered dicts, of which every module has a dozen, are slow to copy.
        name: dict(value) if isinstance(value, dict) else value.copy()
        for name, value in module.__dict__.items()
        if type(value) in _CONTAINERS
    }


def _restore(module: nn.Module, attributes: dict[str, Any], inner: dict[str, Any]) -> None:
    for name, content in inner.items():
        kept = attributes[name]
        if isinstance(kept, dict):
            if not _is_same(kept, content):
                kept.clear()
                kept.update(content)
        elif len(kept) != len(content) or any(a is not b for a, b in zip(kept, content, strict=True)):
            kept.clear()
            kept.extend(content) if isinstance(kept, list) else kept.update(content)
    if not _is_same(module.__dict__, attributes):
        module.__dict__.clear()
        module.__dict__.update(attributes)


def _is_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dicts hold the very same things in the same order; tensors in them cannot be compared by ==."""
    return list(one) == list(other) and all(one[key] is other[key] for key in one)


def _buffers(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Buffers and tensors that are plain attributes, with copies of what they hold."""
    found = other_state(model).values()
    return [(buffer, None if buffer.is_meta else buffer.detach().clone()) for buffer in found]


def _generators() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy else None,
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    }


def _set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state_all(states["cuda"])


def seed_generators(seed: int) -> None:
    """Seed all generators that a forward may use."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled modules run as they were written: a recording must neither be compiled nor use up recompilations."""
    # Without the compiler loaded nothing can be compiled, and loading it takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
