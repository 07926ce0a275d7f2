"""Counting: what the terms of a loss are divided by in one microbatch, found before anything of the model runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import Recording, Replay
from penstock.ir import Call, Count, Facts, LossRule
from penstock.runtime.weights import count_labels


def facts_of(recording: Recording, model: nn.Module) -> Facts:
    """What the record knows only by name."""

    def attribute(module: str, name: str) -> Any:
        return getattr(model.get_submodule(module), name, None)

    def read(key: str) -> Any:
        return recording.live[key].value

    return Facts(attribute, read)


class Tally:
    """Counts for every microbatch that a recording holds for; prepared once."""

    def __init__(self, rule: LossRule, recording: Recording, model: nn.Module) -> None:
        self.rule, self.recording, self._model = rule, recording, model
        counted = [count for term in rule.terms for count in term.counts]
        nodes = tuple(dict.fromkeys(name for count in counted for name in count.nodes))
        at_hand = {*recording.record.inputs, *(made.name for name in nodes for made in recording.graph[name].makes)}
        wanted = {name for count in counted for name in (count.value, count.class_weights) if name in at_hand}
        self._replay = Replay(recording, nodes, model, wanted) if counted else None

    def __call__(self, inputs: Mapping[str, Tensor], size: int) -> tuple[float, ...]:
        """One number for each term: counted labels, or samples."""
        if self._replay is None:
            return tuple(float(size) for _ in self.rule.terms)
        # The model may write into its inputs; those of the user stay as they are.
        written = self.recording.graph.written
        own = {name: leaf.clone() if name in written else leaf for name, leaf in inputs.items()}
        with torch.no_grad():
            values = self._replay.run(own)
        counts = (term.counts[0] if term.counts else None for term in self.rule.terms)
        return tuple(float(size) if count is None else self._number(count, values, size) for count in counts)

    def is_like(self, rule: LossRule) -> bool:
        """Whether the loss is made of the same kinds of terms."""
        return [term.kind for term in self.rule.terms] == [term.kind for term in rule.terms]

    def _number(self, count: Count, values: Mapping[str, Tensor], size: int) -> float:
        value = values[count.value]
        if count.measure == "labels":
            return count_labels(value, count.ignore_index, self._class_weights(count.class_weights, values))
        if count.measure == "entries":
            return float(value.numel())
        if count.measure == "total":
            return float(value.sum(dtype=torch.float64))
        return float(value) * (size if count.measure == "share" else 1)

    def _class_weights(self, name: str, values: Mapping[str, Tensor]) -> Tensor | None:
        if not name or name in values:
            return values.get(name)
        if name in self.recording.live:
            return self.recording.live[name]  # type: ignore[no-any-return]
        path, _, attribute = name.rpartition(".")
        return getattr(self._model.get_submodule(path), attribute)  # type: ignore[no-any-return]


def without_numbers(recording: Recording) -> Recording:
    """The recording without what it read from tensors as numbers: those are what is counted."""

    def stays(step: Any) -> bool:
        return isinstance(step, Call) or type(recording.live[step.expected].value) not in (int, float)

    steps = tuple(step for step in recording.record.steps if stays(step))
    return replace(recording, record=replace(recording.record, steps=steps))
