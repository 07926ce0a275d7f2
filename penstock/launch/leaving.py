"""Leaving: what a launched rank waits for once its function has returned, so that nothing under way is cut off."""

from collections.abc import Callable

_WAITS: list[Callable[[], None]] = []


def wait_before_leaving(wait: Callable[[], None]) -> None:
    """Call this before the rank says that it is done, once; what it raises, the rank raises."""
    if wait not in _WAITS:
        _WAITS.append(wait)


def wait_for_all() -> None:
    """Until nothing is under way."""
    while _WAITS:
        _WAITS.pop()()
