"""Every model of the zoo, cut in 2, 3 and 4 stages, gives what it gave in one piece."""

import pytest

from tests.split.trials import TRIALS, Trial
from tests.zoo import ambient


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.name}-{trial.granularity}")
def test_stages_in_sequence_give_the_outputs_gradients_and_buffers_of_the_model(trial: Trial) -> None:
    with ambient(trial.name):
        found = trial.differences()
    assert {tried: apart for tried, apart in found.items() if not apart.size <= trial.tolerance} == {}
