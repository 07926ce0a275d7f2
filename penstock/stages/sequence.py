"""Sequence: stages run one after another in one process, as the unsplit model would."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PartitionError
from penstock.ir import Partition, leaves
from penstock.stages.decisions import check_guards
from penstock.stages.ownership import Ownership
from penstock.stages.stage import Stage
from penstock.stages.stage_run import StageRun


def split(captured: Any, partition: Partition) -> tuple[Stage, ...]:
    """All stages of a partition."""
    partition.check(captured.graph)
    check_guards(captured.first, partition)
    return tuple(Stage(captured, partition, index) for index in range(partition.num_stages))


class Sequence:
    """The stages of a model, called like the model; `backward` after it accumulates the model's gradients."""

    def __init__(self, captured: Any, partition: Partition, is_split: bool = False) -> None:
        self.is_split = is_split
        """input gradients first, then weight gradients"""
        self.stages = split(captured, partition)
        self._captured, self._partition = captured, partition
        self._runs: list[StageRun] = []
        self._recording: Any = None
        self._tensors: list[Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for this batch."""
        recording = self._captured.recording(args, kwargs)
        inputs = self._captured.inputs(args, kwargs)
        self._recording, self._runs = recording, []
        values: dict[str, Any] = {}
        for stage in self.stages:
            names = self._incoming(stage.stage_index)
            run = StageRun(stage, recording, inputs, {name: values[name] for name in names}, self.is_split)
            values |= run.outputs
            self._runs.append(run)
        output = self._captured.output(recording, {**inputs, **values})
        self._tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        return output

    def _incoming(self, stage: int) -> tuple[str, ...]:
        graph = self._recording.graph
        crossings = Ownership(self._captured.graph, self._partition).fit(graph).crossings(graph)
        return tuple(dict.fromkeys(v.name for c in crossings if c.consumer == stage for v in c.values))

    def backward(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Backward of all stages, last first, from gradients of the tensors in the output, by their place in it."""
        if not self._runs:
            raise PartitionError("backward needs a forward before it", hint="call the stages with a batch first")
        names = self._captured.output_names(self._recording)
        if unknown := [place for place in gradients if not 0 <= place < len(self._tensors)]:
            raise PartitionError("a gradient of an output that is not there", place=unknown[0], outputs=len(names))
        waiting: dict[str, Tensor | None] = {}
        for place, given in gradients.items():
            # As in torch, no gradient of a scalar is a gradient of one.
            gradient = torch.ones_like(self._tensors[place]) if given is None else given
            if names[place]:
                _add(waiting, names[place], gradient)
            else:
                # The model returns a parameter: no stage makes it.
                torch.autograd.backward(self._tensors[place], gradient)
        for run in reversed(self._runs):
            own = {name: waiting.pop(name) for name in list(waiting) if name in run.outputs}
            returned = run.input_grad(own) if self.is_split else run.backward(own)
            if self.is_split:
                run.weight_grad()
            for name, back in returned.items():
                if back is not None:
                    _add(waiting, name, back)
        self._runs = []


def _add(gradients: dict[str, Tensor | None], name: str, gradient: Tensor | None) -> None:
    """A value that several stages read gets the sum of what they return."""
    kept = gradients.get(name)
    gradients[name] = gradient if kept is None or gradient is None else kept + gradient
