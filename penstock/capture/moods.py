"""Moods: the contexts in which a call was made; those that a replay can enter again are told, others refused."""

from typing import Any

import torch

from penstock.errors import CaptureError
from penstock.ir.record import Mood


class Moods:
    """How what is recorded differs from its surroundings."""

    def __init__(self) -> None:
        self._usual = _moods()
        self._usual_hooks = _saving()
        self._is_inference = torch.is_inference_mode_enabled()

    def now(self) -> Mood:
        """That of a call that is made now."""
        grad, autocast = _moods()
        usual_grad, usual_autocast = self._usual
        return Mood(None if grad == usual_grad else grad, None if autocast == usual_autocast else autocast)

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
