"""Moods: the contexts in which a call was made; those that a replay can enter again are told, others refused."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CaptureError
from penstock.ir import CallContext


class Moods:
    """How what is recorded differs from its surroundings."""

    def __init__(self) -> None:
        self._usual = _moods()
        self._usual_hooks = _saving()
        self._is_inference = torch.is_inference_mode_enabled()
        self._num_applied = 0
        self._drawn: Tensor | None = None

    def now(self) -> CallContext:
        """That of a call that is made now."""
        grad, autocast = _moods()
        usual_grad, usual_autocast = self._usual
        return CallContext(None if grad == usual_grad else grad, None if autocast == usual_autocast else autocast)

    def within(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The `apply` of an autograd function, with a note that what happens meanwhile is inside of it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._num_applied += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._num_applied -= 1

        return run

    def has_own_graph(self) -> bool:
        """Whether an autograd function runs and has turned gradients on: its backward will walk what it makes."""
        return self._num_applied > 0 and torch.is_grad_enabled()

    def begin_drawing(self) -> None:
        """From where torch's generator is now, only calls move it."""
        self._drawn = torch.get_rng_state()

    def generator_was_set(self, before: Tensor) -> bool:
        """Whether torch's generator was elsewhere before a call that drew than the last one had left it."""
        last, self._drawn = self._drawn, torch.get_rng_state()
        return last is not None and not torch.equal(last, before)

    def refuse_others(self, scope: str) -> None:
        """Raise a CaptureError if something is in force that a replay would lose."""
        if torch.is_inference_mode_enabled() != self._is_inference:
            raise CaptureError(
                "the model turns inference mode on between its blocks, and what it makes there has no versions",
                module=scope or "the model",
                hint="torch.no_grad() does the same, or keep the module that does so whole (basic_blocks)",
            )
        hooks = _saving()
        if hooks and hooks != self._usual_hooks and any(map(_is_users, hooks)):
            raise CaptureError(
                "the model changes between its blocks how tensors are saved for the backward (saved_tensors_hooks)",
                module=scope or "the model",
                hint="keep the module that does so whole (basic_blocks)",
            )


def _moods() -> tuple[bool, tuple[str, bool, str]]:
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.is_grad_enabled(), (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))


def _saving() -> tuple[Any, ...]:
    """The innermost pair of functions that pack and unpack what is saved for the backward; empty if there is none."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return tuple(found or ())


def _is_users(hook: Any) -> bool:
    # Those of torch recompute or move what is saved, and change no number.
    return str(getattr(hook, "__module__", "")).partition(".")[0] != "torch"
