"""Trials: every model of the zoo at every granularity, with and without labels."""

from dataclasses import dataclass

from penstock.capture import Captured, capture
from penstock.capture.captured import without_cache
from penstock.partitioners import uniform
from tests.split.parity import Batch, Difference, difference, of_model, of_stages
from tests.zoo import ZOO, has_labels, without_labels

DEPTHS = {"blocks": None, "functions": 100}

# A value that several stages read gets its gradient in parts: sums of floats in another order than the model's own.
SUMMED_IN_PARTS = frozenset(
    {"t5", "bart", "whisper", "deberta_v2", "transformer", "branches", "model_output_between", "nested_between"}
)


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
        captured = capture(model, args, kwargs, depth=DEPTHS[self.granularity])
        return captured, Batch(args, without_cache(model, kwargs), has_labels(kwargs))

    @property
    def tolerance(self) -> float:
        """How far the stages may be from the model."""
        return 1e-6 if self.name in SUMMED_IN_PARTS else 0.0

    def differences(self, *cuts: tuple[int, bool]) -> dict[str, Difference]:
        """How far the stages are from the model, for cuts given as (number of stages, whether backward is split)."""
        captured, batch = self.recorded()
        expected = of_model(captured.model, batch)
        return {
            f"{stages} stages{', split backward' if is_split else ''}": difference(
                expected, of_stages(captured, uniform(captured.graph, stages), batch, is_split)
            )
            for stages, is_split in cuts
        }


def modes(name: str) -> tuple[str, ...]:
    """A model that scores itself is tried with labels and without."""
    return ("labels", "plain") if has_labels(ZOO[name]()[2]) else ("plain",)


TRIALS = [Trial(name, mode, depth) for name in ZOO for mode in modes(name) for depth in DEPTHS]
