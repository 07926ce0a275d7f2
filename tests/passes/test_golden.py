"""Every pass against text files of what it is given and what it makes of it; inputs stay as they are."""

from pathlib import Path

import numpy as np
import pytest

from penstock.ir import Cuts, Program, Schedule
from penstock.passes import (
    PASSES,
    AddFrees,
    AddReductions,
    AddShardMoves,
    AddTransfers,
    HoistReceives,
    Pass,
    lower,
    verify,
)
from penstock.schedules import SCHEDULES, build
from tests.passes.corpus import SELECTIONS, some_cuts

GOLDEN = Path(__file__).parent / "golden"
SKIPS = Cuts.of(4, [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)], without_gradient=[(0, 2)])
BRANCHES = Cuts.of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
CASES: dict[str, Pass] = {
    "add_transfers": AddTransfers(),
    "add_transfers_vee": AddTransfers(),
    "add_transfers_skips": AddTransfers(),
    "add_transfers_branches": AddTransfers(),
    "hoist_receives": HoistReceives(),
    "add_reductions": AddReductions(),
    "add_shard_moves": AddShardMoves(ahead=2),
    "add_frees": AddFrees(),
}
CUTS = {"add_transfers_skips": SKIPS, "add_transfers_branches": BRANCHES}


def before(case: str) -> Schedule | Program:
    record = Schedule if isinstance(CASES[case], AddTransfers) else Program
    return record.from_csv(GOLDEN / f"{case}_before.txt")


def after(case: str, subject: Schedule | Program) -> Program:
    return CASES[case](subject.with_cuts(CUTS.get(case)) if isinstance(subject, Schedule) else subject)


def test_every_pass_has_golden_files() -> None:
    assert {step.name for step in CASES.values()} == set(PASSES)


@pytest.mark.parametrize("case", CASES)
def test_a_pass_makes_what_the_golden_file_shows(case: str) -> None:
    assert f"{after(case, before(case))}\n" == (GOLDEN / f"{case}_after.txt").read_text()


@pytest.mark.parametrize("case", CASES)
def test_golden_orders_are_lawful_before_and_after(case: str) -> None:
    subject = before(case)
    verify(subject)
    verify(after(case, subject))


@pytest.mark.parametrize("case", CASES)
def test_a_pass_leaves_its_input_as_it_is(case: str) -> None:
    subject, twin = before(case), before(case)
    after(case, subject)
    assert subject == twin
    assert np.array_equal(subject.table.codes, twin.table.codes)


@pytest.mark.parametrize("case", CASES)
def test_orders_cannot_be_written_to(case: str) -> None:
    table = after(case, before(case)).table
    with pytest.raises(ValueError, match="read-only"):
        table.codes[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        table.starts[0] = 1


@pytest.mark.untraced
@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_program_is_lawful_after_every_pass(name: str, shape: int) -> None:
    for num_ranks, num_microbatches in ((1, 2), (3, 2), (4, 5)):
        schedule = build(name, num_ranks, num_microbatches)
        cuts = some_cuts(schedule.num_stages, shape)
        for selection in SELECTIONS[-2:]:
            for end in range(1 + selection.index("add_transfers"), len(selection) + 1):
                verify(lower(schedule, cuts=cuts, passes=selection[:end]))
