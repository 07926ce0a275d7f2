"""Runs a model without side effects: everything that a forward or backward may change is restored."""

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.capture.generators import GeneratorStates, seed_generators
from penstock.capture.objects import PLAIN_TYPES, code_origin
from penstock.capture.tensors import buffers_and_attributes, restore_content, same_content, storage_id
from penstock.ir import leaves

_is_internal: ContextVar[bool] = ContextVar("penstock_internal_call", default=False)


@contextmanager
def internal_call() -> Iterator[None]:
    """Allow the body to use a model whose weights are out of date, for its structure and shapes only."""
    token = _is_internal.set(True)
    try:
        yield
    finally:
        _is_internal.reset(token)


def is_internal_call() -> bool:
    """Whether this code runs inside `internal_call` or `isolated`."""
    return _is_internal.get()


@contextmanager
def isolated(model: nn.Module, seed: int | None = None, written: Collection[str] | None = None) -> Iterator[None]:
    """Restore at exit everything that the body may change: generators, parameters, buffers and Python attributes.

    In the body, no parameter has a gradient. With a `seed`, the global generators start from it. `written` names the
    parameters that the body writes, if they are known: then no other parameter is copied.
    """
    buffers = [
        (tensor, None if tensor.is_meta else tensor.detach().clone())
        for tensor in buffers_and_attributes(model).values()
    ]
    attributes = _AttributeSnapshot(model)
    with GeneratorStates.of_process(model.modules()), internal_call(), _isolated_parameters(model, written):
        try:
            if seed is not None:
                seed_generators(seed)
            yield
        finally:
            attributes.restore()
            for tensor, content in buffers:
                # By content: some kernels write buffers without increasing the version.
                if content is not None and not same_content(tensor, content):
                    restore_content(tensor, content)


class _EagerStance:
    """Turns torch's compiler off from the first entry in any thread until the last exit.

    All threads share one stance. If overlapping contexts each restored the stance that they had found, the last one to
    exit could leave the compiler off.
    """

    def __init__(self) -> None:
        self._lock, self._num_active = Lock(), 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_active:
                self._stance = torch.compiler.set_stance("force_eager")
            self._num_active += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_active -= 1
            if not self._num_active:
                self._stance.__exit__(None, None, None)


_EAGER = _EagerStance()


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled modules as they were written: a recording must not compile, nor use up the recompilation limit."""
    # Without the compiler loaded nothing can be compiled, and loading it takes seconds.
    return _EAGER if "torch._dynamo" in sys.modules else nullcontext()


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode that, as torch's own, is not compiled itself, but does not load the compiler for that."""

    _is_disabled = False
    """whether the compiler leaves out this class"""

    def __init__(self) -> None:
        super().__init__()
        kind = type(self)
        # As in `uncompiled`.
        if "torch._dynamo" in sys.modules and not kind._is_disabled:
            kind.__torch_dispatch__ = torch.compiler.disable(kind.__torch_dispatch__)
            kind._is_disabled = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Overrides torch's method, which would import torch._dynamo at the first operation; False: skip nothing."""
        return False


# Parameters

_MAX_COPIED_BYTES = 1 << 30
"""up to this size all parameters are copied; above, each is copied when it is about to be written"""


@contextmanager
def _isolated_parameters(model: nn.Module, written: Collection[str] | None) -> Iterator[None]:
    """Restore the parameters at exit: content, memory, gradients, hooks and `requires_grad`."""
    saved = [_ParameterSnapshot.of(parameter) for parameter in model.parameters()]
    with ExitStack() as stack:
        copies = _Copies()
        if written is not None:
            copies.add(model.get_parameter(name).detach() for name in written)
        elif sum(snapshot.memory.nbytes for snapshot in saved) <= _MAX_COPIED_BYTES:
            copies.add(snapshot.memory for snapshot in saved)
        else:
            stack.enter_context(_CopyOnWrite(copies, [snapshot.memory for snapshot in saved]))
        try:
            # A backward in the body would otherwise add to the user's gradients.
            for snapshot in saved:
                snapshot.parameter.grad = None
            yield
        finally:
            copies.restore()
            for snapshot in saved:
                snapshot.restore()


