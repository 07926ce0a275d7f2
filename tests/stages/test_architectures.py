"""Every model of the zoo, cut into 2, 3 and 4 stages, trains like the unsplit model.

With `--whole` each is recorded at both granularities, with labels and without.
"""

import pytest

from tests.stages.architectures import ARCHITECTURES, CUTS, Architecture
from tests.zoo import ALIKE, ZOO, ambient


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=() if each.is_selected else pytest.mark.whole, id=f"{each.name}-{each.granularity}")
        for each in ARCHITECTURES
    ],
)
def test_stages_in_sequence_give_the_outputs_gradients_and_buffers_of_the_model(
    architecture: Architecture, is_whole: bool
) -> None:
    with ambient(architecture.name):
        found = architecture.differences(CUTS if is_whole else architecture.selected_cuts)
    assert len(found) > 1
    assert {cut: apart for cut, apart in found.items() if not apart.size <= architecture.tolerance} == {}


def test_the_selection_has_every_kind_of_model_in_every_number_of_stages() -> None:
    selected = [architecture for architecture in ARCHITECTURES if architecture.is_selected]
    assert [each.name for each in selected] == [name for name in ZOO if name not in ALIKE]
    assert {each.granularity for each in selected} == {each.granularity for each in ARCHITECTURES}
    assert {mode for each in selected for mode in each.selected_cuts} == set(CUTS)
    for each in selected:
        cuts = {(mode, cut) for mode, cuts in each.selected_cuts.items() for cut in cuts}
        assert {stages for _, (stages, _) in cuts} | {4} == {2, 3, 4}  # 4 on other data
        assert cuts <= {(mode, cut) for mode, cuts in CUTS.items() for cut in cuts}
