"""Scheduler state: each rank has a scheduler for the groups of its own optimizer, and goes on with what fits them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.checkpoint.values import Find, from_plain
from penstock.errors import CheckpointError, DamagedError

_OPTION_OF = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""what a scheduler of torch keeps for every group, and the option of the group that mostly says the same"""
_INNER = "_schedulers"
_KNOWN_LISTS = (*_OPTION_OF, _INNER, "_milestones", "lr_lambdas")
"""lists that fit any number of groups, or can be made to"""
_STATE, _RATES = "state", "rates"


def document_of(scheduler: Any, optimizer: Any) -> dict[str, Any]:
    """What is saved of a scheduler, with the rates from which its groups began."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {_STATE: scheduler.state_dict(), _RATES: [group.get(_OPTION_OF["base_lrs"]) for group in groups]}


class SavedSchedulers:
    """The schedulers of all ranks that saved one, as JSON has them."""

    def __init__(self, plains: Sequence[Mapping[str, Any]], finds: Sequence[Find]) -> None:
        if not all(isinstance(plain.get(_RATES), list) and _STATE in plain for plain in plains):
            raise DamagedError("the state of a scheduler cannot be read")
        self._plains, self._finds = plains, finds

    def own(self, rank: int) -> Any:
        """The state of the rank that saved it, for one that goes on by the same plan."""
        return from_plain(self._plains[rank][_STATE], self._finds[rank])

    def fitted(self, optimizer: Any) -> Callable[[], Any]:
        """What gives a rank of another plan a state, once its optimizer has its options; refused if none would fit."""
        groups = [] if optimizer is None else optimizer.param_groups
        state, counts = self.own(0), {len(plain[_RATES]) for plain in self._plains}
        has_as_many = counts == {len(groups)} or not groups
        if groups and all(_follows_groups(plain[_STATE], plain[_RATES]) for plain in self._plains):
            rest = [_without_groups(plain[_STATE]) for plain in self._plains]
            if all(one == rest[0] for one in rest) and (has_as_many or not _strange_lists(state)):
                return lambda: _regrouped(state, groups)
        elif has_as_many and all(plain == self._plains[0] for plain in self._plains):
            return lambda: state
        raise CheckpointError(
            "the schedulers were made for other groups than this plan has, or differed from rank to rank",
            groups=len(groups),
            saved=", ".join(map(str, sorted(counts))),
            hint="the plan that they were saved with, or load without the scheduler",
        )


def _inner(state: Any) -> list[Any]:
    """The schedulers that one is made of."""
    found = state.get(_INNER) if isinstance(state, Mapping) else None
    return found if isinstance(found, list) else []


def _follows_groups(plain: Any, rates: list[Any]) -> bool:
    """Whether all that is kept for every group is what the group says itself."""
    own = plain.get("base_lrs", rates) if isinstance(plain, Mapping) else rates
    return bool(own == rates) and all(_follows_groups(one, rates) for one in _inner(plain))


def _without_groups(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_without_groups(item) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    lambdas = {"lr_lambdas": None} if not any(plain.get("lr_lambdas") or ()) else {}
    kept = {name: value for name, value in plain.items() if name not in _OPTION_OF} | lambdas
    return {name: _without_groups(value) for name, value in kept.items()}


def _strange_lists(state: Any) -> bool:
    """Whether something is kept that may be for every group, and is not known to fit other ones."""
    if not isinstance(state, Mapping):
        return False
    has_own = any(isinstance(value, list | tuple) and name not in _KNOWN_LISTS for name, value in state.items())
    return has_own or any(state.get("lr_lambdas") or ()) or any(map(_strange_lists, _inner(state)))


def _regrouped(state: Any, groups: Sequence[Mapping[str, Any]]) -> Any:
    if not isinstance(state, Mapping):
        return state
    told: dict[str, Any] = {
        name: [group[option] for group in groups]
        for name, option in _OPTION_OF.items()
        if name in state and all(option in group for group in groups)
    }
    if "lr_lambdas" in state and not any(state["lr_lambdas"]):
        told["lr_lambdas"] = [None] * len(groups)
    if _inner(state):
        told[_INNER] = [_regrouped(one, groups) for one in _inner(state)]
    return {**state, **told}
