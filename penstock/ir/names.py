"""Names: the member of a family that a user names, however it is spelled."""

import difflib
import re
from collections.abc import Mapping
from typing import TypeVar

from penstock.errors import PenstockError

Member = TypeVar("Member")
NO_OTHERS: Mapping[str, str] = {}


def find_named(
    kind: str,
    name: str,
    table: Mapping[str, Member],
    error: type[PenstockError],
    others: Mapping[str, str] = NO_OTHERS,
) -> Member:
    """The member of that name; case and punctuation do not matter. `others` are further names of some."""
    known = {_plain(key): key for key in table} | dict(others)
    if _plain(name) in known:
        return table[known[_plain(name)]]
    close = difflib.get_close_matches(_plain(name), known, n=1)
    hint = f"did you mean {known[close[0]]}? " if close else ""
    raise error(f"unknown {kind}", name=repr(name), hint=f"{hint}one of {', '.join(table)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())
