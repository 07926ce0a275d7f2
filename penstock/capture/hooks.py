"""Intercepts calls of modules, autograd functions and scripted functions while recording; disables the user's hooks."""

import dis
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.capture.fingerprint import global_objects, names_in
from penstock.capture.objects import MODULE_ATTRIBUTES, code_origin, object_items
from penstock.errors import CaptureError

CallHandler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""takes a module, autograd function or scripted function, a function that calls it, and the arguments"""


# Interception


@contextmanager
def intercept_modules(model: nn.Module, handler: CallHandler) -> Iterator[None]:
    """Route every call of a module through `handler(module, original, args, kwargs)`.

    `__call__` is replaced on the classes in use, not on nn.Module: when an attribute of a class changes, Python visits
    all of its subclasses, and of nn.Module there are thousands.
    """
    classes = {type(module) for module in model.modules()}
    own = {cls: vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls)}
    # All of them are read before the first is replaced: a class in use may inherit from another.
    originals = {cls: cls.__call__ for cls in classes}

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return handler(self, original, args, kwargs)

        return call

    try:
        for cls, original in originals.items():
            # Script classes refuse attributes in their own __setattr__.
            type.__setattr__(cls, "__call__", replacement(original))
        yield
    finally:
        for cls in classes:
            if cls in own:
                type.__setattr__(cls, "__call__", own[cls])
            elif "__call__" in vars(cls):  # an interrupt may come before it is replaced
                type.__delattr__(cls, "__call__")


@contextmanager
def intercept_autograd_and_scripted_functions(on_apply: CallHandler, on_script: CallHandler) -> Iterator[None]:
    """Route calls of autograd functions and of scripted functions through handlers.

    They are called as `on_apply(function class, apply, args, kwargs)` and `on_script(function, call, args, kwargs)`. A
    torch function mode sees neither: of an autograd function it would see the calls inside, whose backward is not the
    function's own.
    """
    autograd, script = torch.autograd.Function, torch.jit.ScriptFunction
    original_apply, original_call = vars(autograd)["apply"], script.__call__

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return on_apply(cls, original_apply.__get__(None, cls), args, kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return on_script(self, partial(original_call, self), args, kwargs)

    try:
        autograd.apply = classmethod(apply)
        script.__call__ = call
        yield
    finally:
        autograd.apply = original_apply
        script.__call__ = original_call


# Hooks of the user


@contextmanager
def without_user_hooks(blocks: Iterable[nn.Module], kept: Collection[int] = ()) -> Iterator[None]:
    """Remove the user's forward hooks and pre-hooks from some blocks and their parts; restore them at the end.

    Those whose ids are in `kept` stay (`hooks_of_model`).

    A recording is not a forward of the user, so hooks that count or log must not run. Hooks that are registered in the
    body stay.
    """
    parts = {id(part): part for block in blocks for part in block.modules()}
    saved = [(hooks, dict(hooks)) for part in parts.values() for hooks in _forward_hooks(part) if hooks]
    try:
        for hooks, content in saved:
            for key, hook in content.items():
                if _is_skipped_hook(hook) and id(hook) not in kept:
                    del hooks[key]
        yield
    finally:
        for hooks, content in saved:
            added = {key: hook for key, hook in hooks.items() if key not in content}
            hooks.clear()
            hooks.update(content)
            hooks.update(added)


def has_user_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether some module, or a part of it, has a forward hook or pre-hook of the user."""
    parts = (part for module in modules for part in module.modules())
    return any(_is_skipped_hook(hook) for part in parts for hooks in _forward_hooks(part) for hook in hooks.values())


def hooks_of_model(model: nn.Module) -> frozenset[int]:
    """The ids of the user's forward hooks that may pass values to the model's code other than by their results.

    Such a hook refers to a module of the model, to an object that is an attribute of one, or to a global variable that
    the model's code refers to, as one that collects activations for the loss; or it sets attributes of its module.
    """
    modules = list(model.modules())
    hooks = [hook for part in modules for kind in _forward_hooks(part) for hook in kind.values()]
    hooks = [hook for hook in hooks if _is_skipped_hook(hook) and not _is_fsdp_hook(hook)]
    if not hooks:
        return frozenset()
    attributes = [value for part in modules for name, value in vars(part).items() if name not in MODULE_ATTRIBUTES]
    candidates = (*modules, *attributes, *global_objects(dict.fromkeys(map(type, modules))))
    shared = {id(value) for value in candidates if _may_hold_tensors(value)}
    return frozenset(
        id(hook) for hook in hooks if _sets_attributes(hook) or not shared.isdisjoint(map(id, _objects_of(hook)))
    )


def has_hooks(block: nn.Module, hooks: Collection[int]) -> bool:
    """Whether a block or a part of it has one of these forward hooks."""
    found = (hook for part in block.modules() for kind in _forward_hooks(part) for hook in kind.values())
    return bool(hooks) and any(id(hook) in hooks for hook in found)


def _may_hold_tensors(value: object) -> bool:
    if isinstance(value, nn.Module | list | dict | set | deque):
        return True
    return code_origin(type(value).__module__) == "user" and hasattr(value, "__dict__")


def _objects_of(hook: Any) -> list[Any]:
    """The hook and the objects that it refers to, directly or through the user's functions that it calls."""
    # Of an object that is called, the method too.
    found, pending, seen = [], [hook, type(hook).__call__], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        found.append(value)
        if value is hook or isinstance(value, partial | types.FunctionType | types.MethodType | tuple):
            pending += value if isinstance(value, tuple) else [item for _, item in object_items(value)]
        if isinstance(value, types.FunctionType) and code_origin(value.__module__) == "user":
            names = set(names_in(value.__code__)) & value.__globals__.keys()
            pending += [value.__globals__[name] for name in names]
    return found


def _sets_attributes(hook: Any) -> bool:
    """Whether a hook sets attributes of the module that it is called for."""
    is_bound = not isinstance(hook, types.FunctionType)
    function = getattr(hook, "__func__", hook if isinstance(hook, types.FunctionType) else type(hook).__call__)
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount <= is_bound:
        return False
    module = code.co_varnames[is_bound]
    loaded: Any = None
    for instruction in dis.get_instructions(code):
        # Newer versions of Python load two variables at once.
        if instruction.opname == "STORE_ATTR" and module == (loaded[-1] if isinstance(loaded, tuple) else loaded):
            return True
        loaded = instruction.argval
    return "setattr" in code.co_names


def refuse_backward_hooks(module: nn.Module, path: str) -> None:
    """Raise a CaptureError if an opened module has a backward hook of the user: a replay never calls the module."""
    hooks = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
    if any(map(_is_skipped_hook, hooks)):
        raise CaptureError(
            "a backward hook is on a module that is opened, and would not be called",
            module=path or "the model",
            hint="put the hook on a block, or keep the module whole (basic_blocks)",
        )


def _forward_hooks(part: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return part._forward_hooks, part._forward_pre_hooks


def _is_skipped_hook(hook: Any) -> bool:
    """Whether a hook does not run while a model is recorded: those of the user, and those of FSDP.

    Hooks of weight_norm and LoRA are part of the computation of their module.
    """
    return code_origin(_module_of(hook)) in ("user", "python") or _is_fsdp_hook(hook)


def _is_fsdp_hook(hook: Any) -> bool:
    # Sharded parameters are gathered around a whole recording: FSDP's hooks would take each block for a forward.
    return _module_of(hook).startswith("torch.distributed.fsdp")


def _module_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))
