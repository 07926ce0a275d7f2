"""Remarks: what a user should know about a run, each said once."""

import warnings
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from penstock.runtime.loss_head import LossHead
from penstock.runtime.step_data import StepData

_NAMED = 3


_OF_STEP = "gradients are those of a loop over the microbatches"
_OF_EVAL = "the loss is the mean over the microbatches"


class Remark(UserWarning):
    """Says why the numbers of microbatches are not, or where not certain may not be, those of the whole batch."""

    def __init__(self, sentence: str, is_certain: bool = True, outcome: str = _OF_STEP) -> None:
        super().__init__(f"{sentence}; {outcome}")
        self.sentence, self.is_certain = sentence, is_certain


class Remarks:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: dict[str, bool] = {}
        """the sentences, and whether each was said of a step, for which it means more than for an evaluation"""
        self._num_steps = 0

    def say(self, load: StepData, ending: LossHead, parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        """Warn of everything that makes the numbers of microbatches differ from those of the whole batch.

        Parameters are looked at in the 1st, 2nd, 4th, 8th ... step.
        """
        outcome = _OF_STEP if load.is_training else _OF_EVAL
        found = [Remark(sentence, outcome=outcome) for sentence in ending.remarks(load)]
        self._num_steps += load.is_training
        if load.is_training and not self._num_steps & (self._num_steps - 1):
            found += _on_hooks(parameters())
        for remark in found:
            if remark.sentence not in self._said or (load.is_training and not self._said[remark.sentence]):
                self._said[remark.sentence] = load.is_training
                warnings.warn(remark, stacklevel=5)


def _on_hooks(parameters: Mapping[str, Tensor]) -> Iterator[Remark]:
    names = [name for name, parameter in parameters.items() if _has_hooks(parameter)]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield Remark(
            "hooks on parameters run on the gradient of every microbatch, so that one that is not linear, as clamping "
            f"is, gives other numbers than on that of the batch: {', '.join(names[:_NAMED])}{more}",
            is_certain=False,
        )


def _has_hooks(parameter: Tensor) -> bool:
    """Whether a user has put one on it; sharding has its own."""
    hooks = (*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
