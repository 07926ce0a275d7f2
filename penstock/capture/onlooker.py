"""Onlooker: who is shown what every call of a replay makes, for as long as somebody looks on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Onlooker = Callable[[str, Mapping[str, Any]], None]
"""is given the name of a call and the values that it made"""
_PRESENT: ContextVar[Onlooker | None] = ContextVar("onlooker", default=None)


def present_onlooker() -> Onlooker | None:
    """Who looks on at present."""
    return _PRESENT.get()


@contextmanager
def shown_to(onlooker: Onlooker | None) -> Iterator[None]:
    """What is replayed inside is shown to the onlooker; to None, nothing is."""
    token = _PRESENT.set(onlooker)
    try:
        yield
    finally:
        _PRESENT.reset(token)
