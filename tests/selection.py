"""Selects combinations that have every pair of values at least once; `--whole` runs all combinations."""

from collections import Counter
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


def some(selected: Iterable[Hashable], cases: Iterable[Hashable]) -> list[Any]:
    """All cases of one dimension, as parameters of a test; those that are not selected run with `--whole` only."""
    wanted, every = set(selected), list(cases)
    assert wanted <= set(every), wanted - set(every)
    return [case if case in wanted else pytest.param(case, marks=pytest.mark.whole) for case in every]


def with_each_value(cases: Sequence[Case]) -> list[Case]:
    """As few of the cases as have each value of every dimension, in their order; values alternate where they can."""
    uses = Counter[tuple[int, Hashable]]()
    left, chosen = list(cases), []
    while left:
        # The first of those with the most new values, whose other values were used least.
        best = max(left, key=lambda case: ([uses[value] for value in enumerate(case)].count(0), -_total(uses, case)))
        uses.update(enumerate(best))
        chosen.append(best)
        left = [case for case in left if not all(uses[value] for value in enumerate(case))]
    return [case for case in cases if case in chosen]


def _total(uses: Counter[tuple[int, Hashable]], case: Case) -> int:
    return sum(uses[value] for value in enumerate(case))


def beyond_each_value(items: Sequence[Any]) -> list[Any]:
    """The parametrised items that are not needed to run every test with each value of every `parametrize`."""
    groups: dict[str, dict[Case, Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("all_combinations"):
            groups.setdefault(item.nodeid.partition("[")[0], {})[_case(item)] = item
    kept = {(test, case) for test, cases in groups.items() for case in with_each_value(list(cases))}
    return [item for test, cases in groups.items() for case, item in cases.items() if (test, case) not in kept]


def _case(item: Any) -> Case:
    """The values of an item, by identity; several parameters of one `parametrize` are one value."""
    values = {name: id(value) for name, value in item.callspec.params.items()}
    case: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        case.append(tuple(values.pop(name) for name in names))
    return (*case, *values.values())
