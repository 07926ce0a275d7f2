"""The selection of combinations covers every pair of values, is smaller than the whole, and is deterministic."""

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.selection import alternated, beyond_each_value, covered, covering, every_third, with_each_value

CASES = [
    list(product("abcd", range(3), (False, True), "xyz")),
    [(name, ranks) for name in "abc" for ranks in range(4)],
    [(name, ranks, depth) for name in "abc" for ranks in range(1, 5) for depth in range(ranks)],
    [("alone",)],
    [],
]


def pairs(cases: list[tuple[object, ...]]) -> set[object]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@pytest.mark.parametrize("cases", CASES, ids=len)
def test_every_pair_of_values_is_covered(cases: list[tuple[object, ...]]) -> None:
    assert pairs(covering(cases)) == pairs(cases)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_all_combinations_of_the_first_values_are_covered(together: int) -> None:
    chosen = covering(CASES[0], together)
    assert {case[:together] for case in chosen} == {case[:together] for case in CASES[0]}
    assert len(chosen) < len(CASES[0])


def test_the_selection_is_smaller_and_keeps_the_order() -> None:
    chosen = covering(CASES[0])
    assert 4 * 3 <= len(chosen) <= 16 < len(CASES[0])
    assert chosen == sorted(chosen)


def test_two_dimensions_are_covered_completely() -> None:
    assert covering(CASES[1]) == CASES[1]


def test_unselected_cases_are_marked_whole() -> None:
    marked = [case for case in covered(CASES[0]) if getattr(case, "marks", ())]
    assert len(marked) == len(CASES[0]) - len(covering(CASES[0]))
    assert {mark.name for case in marked for mark in case.marks} == {"whole"}


@pytest.mark.parametrize("lengths", [(4, 2), (2, 4), (3, 3), (5, 3), (1, 4)])
def test_alternated_cases_have_every_value_of_both_dimensions(lengths: tuple[int, int]) -> None:
    cases = list(product("abcde"[: lengths[0]], range(lengths[1])))
    chosen = [case for case in alternated(cases) if not getattr(case, "marks", ())]
    assert [{case[place] for case in chosen} for place in (0, 1)] == [{c[p] for c in cases} for p in (0, 1)]
    assert len(chosen) == max(lengths)


def test_three_positions_rotate_through_all_choices() -> None:
    chosen = ["".join(every_third("abcde", place, is_whole=False)) for place in range(4)]
    assert chosen == ["ad", "be", "c", "ad"]
    assert every_third("abcde", 1, is_whole=True) == list("abcde")


def test_marked_tests_keep_each_value_of_each_parameter() -> None:
    def item(nodeid: str, params: dict[str, object]) -> Any:
        marks = [pytest.mark.parametrize("number", range(3)), pytest.mark.parametrize(("letter", "options"), rows)]
        return SimpleNamespace(
            nodeid=nodeid,
            callspec=SimpleNamespace(params=params),
            iter_markers=lambda name: marks,
            get_closest_marker=lambda name: pytest.mark.all_combinations if "all" in nodeid else None,
        )

    rows = [("a", {}), ("b", {}), ("a", {"x": 1})]
    cases = [
        {"number": number, "letter": letter, "options": options} for letter, options in rows for number in range(3)
    ]
    items = [item(f"{test}[{place}]", case) for test in ("one", "all") for place, case in enumerate(cases)]
    left_out = [each.nodeid for each in beyond_each_value(items)]
    assert left_out == [f"one[{place}]" for place in (1, 2, 3, 5, 6, 7)]


@pytest.mark.parametrize("lengths", [(4, 2), (2, 4), (3, 3), (1, 4), (4, 3, 2)])
def test_few_cases_have_each_value_about_equally_often(lengths: tuple[int, ...]) -> None:
    cases = list(product(*map(range, lengths)))
    chosen = with_each_value(cases)
    assert len(chosen) == max(lengths)
    for values, length in zip(zip(*chosen, strict=True), lengths, strict=True):
        numbers = [values.count(value) for value in range(length)]
        assert min(numbers) >= 1
        assert max(numbers) - min(numbers) <= 1
