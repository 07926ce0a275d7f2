"""Intercepts calls of modules, autograd functions and scripted functions while recording; disables the user's hooks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.capture.objects import code_origin
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
def without_user_hooks(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the user's forward hooks and pre-hooks from some blocks and their parts; restore them at the end.

    A recording is not a forward of the user, so hooks that count or log must not run. Hooks that are registered in the
    body stay.
    """
    parts = {id(part): part for block in blocks for part in block.modules()}
    saved = [(hooks, dict(hooks)) for part in parts.values() for hooks in _forward_hooks(part) if hooks]
    try:
        for hooks, content in saved:
            for key, hook in content.items():
                if _is_skipped_hook(hook):
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
    inner = getattr(hook, "func", hook)
    module = str(getattr(inner, "__module__", ""))
    # Sharded parameters are gathered around a whole recording: FSDP's hooks would take each block for a forward.
    return code_origin(module) in ("user", "python") or module.startswith("torch.distributed.fsdp")
