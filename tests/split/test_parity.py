"""Every model of the zoo, cut in 2, 3 and 4 stages, gives what it gave in one piece."""

import pytest

from penstock.partitioners import uniform
from tests.split.parity import difference, of_model, of_stages
from tests.split.trials import DEPTHS, TRIALS, Trial
from tests.zoo import ZOO, ambient


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.name}-{trial.mode}-{trial.granularity}")
def test_stages_in_sequence_give_the_outputs_gradients_and_buffers_of_the_model(trial: Trial) -> None:
    with ambient(trial.name):
        found = trial.differences((2, False), (3, False), (4, False), (3, True))
    assert {cut: apart for cut, apart in found.items() if not apart.size <= trial.tolerance} == {}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("granularity", DEPTHS)
def test_a_record_holds_for_other_data(name: str, granularity: str) -> None:
    trial = Trial(name, "plain", granularity)
    with ambient(name):
        captured, batch = trial.recorded()
        other = batch.other()
        expected, partition = of_model(captured.model, other), uniform(captured.graph, 4)
        apart = difference(expected, of_stages(captured, partition, other))
    assert apart.size <= trial.tolerance, apart
