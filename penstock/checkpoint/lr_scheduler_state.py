"""Learning-rate scheduler state. Each rank has a scheduler over the parameter groups of its own optimizer.

The state of a scheduler has values of the whole training, such as `last_epoch`, and lists with one entry per group,
such as `base_lrs`. Loaded with the same plan, each rank gets the state that it saved; if its groups have another order
now, so do the lists. A rank of another plan has other parameters, and maybe another number of groups: it gets the
values of the training, which must be equal in all saved states, and its lists are rebuilt from the groups of its
restored optimizer.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import CheckpointError, DamagedError, PenstockWarning
from penstock.runtime import FindTensor, decode_tree

_OPTION_OF = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""per-group lists of torch's schedulers, and the option of a group that usually has the same value"""
_INNER = "_schedulers"
"""the key of the states of inner schedulers"""
_KNOWN_LISTS = (*_OPTION_OF, _INNER, "_milestones", "lr_lambdas")
"""lists that do not depend on the number of groups, or can be rebuilt for another number"""


def scheduler_document(scheduler: Any, optimizer: Any) -> dict[str, Any]:
    """The state of a scheduler to save, with the initial learning rates of its groups."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {"state": scheduler.state_dict(), "rates": [group.get("initial_lr") for group in groups]}


class SavedSchedulers:
    """The scheduler states of all ranks of a checkpoint, as JSON."""

    def __init__(self, documents: Sequence[Mapping[str, Any]], finders: Sequence[FindTensor]) -> None:
        if not all(isinstance(document.get("rates"), list) and "state" in document for document in documents):
            raise DamagedError("the state of a scheduler cannot be read")
        self._documents, self._finders = documents, finders

    def for_order_of_groups(self, rank: int, optimizer: Any) -> Callable[[], Any]:
        """A function that returns the state that a rank saved, for the same rank of the same plan.

        The optimizer restores its groups by their parameters. If they have another order now, the lists of the
        scheduler are rebuilt from them. If they cannot be, a warning says that they keep the order of the checkpoint.
        """
        state, document = self._of_rank(rank), self._documents[rank]
        groups = [] if optimizer is None else optimizer.param_groups

        def find() -> Any:
            has_other_order = groups and [group.get("initial_lr") for group in groups] != document["rates"]
            can_rebuild = _has_rates_of_groups(document["state"], document["rates"]) and not _has_other_lists(state)
            if has_other_order and not can_rebuild:
                warnings.warn(
                    "the parameter groups have another order than in the checkpoint, and the scheduler's lists cannot "
                    "be rebuilt for it\ntry: the groups in the order of the saved ones, or load without the scheduler",
                    PenstockWarning,
                    stacklevel=2,
                )
            return _with_lists_of(state, groups) if has_other_order and can_rebuild else state

        return find

    def _of_rank(self, rank: int) -> Any:
        return decode_tree(self._documents[rank]["state"], self._finders[rank])

    def for_optimizer(self, optimizer: Any) -> Callable[[], Any]:
        """A function that returns the state for a rank of another plan, once its optimizer has been restored.

        Refused if the saved states do not determine it.
        """
        groups = [] if optimizer is None else optimizer.param_groups
        state, counts = self._of_rank(0), {len(document["rates"]) for document in self._documents}
        same_count = counts == {len(groups)} or not groups
        # Lists can be rebuilt only if the base learning rates were those of the groups, which the optimizer restores.
        if groups and all(_has_rates_of_groups(document["state"], document["rates"]) for document in self._documents):
            rest = [_without_group_lists(document["state"]) for document in self._documents]
            if all(other == rest[0] for other in rest) and (same_count or not _has_other_lists(state)):
                return lambda: _with_lists_of(state, groups)
        elif same_count and all(document == self._documents[0] for document in self._documents):
            return lambda: state
        raise CheckpointError(
            "the saved schedulers are for other parameter groups than this plan has, or differed between ranks",
            groups=len(groups),
            saved=", ".join(map(str, sorted(counts))),
            hint="the plan that they were saved with, or load without the scheduler",
        )


def _inner(state: Any) -> list[Any]:
    """The states of the schedulers inside a SequentialLR or ChainedScheduler."""
    inner = state.get(_INNER) if isinstance(state, Mapping) else None
    return inner if isinstance(inner, list) else []


def _has_rates_of_groups(state: Any, rates: list[Any]) -> bool:
    """Whether the base learning rates are those of the groups, so that they can be taken from other groups."""
    base_rates = state.get("base_lrs", rates) if isinstance(state, Mapping) else rates
    return bool(base_rates == rates) and all(_has_rates_of_groups(inner, rates) for inner in _inner(state))


def _without_group_lists(state: Any) -> Any:
    """The state without per-group lists, to compare ranks that have different groups."""
    if isinstance(state, list):
        return [_without_group_lists(item) for item in state]
    if not isinstance(state, Mapping):
        return state
    lambdas = {"lr_lambdas": None} if not any(state.get("lr_lambdas") or ()) else {}
    kept = {name: value for name, value in state.items() if name not in _OPTION_OF} | lambdas
    return {name: _without_group_lists(value) for name, value in kept.items()}


def _has_other_lists(state: Any) -> bool:
    """Whether the state has lists that may be per group and cannot be rebuilt for other groups."""
    if not isinstance(state, Mapping):
        return False
    is_unknown = any(isinstance(value, list | tuple) and name not in _KNOWN_LISTS for name, value in state.items())
    return is_unknown or any(state.get("lr_lambdas") or ()) or any(map(_has_other_lists, _inner(state)))


def _with_lists_of(state: Any, groups: Sequence[Mapping[str, Any]]) -> Any:
    """The state with its per-group lists rebuilt from the options of other groups."""
    if not isinstance(state, Mapping):
        return state
    rebuilt: dict[str, Any] = {
        name: [group[option] for group in groups]
        for name, option in _OPTION_OF.items()
        if name in state and all(option in group for group in groups)
    }
    if "lr_lambdas" in state and not any(state["lr_lambdas"]):
        rebuilt["lr_lambdas"] = [None] * len(groups)
    if _inner(state):
        rebuilt[_INNER] = [_with_lists_of(inner, groups) for inner in _inner(state)]
    return {**state, **rebuilt}
