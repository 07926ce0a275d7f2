"""verify against an executor that shares nothing with it, on programs spoilt at random."""

from collections import Counter
from functools import reduce
from random import Random

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Program
from penstock.passes import verify
from tests.passes.corpus import draw
from tests.passes.executor import Draft, failure
from tests.passes.mutations import MUTATIONS, mutate

NUM_MUTANTS = 1_000
PARTS = [0, *(pytest.param(part, marks=pytest.mark.whole) for part in range(1, 10))]
NUM_PROGRAMS = 120
OFTEN_HARMLESS = {"swap_neighbours", "move_a_little", "overlap_neighbours", "post_late", "two mutations"}
REASONS = {"Rendezvous: hang", "InOrder: ", "before its values exist", "freed already"}


def refusal(draft: Draft) -> str:
    """Why verify, or Program itself, does not accept the orders; empty if it does."""
    try:
        verify(Program.of(draft.placement, draft.num_microbatches, draft.cuts, draft.orders))
    except ScheduleError as error:
        return str(error)
    return ""


def mutant(programs: list[Draft], random: Random, kinds: list[str]) -> Draft:
    """A lawful program, changed; one that the mutations leave as it is does not count."""
    while True:
        lawful = random.choice(programs)
        spoilt = reduce(lambda draft, kind: mutate(draft, kind, random), kinds, lawful)
        if spoilt.orders != lawful.orders:
            return spoilt


@pytest.mark.untraced
@pytest.mark.parametrize("part", PARTS)
def test_a_mutant_is_refused_exactly_when_an_executor_cannot_complete_it(part: int) -> None:
    random, counts, reasons = Random(part), Counter[tuple[str, str]](), Counter[str]()
    programs = [draw(random) for _ in range(NUM_PROGRAMS)]
    for _ in range(NUM_MUTANTS):
        kinds = random.choices(list(MUTATIONS), k=random.choice((1, 1, 1, 2)))
        draft = mutant(programs, random, kinds)
        refused, failed = refusal(draft), failure(draft)
        verdicts = f"verify: {refused or 'accepts'}\nexecutor: {failed or 'completes'}"
        assert bool(refused) == bool(failed), f"{verdicts}\n{draft}"
        counts[kinds[0] if len(kinds) == 1 else "two mutations", "refused" if refused else "accepted"] += 1
        reasons.update(reason for reason in REASONS if reason in failed)
    print("\n".join(f"{kind:24} {verdict:9} {count}" for (kind, verdict), count in sorted(counts.items())), reasons)
    assert set(MUTATIONS) - {"post_late"} <= {kind for kind, verdict in counts if verdict == "refused"}
    assert OFTEN_HARMLESS.issubset(kind for kind, verdict in counts if verdict == "accepted")
    assert set(reasons) == REASONS


@pytest.mark.untraced
def test_every_program_of_the_corpus_is_accepted_and_completes() -> None:
    random = Random(0)
    for _ in range(300):
        draft = draw(random)
        assert refusal(draft) == failure(draft) == "", str(draft)
