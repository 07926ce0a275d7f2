"""Warnings that the numbers of microbatches are not those of the whole batch, each issued once by one rank."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from penstock.errors import PenstockWarning
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.loss_head import LossHead
from penstock.runtime.step import Step

_TRAINING = "gradients are those of a loop over the microbatches"
_EVALUATION = "the loss is the mean over the microbatches"
_NUM_NAMED = 3


class MicrobatchWarning(PenstockWarning):
    """The loss or gradients of microbatches are not, or if not `is_certain` may not be, those of the whole batch."""

    def __init__(self, cause: str, is_certain: bool = True, is_training: bool = True) -> None:
        super().__init__(f"{cause}; {_TRAINING if is_training else _EVALUATION}")
        self.cause, self.is_certain = cause, is_certain


class StepWarnings:
    """Collects the warnings of all ranks after a step; the first rank issues each of them once."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._issued: dict[str, bool] = {}
        """causes, and whether they were issued for training, for which they say more than for an evaluation"""
        self._num_steps = 0

    def new(
        self, step: Step, loss_head: LossHead, parameters: Callable[[], Mapping[str, Tensor]]
    ) -> list[tuple[str, bool]]:
        """The causes found on this rank that were not issued yet, and whether each is certain.

        Parameters are looked at for hooks in the 1st, 2nd, 4th, 8th ... step.
        """
        found = [(cause, True) for cause in loss_head.warnings(step)]
        self._num_steps += step.is_training
        if step.is_training and not self._num_steps & (self._num_steps - 1):
            found += [(cause, False) for cause in _hook_causes(parameters())]
        return [
            one
            for one in dict.fromkeys(found)
            if one[0] not in self._issued or (step.is_training and not self._issued[one[0]])
        ]

    def issue(self, own: list[tuple[str, bool]], is_training: bool) -> None:
        """Gather the new warnings of all ranks and issue them on the first; all ranks call this."""
        groups = self._groups
        texts = [
            groups.broadcast_text(json.dumps(own), rank) for rank in range(1 if groups.is_local else groups.num_ranks)
        ]
        whole = json.dumps([one for text in texts for one in json.loads(text)])
        replicas = [groups.broadcast_text_to_replicas(whole, replica) for replica in range(groups.num_replicas)]
        for cause, is_certain in dict.fromkeys(tuple(one) for text in replicas for one in json.loads(text)):
            self._issued[cause] = is_training
            if groups.is_first:
                # Points at the user's call of step or eval.
                warnings.warn(MicrobatchWarning(cause, is_certain, is_training), stacklevel=5)


def _hook_causes(parameters: Mapping[str, Tensor]) -> Iterator[str]:
    names = [name for name, parameter in parameters.items() if _has_user_hook(parameter)]
    if names:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        yield (
            "hooks on parameters are called with the gradient of every microbatch, so that one that is not linear, "
            f"such as clamping, differs from one call for the batch: {', '.join(names[:_NUM_NAMED])}{more}"
        )


def _has_user_hook(parameter: Tensor) -> bool:
    hooks = (*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values())
    # torch's own sharding registers hooks too.
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
