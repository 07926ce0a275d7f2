"""Stages run one after another in one process, as the unsplit model would."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.capture import Captured, Recording
from penstock.errors import PartitionError
from penstock.ir import Partition, leaves
from penstock.stages.cut_checks import check_guards
from penstock.stages.ownership import Ownership
from penstock.stages.stage import Stage
from penstock.stages.stage_run import StageRun


def split(captured: Captured, partition: Partition) -> tuple[Stage, ...]:
    """All stages of a partition."""
    partition.check(captured.graph)
    check_guards(captured.first, partition)
    return tuple(Stage(captured, partition, index) for index in range(partition.num_stages))


class Sequence:
    """The stages of a model, called like the model; `backward` after it accumulates the model's gradients."""

    def __init__(self, captured: Captured, partition: Partition, is_split: bool = False) -> None:
        """`is_split`: each stage's backward runs as input gradients, then weight gradients."""
        self.is_split = is_split
        self.stages = split(captured, partition)
        self._captured, self._partition = captured, partition
        self._runs: list[StageRun] = []
        self._recording: Recording | None = None
        self._outputs: list[Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for this batch."""
        recording = self._captured.recording(args, kwargs)
        inputs = self._captured.inputs(args, kwargs)
        self._recording, self._runs = recording, []
        fitted = Ownership(self._captured.graph, self._partition).fit(recording.graph)
        crossings = fitted.crossings(recording.graph)
        values: dict[str, Any] = {}
        for stage in self.stages:
            stage.check_state()
            received = (c for c in crossings if c.consumer == stage.stage_index)
            incoming = {value.name: values[value.name] for crossing in received for value in crossing.values}
            run = StageRun(stage, recording, inputs, incoming, self.is_split)
            values |= run.outputs
            self._runs.append(run)
        output = self._captured.output(recording, {**inputs, **values})
        self._outputs = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        return output

    def backward(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Backward of all stages, last first, from gradients of the output's tensors by their position in it.

        As in torch, None is a gradient of one, for a scalar.
        """
        if not self._runs or self._recording is None:
            raise PartitionError("backward needs a forward before it", hint="call the stages with a batch first")
        names = self._captured.output_names(self._recording)
        if unknown := [place for place in gradients if not 0 <= place < len(self._outputs)]:
            raise PartitionError("gradients must belong to outputs of the model", place=unknown[0], outputs=len(names))
        waiting: dict[str, Tensor] = {}
        for place, given in gradients.items():
            gradient = torch.ones_like(self._outputs[place]) if given is None else given
            if names[place]:
                _add(waiting, names[place], gradient)
            else:
                # The model returns a parameter, which no stage makes.
                torch.autograd.backward(self._outputs[place], gradient)
        for run in reversed(self._runs):
            own = {name: waiting.pop(name) for name in list(waiting) if name in run.outputs}
            returned = run.input_grad(own) if self.is_split else run.backward(own)
            if self.is_split:
                run.weight_grad()
            for name, back in returned.items():
                if back is not None:
                    _add(waiting, name, back)
        self._runs = []


def _add(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    """A value that several stages read gets the sum of the gradients that they return."""
    kept = gradients.get(name)
    gradients[name] = gradient if kept is None else kept + gradient
