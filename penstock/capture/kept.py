"""Kept: parameters as they were, to be put back whatever a forward or a backward does to them."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.capture.book import has_same_numbers, memory_of
from penstock.ir import leaves

_COPIED_BYTES = 1 << 30
"""up to here all parameters of a model are copied; above, each is copied when it is about to be written"""


@contextmanager
def kept_parameters(model: nn.Module, written: Collection[str] | None = None) -> Iterator[None]:
    """Inside, no parameter has a gradient; afterwards its numbers, gradient, hooks and need of one are as before.

    If it is known which parameters are written inside, no other is copied or watched.
    """
    kept = [_Kept.of(parameter) for parameter in model.parameters()]
    with ExitStack() as stack:
        copies = _Copies()
        if written is not None:
            copies.add(model.get_parameter(name).detach() for name in written)
        elif sum(one.memory.nbytes for one in kept) <= _COPIED_BYTES:
            copies.add(one.memory for one in kept)
        else:
            stack.enter_context(_CopyOnWrite(copies, [one.memory for one in kept]))
        try:
            for one in kept:
                one.parameter.grad = None
            yield
        finally:
            copies.put_back()
            for one in kept:
                one.put_back()


@contextmanager
def without_parameter_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, hooks that run once a gradient is there do not: they may step an optimizer."""
    found = [hooks for parameter in model.parameters() if (hooks := parameter._post_accumulate_grad_hooks)]
    kept = [(hooks, dict(hooks)) for hooks in found]
    try:
        for hooks in found:
            hooks.clear()
        yield
    finally:
        for hooks, content in kept:
            hooks.clear()
            hooks.update(content)


@dataclass(frozen=True)
class _Kept:
    """A parameter, a tensor in its memory, and what else belongs to it."""

    parameter: nn.Parameter
    memory: Tensor
    gradient: Tensor | None
    needs_gradient: bool
    hooks: tuple[tuple[str, Any, dict[int, Any]], ...]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "_Kept":
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        hooks = tuple((name, found := getattr(parameter, name), dict(found or {})) for name in names)
        return cls(parameter, parameter.detach(), parameter.grad, parameter.requires_grad, hooks)

    def put_back(self) -> None:
        if memory_of(self.parameter) != memory_of(self.memory) or self.parameter.shape != self.memory.shape:
            self.parameter.data = self.memory
        if self.parameter.requires_grad != self.needs_gradient:
            self.parameter.requires_grad_(self.needs_gradient)
        self.parameter.grad = self.gradient
        for name, hooks, content in self.hooks:
            if hooks is None:
                if getattr(self.parameter, name) is not None:
                    setattr(self.parameter, name, None)
            elif list(hooks) != list(content):
                hooks.clear()
                hooks.update(content)


class _Copies:
    """Copies of what tensors held."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Copy those that are not copied yet."""
        for tensor in tensors:
            if not tensor.is_meta and id(tensor) not in self._copies:
                self._copies[id(tensor)] = tensor, tensor.clone()

    def put_back(self) -> None:
        """Into those that changed; some kernels count no version, so content decides."""
        for tensor, content in self._copies.values():
            if not has_same_numbers(tensor, content):
                tensor.data.copy_(content)


class _CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a tensor when an operation is about to write into its memory."""

    def __init__(self, copies: _Copies, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies = copies
        self._tensors: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._tensors.setdefault(memory_of(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[place] if place < len(args) else kwargs.get(argument.name)
                    for leaf in leaves(given):
                        if isinstance(leaf, Tensor):
                            self._copies.add(self._tensors.get(memory_of(leaf), ()))
        return func(*args, **kwargs)
