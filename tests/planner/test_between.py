"""between: costs on a straight line between those of two sizes."""

import pytest

from penstock.errors import PlanError
from penstock.planner import between
from tests.planner.chains import KEPT, chain, measured

SMALL, LARGE = measured([1.0, 2.0]).profile, measured([3.0, 2.0]).profile


def test_seconds_lie_on_the_line():
    found = between(chain(2), 0.25, SMALL, LARGE)
    assert [cost.forward for cost in found.costs] == [1.5, 2.0]
    assert found.step_seconds == SMALL.step_seconds + 0.25 * (LARGE.step_seconds - SMALL.step_seconds)


def test_bytes_are_whole():
    assert between(chain(2), 1 / 3, SMALL, LARGE)["layers.0"].memory.kept == KEPT


def test_another_model_is_refused():
    with pytest.raises(PlanError, match="other nodes"):
        between(chain(3), 0.5, SMALL, LARGE)
