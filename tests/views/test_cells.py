"""Cutting time into equal steps."""

import numpy as np
import pytest

from penstock.ir import StageCosts
from penstock.views.blocks import Blocks
from penstock.views.cells import IDLE, cells, common_step, proportional, typical_step
from tests.views.samples import PAIR, jittered, named, run, standing_still


def blocks(*seconds: float) -> Blocks:
    forward, backward = seconds
    return Blocks.of(run("0F0,0F1,0B0,0B1", StageCosts((forward,), (backward,), (0.0,))))


@pytest.mark.parametrize(
    ("forward", "backward", "step"),
    [(1, 1, 1), (1, 2, 1), (2, 3, 1), (0.1, 0.3, 0.1), (1 / 3, 1 / 6, 1 / 6), (1e-6, 4e-6, 1e-6), (4e5, 6e5, 2e5)],
)
def test_the_common_step_divides_every_pass(forward: float, backward: float, step: float) -> None:
    assert common_step(blocks(forward, backward)) == pytest.approx(step)


def test_there_is_no_common_step_of_lengths_that_have_none() -> None:
    assert common_step(blocks(1.0, 2**0.5)) is None
    assert common_step(Blocks.of(jittered(run("0F0,0B0")))) is None


def test_a_common_step_far_shorter_than_every_pass_is_of_no_use() -> None:
    assert common_step(blocks(1.00, 1.01)) is None


def test_a_trace_of_no_length_has_no_common_step() -> None:
    still = Blocks.of(standing_still(run("0F0,0B0")))
    assert common_step(still) is None
    assert typical_step(still) == 1.0


def test_a_cell_that_is_mostly_idle_is_idle() -> None:
    trace = Blocks.of(run("0F0,0B0\n1F0,1B0"))
    assert cells(trace, 2.0, 3)[0].tolist() == [0, IDLE, 1]


def test_the_second_row_of_a_rank_holds_the_backward_of_a_pair() -> None:
    grid = cells(Blocks.of(run(PAIR)), 1.0, 6)
    assert grid.tolist() == [[0, 1, 1, 1, 3, 3], [IDLE, 2, 2, 2, IDLE, IDLE]]


def test_proportional_cells_count_as_the_time_they_stand_for() -> None:
    trace = Blocks.of(named("zb_h1", 4, 200))
    grid = proportional(trace, trace.trace.makespan / 90, 90)[::2]
    shown = np.array([trace.passes.kind[grid[grid != IDLE]] == kind for kind in (0, 2, 3)]).sum(axis=1)
    assert shown.tolist() == pytest.approx([4 * 90 * 200 / 603] * 3, rel=0.05)