@contextmanager
def set_mode(model: nn.Module, is_training: bool) -> Iterator[None]:
    """Set the model to training or eval mode in the body; afterwards each module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(is_training)
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@contextmanager
def without_accumulation_hooks(model: nn.Module) -> Iterator[None]:
    """Disable post-accumulate-grad hooks in the body: they may step an optimizer."""
    registered = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    saved = [(hooks, dict(hooks)) for hooks in registered if hooks]
    try:
        for hooks, _ in saved:
            hooks.clear()
        yield
    finally:
        for hooks, content in saved:
            hooks.clear()
            hooks.update(content)


@dataclass(frozen=True)
class _ParameterSnapshot:
    """A parameter with its memory, gradient, hooks and `requires_grad`; the content is in `_Copies`."""

    parameter: nn.Parameter
    memory: Tensor
    gradient: Tensor | None
    requires_grad: bool
    hooks: tuple[tuple[str, Any, dict[int, Any]], ...]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "_ParameterSnapshot":
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        hooks = tuple((name, current := getattr(parameter, name), dict(current or {})) for name in names)
        return cls(parameter, parameter.detach(), parameter.grad, parameter.requires_grad, hooks)

    def restore(self) -> None:
        if storage_id(self.parameter) != storage_id(self.memory) or self.parameter.shape != self.memory.shape:
            self.parameter.data = self.memory
        if self.parameter.requires_grad != self.requires_grad:
            self.parameter.requires_grad_(self.requires_grad)
        self.parameter.grad = self.gradient
        for name, hooks, content in self.hooks:
            if hooks is None:
                if getattr(self.parameter, name) is not None:
                    setattr(self.parameter, name, None)
            elif list(hooks) != list(content):
                # In place: autograd's node keeps a reference to this very dict.
                hooks.clear()
                hooks.update(content)


class _Copies:
    """Copies of the content of tensors."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors that have not been copied yet."""
        for tensor in tensors:
            if not tensor.is_meta and id(tensor) not in self._copies:
                self._copies[id(tensor)] = tensor, tensor.clone()

    def restore(self) -> None:
        """Write the copies back where the content has changed."""
        for tensor, content in self._copies.values():
            if not same_content(tensor, content):
                restore_content(tensor, content)


class _CopyOnWrite(DispatchMode):
    """Copies a tensor when an operation is about to write into its memory."""

    def __init__(self, copies: _Copies, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._copies = copies
        self._tensors: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._tensors.setdefault(storage_id(tensor), []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    for leaf in leaves(value):
                        if isinstance(leaf, Tensor):
                            self._copies.add(self._tensors.get(storage_id(leaf), ()))
        return func(*args, **kwargs)


# Python attributes

_CONTAINERS = (dict, list, set, deque)
_CLASS_VALUES = (*PLAIN_TYPES, tuple)
_MAX_NESTING = 3
"""an attribute, a container or object in it, and one more"""


class _AttributeSnapshot:
    """The attributes of modules and their classes, with the contents of containers and plain objects among them.

    A forward may append to a list of losses, count its calls, or change a configuration.
    """

    def __init__(self, model: nn.Module) -> None:
        self._saved: dict[int, tuple[Any, Any]] = {}
        for module in model.modules():
            self._save(vars(module), _MAX_NESTING)
        classes = {kind for module in model.modules() for kind in type(module).__mro__}
        self._classes = [(kind, dict(vars(kind))) for kind in classes if code_origin(kind.__module__) != "torch"]

    def _save(self, container: Any, depth: int) -> None:
        if id(container) in self._saved:
            return
        # dict(x), not x.copy(): every module has a dozen OrderedDicts, whose own copy is slow.
        content = dict(container) if isinstance(container, dict) else list(container)
        self._saved[id(container)] = container, content
        if depth > 1:
            for item in content.values() if isinstance(content, dict) else content:
                if type(item) not in _CLASS_VALUES and (inner := _mutable_content(item)) is not None:
                    self._save(inner, depth - 1)

    def restore(self) -> None:
        """Restore the containers and classes that have changed."""
        for container, content in self._saved.values():
            if isinstance(container, dict):
                # By identity: tensors cannot be compared with ==. Without a loop in Python: there may be many items.
                if list(container) != list(content) or not all(map(is_, container.values(), content.values())):
                    container.clear()
                    container.update(content)
            elif len(container) != len(content) or not all(map(is_, container, content)):
                container.clear()
                container.update(content) if isinstance(container, set) else container.extend(content)
        for kind, before in self._classes:
            # Plain values only, such as a count of calls: other class attributes are code.
            for name, value in dict(vars(kind)).items():
                if value is before.get(name) or type(value) not in _CLASS_VALUES:
                    continue
                if name not in before:
                    delattr(kind, name)
                elif type(before[name]) in _CLASS_VALUES:
                    setattr(kind, name, before[name])


def _mutable_content(value: Any) -> Any:
    """The value itself if it is a mutable container, the dict of its attributes if it is a plain object; else None."""
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, Tensor | nn.Module | type) or callable(value):
        return None
    attributes = getattr(value, "__dict__", None) if code_origin(type(value).__module__) != "torch" else None
    return attributes if isinstance(attributes, dict) else None
