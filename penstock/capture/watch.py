"""Watch: what a call changes besides what it returns: arguments, parameters, buffers, random generators."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from penstock.capture.book import Book, has_same_numbers, memory_of, other_state
from penstock.capture.generators import States, own_sources, python_sources, torch_sources
from penstock.capture.trees import Apply
from penstock.ir import leaves

_DRAWING = frozenset(
    ("bernoulli", "multinomial", "normal", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "uniform")
)


class Watch:
    """Everything that a call may change, as it was before the call."""

    def __init__(self, book: Book, target: Any, tensors: list[Tensor]) -> None:
        self._module = target if isinstance(target, nn.Module) else None
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self.own = {id(tensor): tensor for tensor in own_state(self._module)}
        """the state of the module itself, by identity"""
        beside = [tensor for given in tensors for tensor in book.state_beside(given)]
        state = {id(tensor): tensor for tensor in (*beside, *self.own.values()) if id(tensor) in book.state}
        self._state = [(tensor, tensor._version, _content(tensor)) for tensor in state.values()]
        self._buffers = _buffers(self._module)
        sources = torch_sources(any(tensor.is_cuda for tensor in (*tensors, *state.values())))
        if self._module is not None or isinstance(target, Apply):
            # Functions of torch draw from torch alone.
            sources += [*python_sources(), *own_sources(self._module.modules() if self._module is not None else ())]
        self._generators, self.generator = States(sources), torch.get_rng_state()

    def touched(self, wrote: set[int]) -> list[Tensor]:
        """The arguments that the call wrote into, or in whose memory it was seen to write."""
        return [
            tensor
            for tensor, version in self._versions
            if tensor._version != version or (wrote and memory_of(tensor) in wrote)
        ]

    def written(self, touched: list[Tensor]) -> list[Tensor]:
        """The parameters and buffers that the call wrote into, also through others, or put others in the place of."""
        memories = {memory_of(tensor) for tensor in touched}
        replaced = self._buffers.keys() - _buffers(self._module).keys()
        unseen = _unseen_writes(self._module) if any(tensor.is_meta for tensor in self.own.values()) else ()
        return [
            tensor
            for tensor, version, content in self._state
            if tensor._version != version
            or id(tensor) in replaced
            or id(tensor) in unseen
            or (memories and memory_of(tensor) in memories)
            # Some kernels write buffers without counting a version.
            or (content is not None and not has_same_numbers(tensor, content))
        ]

    def has_drawn(self) -> bool:
        """Whether the call drew random numbers, or is a module that does so in this mode."""
        return self._generators.have_moved() or any(
            _drops(part) for part in (self._module.modules() if self._module is not None else ())
        )


def own_state(module: nn.Module | None) -> list[Tensor]:
    """All parameters, buffers and tensors held as plain attributes of a module and its parts."""
    return [*module.parameters(), *other_state(module).values()] if module is not None else []


def draws_without_numbers(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a function would draw if its result had numbers: without them no generator moves, and none can tell."""
    if not isinstance(result, Tensor) or not result.is_meta:
        return False
    name = getattr(func, "__name__", "")
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if "dropout" in name:
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        return bool(probability and kwargs.get("training", args[2] if len(args) > 2 else True))
    return name.rstrip("_") in _DRAWING


def is_given_generator(args: Any, kwargs: Any) -> bool:
    """Whether a call draws from a generator that it is handed."""
    return any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs)))


def _content(tensor: Tensor) -> Tensor | None:
    return None if tensor.is_meta or isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _buffers(module: nn.Module | None) -> dict[int, Tensor]:
    """Held, so that no other tensor gets the identity of one that is replaced."""
    return {id(buffer): buffer for buffer in module.buffers()} if module is not None else {}


def _unseen_writes(module: nn.Module | None) -> set[int]:
    """Running statistics without numbers: their kernels count no version, and there is no content to compare."""
    norms = [part for part in module.modules() if isinstance(part, _NormBase)] if module is not None else []
    return {id(buffer) for norm in norms if norm.training for buffer in norm.buffers() if buffer.is_meta}


def _drops(part: nn.Module) -> bool:
    return isinstance(part, _DropoutNd) and part.training and part.p > 0
