"""Checks and lookups of argument values that several packages share."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from operator import index
from typing import SupportsIndex, TypeVar

from penstock.errors import CostError, PenstockError

Member = TypeVar("Member")
MAX_SIZE = 2**63 - 1
"""largest number of bytes that parse_bytes returns"""
_DECIMAL_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL_UNITS, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def as_int(value: object) -> int | None:
    """The value as an int if it is an integer, numpy's included; None for anything else, bool included."""
    return index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None


def is_count(value: object, most: float = math.inf) -> bool:
    """Whether the value is a whole number from 1 to `most`."""
    return 1 <= (as_int(value) or 0) <= most


def is_finite(value: object) -> bool:
    """Whether the value is a finite real number that fits a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as 1024, `"24GiB"` or `"1.5 MB"`."""
    shown = f"{size!r:.40}" if isinstance(size, str) else repr(size)
    hint = 'a whole number such as 1073741824, or "24GiB"'
    refusal = CostError("not a size in bytes", size=shown, hint=hint)
    amount: Decimal | int
    if (number := as_int(size)) is not None:
        amount, unit = number, 1
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]{0,3})\s*", size) if isinstance(size, str) else None
        if not match or match[2].upper() not in _UNITS:
            raise refusal
        amount, unit = Decimal(match[1]), _UNITS[match[2].upper()]
    # The amount alone is compared first: the product of a very long number could overflow Decimal.
    if amount > MAX_SIZE or amount * unit > MAX_SIZE:
        raise CostError("size out of range", size=shown, limit=MAX_SIZE)
    if amount * unit < 1:
        raise refusal
    return int(amount * unit)


def find_named(
    kind: str,
    name: str,
    table: Mapping[str, Member],
    error: type[PenstockError],
    aliases: Mapping[str, str] | None = None,
) -> Member:
    """The entry of the table with that name, ignoring case and punctuation; raises `error` with the closest name.

    `aliases` maps further names, in lower case and without punctuation, to keys of the table.
    """
    known = {_normalize(key): key for key in table} | dict(aliases or {})
    wanted = _normalize(name)
    if wanted in known:
        return table[known[wanted]]
    close = difflib.get_close_matches(wanted, known, n=1)
    hint = f"did you mean {known[close[0]]}? " if close else ""
    raise error(f"unknown {kind}", name=repr(name), hint=f"{hint}one of {', '.join(table)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the known name that is closest to an unknown one; empty if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}" if close else ""


def choices_text(names: Iterable[str | None]) -> str:
    """`"mean", "sum" or None`, for errors about an argument that must be one of these."""
    *others, last = ("None" if name is None else f'"{name}"' for name in names)
    return f"{', '.join(others)} or {last}"


def _normalize(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())
