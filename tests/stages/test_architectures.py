"""Every model of the zoo, cut into 2 or 3 stages and into 4, trains like the unsplit model.

With `--whole` each is cut into 2, 3 and 4, recorded at both granularities, with labels and without.
"""

import pytest

from tests.stages.architectures import ARCHITECTURES, CUTS, DEPTHS, SELECTED_MODES, Architecture
from tests.zoo import ALIKE, UNSCORED, ZOO, ambient


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
    for granularity in DEPTHS:
        scored = [each for each in selected if each.name not in UNSCORED]
        cuts = [each.selected_cuts for each in scored if each.granularity == granularity]
        assert [list(cut) for cut in cuts] == [[SELECTED_MODES[granularity]]] * len(cuts)
        assert {stages for cut in cuts for ((stages, _),) in cut.values()} | {4} == {2, 3, 4}  # 4 on other data
