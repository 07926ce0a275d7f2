"""Scheduler state: each rank has a scheduler for the groups of its own optimizer, and goes on with what fits them."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import CheckpointError

_OPTION_OF = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""what a scheduler of torch keeps for every group, and the option of the group that says the same"""
_INNER = "_schedulers"


def check_common(plains: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states, as JSON has them, of which none will do for a rank of another plan."""
    first, *others = [_without_groups(plain) for plain in plains]
    if any(other != first for other in others):
        raise CheckpointError(
            "the schedulers differed from rank to rank, so that only the plan they were saved with can go on with them",
            hint="the same plan, or load without the scheduler",
        )


def regrouped(state: Any, optimizer: Any) -> Any:
    """The state, with what it keeps for every group as the groups of this rank say."""
    groups = optimizer.param_groups if optimizer is not None else ()
    if not isinstance(state, dict) or not groups:
        return state
    told = {
        name: [group[option] for group in groups]
        for name, option in _OPTION_OF.items()
        if name in state and all(option in group for group in groups)
    }
    if isinstance(state.get(_INNER), list):
        told[_INNER] = [regrouped(inner, optimizer) for inner in state[_INNER]]
    return {**state, **told}


def _without_groups(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_without_groups(item) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    return {name: _without_groups(value) for name, value in plain.items() if name not in _OPTION_OF}
