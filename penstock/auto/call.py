"""Call: how a model is called for a pipeline, and what of its output the loss function is given."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from penstock.auto.config import AutoPipelineConfig
from penstock.runtime import Result

LossFn = Callable[[Any, Any], Tensor]
_CACHE, _LOGITS = "use_cache", "logits"


@dataclass(frozen=True)
class Call:
    """The settings of one model that is called with a batch."""

    cache: bool | None
    """whether the model is told to cache keys and values; None: it has no such thing"""
    takes_logits: bool

    @classmethod
    def of(cls, config: AutoPipelineConfig, model: nn.Module) -> "Call":
        """As the configuration says, for a model that may be one of Hugging Face."""
        cache = None
        if _CACHE in inspect.signature(model.forward).parameters:
            own = getattr(getattr(model, "config", None), _CACHE, None)
            cache = False if config.patch_inner_model else own
        return cls(cache, config.patch_causal_lm_model)

    def kwargs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The named arguments of the model for those of a step; what the step says itself stays."""
        return dict(given) if self.cache is None else {_CACHE: self.cache, **given}

    def loss_fn(self, given: LossFn | None) -> LossFn | None:
        """The user's loss function as one of all that the model returns."""
        if given is None or not self.takes_logits:
            return given
        return lambda output, target: given(logits_of(output), target)

    def result(self, found: Result) -> Result:
        """What a step brings, with outputs like those that the loss function was given."""
        return replace(found, outputs=logits_of(found.outputs)) if self.takes_logits else found


def logits_of(output: Any) -> Any:
    """The logits, if the output has something of that name; else the output."""
    return output[_LOGITS] if isinstance(output, Mapping) and _LOGITS in output else output
