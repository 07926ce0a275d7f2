"""Figures: what passes for a whole number, and what for a finite one, wherever a value enters."""

import math
from numbers import Real
from operator import index
from typing import SupportsIndex


def as_int(value: object) -> int | None:
    """The value as an int, numpy's whole numbers included; None for anything else, also for a bool."""
    return index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None


def is_finite(value: object) -> bool:
    """Whether the value is a number, and one that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
