"""Trials: every model of the zoo at every granularity, with and without labels."""

from dataclasses import dataclass

from penstock.capture import Captured, capture, without_cache
from penstock.partitioners import uniform
from tests.stages.parity import Batch, Difference, difference, of_model, of_stages
from tests.zoo import UNSCORED, ZOO, has_labels, without_labels
from tests.zoo.batch import Example

DEPTHS = {"blocks": None, "functions": 100}

# A value that several stages read gets its gradient in parts: sums of floats in another order than the model's own.
SUMMED_IN_PARTS = frozenset(
    {"t5", "bart", "whisper", "deberta_v2", "transformer", "branches", "model_output_between", "nested_between"}
)

Cuts = dict[str, tuple[tuple[int, bool], ...]]

# How many stages, and whether backward is split.
CUTS: Cuts = {
    "labels": ((2, False), (3, True), (4, False)),
    "plain": ((2, True), (3, False), (4, False)),
}

# By turns, these and those: with what is tried on other data, in 4 stages, every model meets every number of stages.
TURNS: tuple[Cuts, Cuts] = ({"labels": ((3, True),)}, {"plain": ((2, True),)})
UNSCORED_TURNS: tuple[Cuts, Cuts] = ({"plain": ((3, False),)}, {"plain": ((2, True),)})


@dataclass(frozen=True)
class Trial:
    """One model, recorded at one granularity."""

    name: str
    granularity: str

    @property
    def tolerance(self) -> float:
        """How far the stages may be from the model."""
        return 1e-6 if self.name in SUMMED_IN_PARTS else 0.0

    @property
    def modes(self) -> tuple[str, ...]:
        """A model that scores itself is tried with labels, and every model without."""
        return ("plain",) if self.name in UNSCORED else ("labels", "plain")

    @property
    def turn(self) -> Cuts:
        """What a run without `--whole` tries of the cuts; the other granularity of the model has the other turn."""
        turns = UNSCORED_TURNS if self.name in UNSCORED else TURNS
        return turns[(list(ZOO).index(self.name) + list(DEPTHS).index(self.granularity)) % 2]

    def recorded(self, mode: str, example: Example | None = None) -> tuple[Captured, Batch]:
        """The recorded model and its batch; the model is built if none is given."""
        model, args, kwargs = example or ZOO[self.name]()
        kwargs = kwargs if mode == "labels" else without_labels(model, kwargs)
        captured = capture(model, args, kwargs, depth=DEPTHS[self.granularity])
        return captured, Batch(args, without_cache(model, kwargs), has_labels(kwargs))

    def differences(self, cuts: Cuts = CUTS) -> dict[str, Difference]:
        """How far the stages are from the model, by what was tried: at last, the last record on other data."""
        found: dict[str, Difference] = {}
        example = ZOO[self.name]()
        for mode in (mode for mode in self.modes if mode in cuts):
            captured, batch = self.recorded(mode, example)
            expected = of_model(captured.model, batch)
            for stages, is_split in cuts[mode]:
                apart = difference(expected, of_stages(captured, uniform(captured.graph, stages), batch, is_split))
                found[f"{mode}, {stages} stages{', split backward' if is_split else ''}"] = apart
        other = batch.other()
        expected = of_model(captured.model, other)
        return found | {"other data": difference(expected, of_stages(captured, uniform(captured.graph, 4), other))}


TRIALS = [Trial(name, depth) for name in ZOO for depth in DEPTHS]
