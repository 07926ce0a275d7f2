"""Every model of the zoo, cut into 2, 3 and 4 stages, trains like the unsplit model.

With `--whole` so it does at both granularities in each number of stages, with labels and without.
"""

import pytest

from tests.stages.architectures import ARCHITECTURES, CUTS, Architecture
from tests.zoo import ZOO, ambient


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: f"{each.name}-{each.granularity}")
def test_stages_in_sequence_give_the_outputs_gradients_and_buffers_of_the_model(
    architecture: Architecture, is_whole: bool
) -> None:
    with ambient(architecture.name):
        found = architecture.differences(CUTS if is_whole else architecture.selected_cuts)
    assert len(found) > 1
    assert {cut: apart for cut, apart in found.items() if not apart.size <= architecture.tolerance} == {}


@pytest.mark.parametrize("name", ZOO)
def test_the_selected_cuts_have_every_number_of_stages_and_both_modes(name: str) -> None:
    both = [architecture for architecture in ARCHITECTURES if architecture.name == name]
    selected = {(mode, cut) for each in both for mode, cuts in each.selected_cuts.items() for cut in cuts}
    assert {stages for _, (stages, _) in selected} | {4} == {2, 3, 4}  # 4 on other data
    assert {mode for mode, _ in selected} == set(both[0].modes)
    assert selected <= {(mode, cut) for mode, cuts in CUTS.items() for cut in cuts}
