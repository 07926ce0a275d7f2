"""Surroundings: everything outside the record that a forward may change, put back as it was."""

import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.book import has_same_numbers, other_state
from penstock.capture.generators import States, own_sources, python_sources, seed_generators, torch_sources
from penstock.capture.kept import kept_parameters

_CONTAINERS = (dict, list, set, deque)
_PLAIN = (bool, int, float, str, type(None), tuple)
_NESTING = 3
"""how deep notes are looked for: an attribute, a container or object in it, and one more"""


@contextmanager
def undisturbed(model: nn.Module, seed: int | None = None, written: Collection[str] | None = None) -> Iterator[None]:
    """Whatever happens inside, generators, parameters, buffers and what modules keep in Python are left as they were.

    With a seed, all generators that everyone shares are seeded with it inside. No parameter has a gradient inside. If
    it is known which parameters are `written`, the others cost neither memory nor time.
    """
    sources = [*python_sources(), *torch_sources(torch.cuda.is_initialized()), *own_sources(model.modules())]  # type: ignore[no-untyped-call]
    generators, buffers, notes = States(sources), _buffers(model), _Notes(model)
    with kept_parameters(model, written):
        try:
            if seed is not None:
                seed_generators(seed)
            yield
        finally:
            notes.put_back()
            for tensor, content in buffers:
                # Some kernels write buffers without counting a version, so content decides.
                if content is not None and not has_same_numbers(tensor, content):
                    tensor.data.copy_(content)
            generators.put_back()


class _Notes:
    """What modules keep in their attributes, and in containers and plain objects there."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}
        for module in model.modules():
            self._keep(vars(module), _NESTING)
        kinds = {kind for module in model.modules() for kind in type(module).__mro__ if _is_users(kind)}
        self._kinds = [(kind, dict(vars(kind))) for kind in kinds]

    def _keep(self, thing: Any, depth: int) -> None:
        if id(thing) in self._kept:
            return
        # Ordered dicts, of which every module has a dozen, are slow to copy by their own method.
        content = dict(thing) if isinstance(thing, dict) else list(thing)
        self._kept[id(thing)] = thing, content
        if depth > 1:
            for item in content.values() if isinstance(content, dict) else content:
                if type(item) not in _PLAIN and (inner := _changeable(item)):
                    self._keep(inner[0], depth - 1)

    def put_back(self) -> None:
        """Into those that hold something else by now."""
        for thing, content in self._kept.values():
            if isinstance(thing, dict):
                if not _is_same(thing, content):
                    thing.clear()
                    thing.update(content)
            elif len(thing) != len(content) or any(a is not b for a, b in zip(thing, content, strict=True)):
                thing.clear()
                thing.update(content) if isinstance(thing, set) else thing.extend(content)
        for kind, before in self._kinds:
            _put_back_class(kind, before)


def _changeable(thing: Any) -> tuple[Any] | None:
    """The container that a thing is, or in which it has its attributes, if it is an object of the user's."""
    if isinstance(thing, _CONTAINERS):
        return (thing,)
    if isinstance(thing, Tensor | nn.Module | type) or callable(thing):
        return None
    attributes = getattr(thing, "__dict__", None) if _is_users(type(thing)) else None
    return (attributes,) if isinstance(attributes, dict) else None


def _put_back_class(kind: type, before: dict[str, Any]) -> None:
    """Numbers, texts and tuples that a class holds, such as a count of all calls."""
    for name, value in dict(vars(kind)).items():
        if value is before.get(name) or type(value) not in _PLAIN:
            continue
        if name not in before:
            delattr(kind, name)
        elif type(before[name]) in _PLAIN:
            setattr(kind, name, before[name])


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins")


def _is_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dicts hold the very same things in the same order; tensors in them cannot be compared by ==."""
    return list(one) == list(other) and all(one[key] is other[key] for key in one)


def _buffers(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Buffers and tensors that are plain attributes, with copies of what they hold."""
    found = other_state(model).values()
    return [(buffer, None if buffer.is_meta else buffer.detach().clone()) for buffer in found]


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled modules run as they were written: a recording must neither be compiled nor use up recompilations."""
    # Without the compiler loaded nothing can be compiled, and loading it takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
