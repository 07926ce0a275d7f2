"""Every model of the zoo at every granularity, with and without labels, cut into 2, 3 and 4 stages.

`python -m tests.survey zoo` runs all combinations and writes the table of the zoo in docs/architectures.md.
"""

from dataclasses import dataclass

import penstock
from penstock.capture import Captured, without_cache
from penstock.partitioners import uniform
from tests.parity import Batch, Difference, StagedModel, WholeModel, difference, one_step
from tests.zoo import ALIKE, UNSCORED, ZOO, has_labels, without_labels
from tests.zoo.batch import Example

DEPTHS = {"blocks": None, "functions": 100}

# A value that several stages read gets its gradient in parts: sums of floats in another order than the model's own.
SUMMED_IN_PARTS = frozenset(
    {
        *("t5", "bart", "whisper", "deberta_v2", "transformer", "branches", "model_output_between", "nested_between"),
        *("recurrent_cells", "gru_attention", "detector"),
    }
)

Cuts = dict[str, tuple[tuple[int, bool], ...]]
"""by mode, numbers of stages and whether backward is split"""

CUTS: Cuts = {
    "labels": ((2, False), (3, True), (4, False)),
    "plain": ((2, True), (3, False), (4, False)),
}

# A run without `--whole` records every model that is not like another once: they alternate between both granularities,
# with labels and without, in 2 stages and in 3, and all of them run other data in 4 stages.
SELECTED_MODELS = [name for name in ZOO if name not in ALIKE]
SELECTED_MODES = {"blocks": "labels", "functions": "plain"}


@dataclass(frozen=True)
class Architecture:
    """One model of the zoo, recorded at one granularity."""

    name: str
    granularity: str

    @property
    def tolerance(self) -> float:
        """The largest difference allowed between the stages and the model."""
        return 1e-6 if self.name in SUMMED_IN_PARTS else 0.0

    @property
    def modes(self) -> tuple[str, ...]:
        """Every model runs without labels, and those that return their loss also with labels."""
        return ("plain",) if self.name in UNSCORED else ("labels", "plain")

    @property
    def is_selected(self) -> bool:
        """Whether a run without `--whole` has the model at this granularity."""
        return self.name in SELECTED_MODELS[list(DEPTHS).index(self.granularity) :: len(DEPTHS)]

    @property
    def selected_cuts(self) -> Cuts:
        """The cut of a run without `--whole`."""
        mode = "plain" if self.name in UNSCORED else SELECTED_MODES[self.granularity]
        place = SELECTED_MODELS.index(self.name) // len(DEPTHS) % 2
        return {mode: CUTS[mode][place : place + 1]}

    def captured(self, mode: str, example: Example | None = None) -> tuple[Captured, Batch]:
        """The captured model and its batch; the model is built if no example is given."""
        model, args, kwargs = example or ZOO[self.name]()
        kwargs = kwargs if mode == "labels" else without_labels(model, kwargs)
        captured = penstock.capture(model, args, kwargs, depth=DEPTHS[self.granularity])
        return captured, Batch(args, without_cache(model, kwargs), has_labels(kwargs))

    def differences(self, cuts: Cuts = CUTS) -> dict[str, Difference]:
        """The difference between stages and model for every cut, and for other data in 4 stages."""
        found: dict[str, Difference] = {}
        example = ZOO[self.name]()
        for mode in (mode for mode in self.modes if mode in cuts):
            captured, batch = self.captured(mode, example)
            expected = one_step(WholeModel(captured.model, batch.loss_fn), batch)
            for stages, is_split in cuts[mode]:
                staged = StagedModel(captured, uniform(captured.graph, stages), batch.loss_fn, is_split)
                name = f"{mode}, {stages} stages{', split backward' if is_split else ''}"
                found[name] = difference(one_step(staged, batch), expected)
        other = batch.other()
        expected = one_step(WholeModel(captured.model, other.loss_fn), other)
        staged = StagedModel(captured, uniform(captured.graph, 4), other.loss_fn)
        return found | {"other data": difference(one_step(staged, other), expected)}


ARCHITECTURES = [Architecture(name, depth) for name in ZOO for depth in DEPTHS]
