"""Selects combinations that have every pair of values at least once; `--whole` runs all combinations."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Case = tuple[Hashable, ...]
T = TypeVar("T")


def covering(cases: Sequence[Case], together: int = 0) -> list[Case]:
    """Some of the cases, in their order: each pair of values that occurs in a case occurs in one of these.

    So does what the first values are `together`. They are always the same ones: the next is the first of those that
    show the most that none has shown yet.
    """
    left = {index: {*combinations(enumerate(case), 2), case[:together]} for index, case in enumerate(cases)}
    chosen = []
    while left:
        best = max(left, key=lambda index: len(left[index]))
        shown = left[best]
        chosen.append(best)
        left = {index: rest for index, pairs in left.items() if (rest := pairs - shown)}
    return [cases[index] for index in sorted(chosen)]


def every_third(choices: Iterable[T], offset: int, is_whole: bool) -> list[T]:
    """Every third of the choices, so that three offsets in a row have all of them; all of them if `is_whole`."""
    return list(choices) if is_whole else list(choices)[offset % 3 :: 3]


def alternated(cases: Sequence[Case]) -> list[Any]:
    """All cases of two dimensions, as parameters of a test; without `--whole` each value of either runs at least once.

    The values of the second dimension alternate over those of the first.
    """
    places = [list(dict.fromkeys(values)) for values in zip(*cases, strict=True)]
    return [
        case
        if (places[0].index(case[0]) - places[1].index(case[1])) % min(map(len, places)) == 0
        else pytest.param(*case, marks=pytest.mark.whole)
        for case in cases
    ]


def covered(cases: Sequence[Case]) -> list[Any]:
    """All cases, as parameters of a test; those beyond `covering` run with `--whole` only."""
    chosen = set(covering(cases))
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.whole) for case in cases]
