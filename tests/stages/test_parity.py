"""Every model of the zoo, cut in 2, 3 and 4 stages, gives what it gave in one piece.

With `--whole` so it does at both granularities in each number of stages, with labels and without.
"""

import pytest

from tests.stages.trials import CUTS, TRIALS, Trial
from tests.zoo import ZOO, ambient


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.name}-{trial.granularity}")
def test_stages_in_sequence_give_the_outputs_gradients_and_buffers_of_the_model(trial: Trial, is_whole: bool) -> None:
    with ambient(trial.name):
        found = trial.differences(CUTS if is_whole else trial.turn)
    assert len(found) > 1
    assert {tried: apart for tried, apart in found.items() if not apart.size <= trial.tolerance} == {}


@pytest.mark.parametrize("name", ZOO)
def test_every_model_meets_every_number_of_stages_and_both_modes_by_turns(name: str) -> None:
    trials = [trial for trial in TRIALS if trial.name == name]
    tried = {(mode, cut) for trial in trials for mode, cuts in trial.turn.items() for cut in cuts}
    assert {stages for _, (stages, _) in tried} | {4} == {2, 3, 4}  # 4 on other data
    assert {mode for mode, _ in tried} == set(trials[0].modes)
    assert tried <= {(mode, cut) for mode, cuts in CUTS.items() for cut in cuts}
