"""Every model of the zoo, cut in 2, 3 and 4 stages, gives what it gave in one piece."""

from dataclasses import dataclass

import pytest

from penstock.capture import Captured, capture
from penstock.capture.captured import without_cache
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from tests.split.parity import Batch, Difference, difference, of_model, of_stages
from tests.zoo import ZOO, ambient, has_labels, without_labels

_DEPTHS = {"blocks": None, "functions": 100}

# A value that several stages read gets its gradient in parts: sums of floats in another order than the model's own.
SUMMED_IN_PARTS = frozenset(
    {"t5", "bart", "whisper", "deberta_v2", "transformer", "branches", "model_output_between", "nested_between"}
)

# Opened down to functions, these decide by the content of activations: other data is refused, never wrong.
DECIDES_BY_CONTENT = frozenset({"control_flow"})


@dataclass(frozen=True)
class Trial:
    """One model, recorded at one granularity with or without labels."""

    name: str
    mode: str
    granularity: str

    def recorded(self) -> tuple[Captured, Batch]:
        """The recorded model and its batch."""
        model, args, kwargs = ZOO[self.name]()
        kwargs = kwargs if self.mode == "labels" else without_labels(model, kwargs)
        if self.mode == "labels" and not has_labels(kwargs):
            pytest.skip("the model has no labels")
        captured = capture(model, args, kwargs, depth=_DEPTHS[self.granularity])
        return captured, Batch(args, without_cache(model, kwargs), has_labels(kwargs))

    @property
    def tolerance(self) -> float:
        """How far the stages may be from the model."""
        return 1e-6 if self.name in SUMMED_IN_PARTS else 0.0

    def differences(self, *cuts: tuple[int, bool]) -> dict[str, Difference]:
        """What differs for cuts given as (number of stages, whether backward is split); nothing, if all is well."""
        captured, batch = self.recorded()
        expected = of_model(captured.model, batch)
        found = {
            f"{stages} stages{', split backward' if is_split else ''}": difference(
                expected, of_stages(captured, uniform(captured.graph, stages), batch, is_split)
            )
            for stages, is_split in cuts
        }
        return {cut: apart for cut, apart in found.items() if not apart.size <= self.tolerance}


TRIALS = [Trial(name, mode, depth) for name in ZOO for mode in ("labels", "plain") for depth in _DEPTHS]


@pytest.fixture(params=TRIALS, ids=lambda trial: f"{trial.name}-{trial.mode}-{trial.granularity}")
def trial(request: pytest.FixtureRequest) -> Trial:
    return request.param


def test_stages_in_sequence_give_the_outputs_gradients_and_buffers_of_the_model(trial: Trial) -> None:
    with ambient(trial.name):
        assert trial.differences((2, False), (3, False), (4, False), (3, True)) == {}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("granularity", _DEPTHS)
def test_a_record_holds_for_other_data_or_is_refused(name: str, granularity: str) -> None:
    trial = Trial(name, "plain", granularity)
    with ambient(name):
        captured, batch = trial.recorded()
        other = batch.other()
        expected, partition = of_model(captured.model, other), uniform(captured.graph, 4)
        if granularity == "functions" and name in DECIDES_BY_CONTENT:
            with pytest.raises(CaptureError, match="decides otherwise"):
                of_stages(captured, partition, other)
        else:
            apart = difference(expected, of_stages(captured, partition, other))
            assert apart.size <= trial.tolerance, apart
