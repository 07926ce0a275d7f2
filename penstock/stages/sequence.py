"""Runs stages one after another in one process, like the unsplit model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.capture import Captured, DrawSeed, Recording, tensors_in
from penstock.errors import PartitionError
from penstock.ir import Partition
from penstock.stages.cut_checks import check_guards
from penstock.stages.ownership import Ownership
from penstock.stages.stage import PartitionedModel, Stage
from penstock.stages.stage_run import StageRun


def split(captured: Captured, partition: Partition) -> tuple[Stage, ...]:
    """All stages of a partition."""
    partition.check(captured.graph)
    check_guards(captured.example_recording, partition)
    partitioned = PartitionedModel(captured, partition)
    return tuple(Stage(partitioned, index) for index in range(partition.num_stages))


class StageSequence:
    """The stages of a model, called like the model; `backward` after it accumulates the model's gradients."""

    def __init__(
        self, captured: Captured, partition: Partition, splits_backward: bool = False, seed: DrawSeed | None = None
    ) -> None:
        """`splits_backward`: each stage's backward runs as input gradients, then weight gradients.

        `seed`: see `Stage.forward`.
        """
        self.splits_backward, self.seed = splits_backward, seed
        self.stages = split(captured, partition)
        self._captured, self._partition = captured, partition
        self._runs: list[StageRun] = []
        self._recording: Recording | None = None
        self._outputs: list[Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for this batch."""
        recording = self._captured.recording(args, kwargs, self.seed.step_seed if self.seed else None)
        inputs = self._captured.inputs(args, kwargs)
        self._recording, self._runs = recording, []
        fitted = Ownership(self._captured.graph, self._partition).fit(recording.graph)
        crossings = fitted.crossings(recording.graph)
        values: dict[str, Any] = {}
        for stage in self.stages:
            stage.check_state()
            received = (c for c in crossings if c.consumer == stage.stage_index)
            incoming = {value.name: values[value.name] for crossing in received for value in crossing.values}
            run = StageRun(stage, recording, inputs, incoming, self.splits_backward, self.seed)
            values |= run.outputs
            self._runs.append(run)
        output = self._captured.output(recording, {**inputs, **values})
        self._outputs = tensors_in(output)
        return output

    def backward(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Run backward of all stages, last first, from gradients of the output's tensors by their position in it.

        As in torch, None stands for a gradient of 1, for a scalar.
        """
        if not self._runs or self._recording is None:
            raise PartitionError("backward needs a forward before it", hint="call the stages with a batch first")
        names = self._captured.output_names(self._recording)
        if unknown := [position for position in gradients if not 0 <= position < len(self._outputs)]:
            raise PartitionError(
                "gradients must belong to outputs of the model",
                position=unknown[0],
                outputs=len(names),
                hint="the positions of tensors in the output, counted from 0",
            )
        pending: dict[str, Tensor] = {}
        for position, output_gradient in gradients.items():
            gradient = torch.ones_like(self._outputs[position]) if output_gradient is None else output_gradient
            if names[position]:
                add_gradient(pending, names[position], gradient)
            else:
                # The model returns a parameter, which no stage makes.
                torch.autograd.backward(self._outputs[position], gradient)
        for run in reversed(self._runs):
            root_gradients = {name: pending.pop(name) for name in list(pending) if name in run.outputs}
            returned = run.input_grad(root_gradients) if self.splits_backward else run.backward(root_gradients)
            if self.splits_backward:
                run.weight_grad()
            for name, input_gradient in returned.items():
                if input_gradient is not None:
                    add_gradient(pending, name, input_gradient)
        self._runs = []


def add_gradient(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    """Add a gradient to that of its value: several stages may read the value, and each returns a gradient."""
    sum_so_far = gradients.get(name)
    gradients[name] = gradient if sum_so_far is None else sum_so_far + gradient
