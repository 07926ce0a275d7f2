"""verify accepts a program exactly if every interleaving of its ranks ends with the right values."""

from collections import Counter
from random import Random

import pytest

from benchmarks.verifier import COMPLETE, IN_ORDER, RENDEZVOUS, SAMPLED, SEMANTICS, Family, Search, compare

PARTS = [COMPLETE[index] for index in (0, 4, 8, 12)]


@pytest.mark.untraced
@pytest.mark.parametrize(("family", "is_legal"), PARTS, ids=str)
def test_every_program_of_a_small_family_is_judged_as_by_a_search_over_interleavings(
    family: Family, is_legal: bool
) -> None:
    counts = compare(family, family.programs(is_legal))
    assert counts["wrong"] == 0
    assert 0 < counts["accepted"] < counts["all"]
    assert counts["accepted"] <= min(counts[RENDEZVOUS], counts[IN_ORDER])


@pytest.mark.untraced
def test_samples_of_larger_programs_are_judged_as_by_a_search_over_interleavings() -> None:
    counts = Counter[str]()
    for seed, family in enumerate(family for family in SAMPLED if family.microbatches == 2):
        random = Random(seed)
        counts += compare(family, (family.sample(random) for _ in range(12)))
    assert counts["wrong"] == 0
    # The samples tell the semantics apart.
    assert 20 < counts["accepted"] < counts[RENDEZVOUS] < counts["buffered"] < counts["all"]


@pytest.mark.untraced
def test_the_reduced_search_decides_as_a_search_over_all_states() -> None:
    random = Random(0)
    samples = [(family, family.sample(random)) for family in SAMPLED if family.microbatches == 2 for _ in range(3)]
    small = [(family, orders) for family in (Family((0, 1), 1), Family((0, 1, 0), 1)) for orders in family.programs()]
    searches = [Search(family, orders, way) for family, orders in (*samples, *small[::7]) for way in SEMANTICS]
    decided = [search.succeeds() for search in searches]
    assert decided == [search.succeeds(reduces=False) for search in searches]
    assert {True, False} == set(decided)


def test_the_search_itself_tells_a_deadlock_from_a_run() -> None:
    family = Family((0, 1), 1)
    programs = list(family.programs())
    right = [orders for orders in programs if family.is_right(orders, RENDEZVOUS)]
    assert 0 < len(right) < len(programs)
    texts = {" ".join(map(str, orders[0])) for orders in right}
    assert "0F0 0SEND_F0 0RECV_B0 0B0" in texts
    assert not family.is_right([right[0][0][::-1], right[0][1]], RENDEZVOUS)
