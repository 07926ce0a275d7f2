"""Refuses to use the user's model where it has stale weights: those of the stages that other ranks have trained."""

import warnings
from typing import Any

from torch import nn

from penstock.capture import is_internal_call
from penstock.errors import PenstockWarning, RunError

_UPDATE = "model.load_state_dict(pipe.full_state_dict(everywhere=True)) on every rank"


class StaleWeights:
    """Hooks on a model that a Pipeline over several processes trains; `is_stale` is set after a step or load.

    A forward of the model then raises an error, and reading its state dict gives a warning. Loading a whole
    state dict into the model ends that until the next step. A copy of the model has its own state: it is as stale as
    the model was.
    """

    def __init__(self) -> None:
        self.is_stale = False
        self.has_warned = False

    @classmethod
    def of(cls, model: nn.Module) -> "StaleWeights":
        """The hooks of a model: those that an earlier Pipeline has registered, or new ones."""
        known = cls.find(model)
        if known is not None:
            return known
        stale = cls()
        # First, so that no hook of the user runs before the error.
        model.register_forward_pre_hook(stale, prepend=True)
        model.register_load_state_dict_post_hook(stale.after_load)
        model.register_state_dict_pre_hook(stale.before_read)
        return stale

    @classmethod
    def find(cls, model: nn.Module) -> "StaleWeights | None":
        """The hooks of a model; None if no Pipeline over several processes has trained it."""
        return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, cls)), None)

    def __call__(self, model: nn.Module, _: Any) -> None:
        """Raise an error before a forward."""
        if not is_internal_call():
            self.check(model, "pipe.evaluate(x, return_outputs=True) instead")

    def check(self, model: nn.Module, alternative: str) -> None:
        """Raise an error if the weights of the model are stale; the hint is to update them, or an `alternative`."""
        if self.is_stale:
            raise RunError(
                "the model itself has stale weights: this rank trains some of its stages, other ranks the rest",
                model=type(model).__name__,
                hint=f"{_UPDATE} before, or {alternative}",
            )

    def after_load(self, _: nn.Module, incompatible_keys: Any) -> None:
        """Clear `is_stale` after a whole state dict was loaded into the model."""
        if not incompatible_keys.missing_keys:
            self.is_stale = False

    def before_read(self, model: nn.Module, *_: Any) -> None:
        """Warn once before the state dict of the model is read."""
        if self.is_stale and not self.has_warned and not is_internal_call():
            self.has_warned = True
            problem = f"the state dict of {type(model).__name__} has stale weights of the stages that other ranks train"
            warnings.warn(f"{problem}\ntry: pipe.full_state_dict()", PenstockWarning, stacklevel=3)
