"""Hooks: those of the user on leaves are not run while a model is recorded, as recording is no forward of theirs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.errors import CaptureError

_LIBRARIES = ("torch", "transformers", "peft", "accelerate")
"""whose hooks are part of what a module computes, such as those of weight_norm and of frozen embeddings under LoRA"""


@contextmanager
def silent_hooks(leaves: Iterable[nn.Module]) -> Iterator[None]:
    """The user's forward hooks and pre-hooks of some modules and of all their parts are away; new ones do run."""
    parts = {id(part): part for leaf in leaves for part in leaf.modules()}
    kept = [(hooks, dict(hooks)) for part in parts.values() for hooks in _kinds(part) if hooks]
    try:
        for hooks, content in kept:
            for key, hook in content.items():
                if _is_users(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, content in kept:
            new = {key: hook for key, hook in hooks.items() if key not in content}
            hooks.clear()
            hooks.update(content)
            hooks.update(new)


def has_users_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether a user's hook is on one of some modules or on a part of one."""
    parts = (part for module in modules for part in module.modules())
    return any(_is_users(hook) for part in parts for hooks in _kinds(part) for hook in hooks.values())


def refuse_backward_hooks(module: nn.Module, path: str) -> None:
    """Raise a CaptureError if a user's hook is on the gradients of a module that is opened: a replay never calls it."""
    hooks = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
    if any(map(_is_users, hooks)):
        raise CaptureError(
            "a backward hook is on a module that is opened, and would not be called",
            module=path or "the model",
            hint="put the hook on a block, or keep the module whole (basic_blocks)",
        )


def _kinds(part: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return part._forward_hooks, part._forward_pre_hooks


def _is_users(hook: Any) -> bool:
    inner = getattr(hook, "func", hook)
    home = str(getattr(inner, "__module__", ""))
    # What is sharded is gathered around a recording, and its hooks would take that for a forward.
    return home.partition(".")[0] not in _LIBRARIES or home.startswith("torch.distributed.fsdp")
