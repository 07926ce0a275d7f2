"""`pipeline` records a model and cuts it into stage modules; each returns the values that later stages read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from penstock.api.models import explain
from penstock.capture import Captured, Granularity, Recording, capture, isolated, set_mode, spec_of
from penstock.errors import PartitionError, RunError
from penstock.ir import Graph, Partition
from penstock.partitioners import cut_at
from penstock.pipelining.stage import PipelineStage, build_stage
from penstock.stages import Ownership, PartitionedModel, Stage

_SPLIT = "split"
_events: list[tuple[str, str]] | None = None
"""while a forward is searched for calls of pipe_split: these calls, and calls and returns of modules; else None"""
Tied = tuple[tuple[str, nn.Parameter, tuple[int, ...]], ...]
"""name, parameter and stages of each parameter that several stages use"""


class SplitPoint(Enum):
    """Where to cut: before a module is called, or after."""

    BEGINNING = 1
    END = 2


def pipe_split() -> None:
    """Begin a new stage with the next module that the forward of a model calls; a no-op outside of `pipeline`."""
    if _events is not None:
        _events.append((_SPLIT, ""))


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Any = None,
) -> "Pipe":
    """Record a model on an example microbatch, and cut it at the modules of `split_spec` or where it calls pipe_split.

    Every rank calls it with the same model. Later microbatches must have the shapes of the example.

    Args:
        module: the model
        mb_args: positional arguments of the model for one microbatch, whose values do not matter
        mb_kwargs: keyword arguments of the model for one microbatch
        split_spec: where to cut, by module name; None: where the forward calls `pipe_split`
        split_policy: must be None: in torch it changes the exported graph, and nothing is exported here

    Returns:
        The model cut into stages.

    Raises:
        PartitionError: if a name is not that of a module that the forward calls, or a cut is not possible there
        CaptureError: if the model cannot be recorded
    """
    if split_policy is not None:
        raise PartitionError(
            "split_policy is not supported: it changes an exported graph, and models are not exported here",
            hint='split_spec={"layers.2": SplitPoint.BEGINNING}, or pipe_split() in the forward',
        )
    args, kwargs = tuple(mb_args), dict(mb_kwargs or {})
    points = _split_points(module, args, kwargs) if split_spec is None else list(split_spec.items())
    for name, point in points:
        # torch's own enumeration has the same members.
        if getattr(point, "name", None) not in SplitPoint.__members__:
            raise PartitionError("a split point must be a SplitPoint", module=name, got=repr(point))
    words = [name.split(".") for name, _ in points]
    opened = frozenset(".".join(parts[:end]) for parts in words for end in range(1, len(parts)))
    captured = capture(module, args, kwargs, Granularity(opened=opened))
    indices = {_first_node_after(captured.graph, name, point.name) for name, point in points}
    if split_spec is None and len(indices) < len(points):
        raise PartitionError(
            "the forward must call a module between two calls of pipe_split",
            calls=len(points),
            cuts=len(indices),
            hint="put the operations between them into a module, or leave out a call",
        )
    return Pipe(captured, cut_at(captured.graph, sorted(indices)))


def _first_node_after(graph: Graph, module: str, point: str) -> int:
    """The index of the first node after a split point."""
    is_inside = [node.module == module or node.module.startswith(f"{module}.") for node in graph.nodes]
    if not any(is_inside):
        hint = "a name of model.named_modules()"
        raise PartitionError("split_spec must name modules that the forward calls", name=repr(module), hint=hint)
    return is_inside.index(True) if point == "BEGINNING" else len(is_inside) - is_inside[::-1].index(True)


def _split_points(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, SplitPoint]]:
    """The modules next to the calls of pipe_split in the model's forward."""
    # First, because it explains why a model cannot be run on these arguments.
    capture(model, args, kwargs)
    with isolated(model), torch.no_grad(), _logged_calls(model) as events:
        model(*args, **kwargs)
    points = []
    for index, (kind, _) in enumerate(events):
        if kind != _SPLIT:
            continue
        following = next((name for what, name in events[index:] if what == "call"), None)
        if following is not None:
            if ("call", following) in events[:index]:
                raise PartitionError(
                    "the module called after pipe_split must not have been called before",
                    module=following,
                    hint='split_spec={"layers.2": SplitPoint.BEGINNING}',
                )
            points.append((following, SplitPoint.BEGINNING))
        else:
            ended = [name for what, name in events[:index] if what == "return"]
            if not ended:
                raise PartitionError("a forward that calls pipe_split must call a module before or after it")
            points.append((ended[-1], SplitPoint.END))
    return points


@contextmanager
def _logged_calls(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Log calls of pipe_split, and calls and returns of modules."""
    global _events
    events: list[tuple[str, str]] = []
    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: events.append(("call", name))))
            handles.append(module.register_forward_hook(lambda *_, name=name: events.append(("return", name))))
    _events = events
    try:
        yield events
    finally:
        _events = None
        for handle in handles:
            handle.remove()


class TracedStage(Stage):
    """A stage of a recorded model as a module, called with the values that the previous stage returned.

    The first stage takes the arguments of the model, and the last returns its output. Parameters have the names of the
    model. A value that skips stages is passed on by the stages between.
    """

    def __init__(self, partitioned: PartitionedModel, index: int) -> None:
        super().__init__(partitioned, index)
        self._recordings: dict[bool, Recording] = {}
        self._passed: dict[Recording, tuple[tuple[str, ...], ...]] = {}
        """by recording and stage, the names of the values that the stage passes to the next one"""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage. Only the first takes keyword arguments; it passes on those that later stages read."""
        captured, index = self._partitioned.captured, self.stage_index
        recording = self._example_recording()
        graph = recording.graph
        passed = self._passed.get(recording)
        if passed is None:
            partition = Ownership(captured.graph, self._partitioned.partition).fit(graph)
            passed = self._passed[recording] = _passed_values(graph, partition)
        if index == 0:
            values = captured.inputs(args, kwargs)
        elif len(args) != len(passed[index - 1]):
            raise RunError(
                "a stage of a recorded model must be given the values that the previous stage returned",
                stage=index,
                values=len(passed[index - 1]),
                got=len(args),
            )
        else:
            values = dict(zip(passed[index - 1], args, strict=True))
        _check_shapes(graph, values)
        self.check_state()
        inputs = {name: value for name, value in values.items() if name not in graph.makers}
        incoming = {name: value for name, value in values.items() if name in graph.makers}
        values |= super().forward(recording, inputs, incoming)
        if index == self._partitioned.partition.num_stages - 1:
            return captured.output(recording, values)
        sent = tuple(values[name] for name in passed[index])
        return sent[0] if len(sent) == 1 else sent

    def _example_recording(self) -> Recording:
        """The recording of the example for the current mode (train or eval), made in the first forward of a mode."""
        mode = self.training
        if mode not in self._recordings:
            captured = self._partitioned.captured
            with set_mode(captured.model, mode):
                self._recordings[mode] = captured.recording(*captured.example)
        return self._recordings[mode]

    def check_microbatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a RunError if the first stage was not recorded for arguments of these shapes."""
        recording = self._example_recording()
        values = self._partitioned.captured.inputs(args, kwargs)
        known = {value.name for value in recording.graph.inputs}
        if values.keys() != known:
            raise RunError(
                "a microbatch must have the arguments of the example that the model was recorded with",
                example=sorted(known),
                got=sorted(values),
            )
        _check_shapes(recording.graph, values)


def _check_shapes(graph: Graph, values: Mapping[str, Any]) -> None:
    """Refuse values of other shapes or dtypes than when the model was recorded."""
    for name, value in values.items():
        spec = graph.spec(name)
        found = spec_of(value) if isinstance(value, Tensor) else None
        if found is None or (found.shape, found.dtype) != (spec.shape, spec.dtype):
            raise RunError(
                "a microbatch must have the shapes of the example that the model was recorded with",
                value=name,
                example=spec,
                got=found or type(value).__name__,
                hint="a batch that n_microbatches divides evenly, or penstock.Pipeline, which records new shapes",
            )


def _passed_values(graph: Graph, partition: Partition) -> tuple[tuple[str, ...], ...]:
    """The names of the values that each stage passes to the next one: all that later stages read, inputs included."""
    inputs = {value.name for value in graph.inputs}
    read = [dict.fromkeys(name for node in nodes for name in node.reads) for nodes in partition.runs(graph)]
    read[-1] |= dict.fromkeys(graph.outputs)
    crossings = partition.crossings(graph)
    passed = []
    for stage in range(partition.num_stages - 1):
        names = dict.fromkeys(
            value.name
            for crossing in crossings
            if crossing.producer <= stage < crossing.consumer
            for value in crossing.values
        )
        names |= {name: None for later in read[stage + 1 :] for name in later if name in inputs}
        passed.append(tuple(names))
    return tuple(passed)


@dataclass(frozen=True)
class PipeInfo:
    """The stages of a Pipe, without its modules."""

    num_stages: int
    tied: Tied = ()
    has_loss_and_backward: bool = False
    """a field of torch's record; always False, because the schedule computes the loss"""


class Pipe:
    """A model cut into stages by `pipeline`. Called like the model, it runs all stages in this process.

    Args:
        captured: the recorded model
        partition: its stages
    """

    def __init__(self, captured: Captured, partition: Partition) -> None:
        partition.check(captured.graph)
        self._captured, self._partition = captured, partition
        partitioned = PartitionedModel(captured, partition)
        self._stages = [TracedStage(partitioned, index) for index in range(partition.num_stages)]
        self.num_stages = partition.num_stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model."""
        value = self._stages[0](*args, **kwargs)
        for stage in self._stages[1:]:
            value = stage(*(value if isinstance(value, tuple) else (value,)))
        return value

    forward = __call__

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of a stage; its parameters are the model's own, with the model's names.

        Args:
            stage_idx: index of the stage

        Raises:
            PartitionError: if no stage has that index
        """
        if not 0 <= stage_idx < self.num_stages:
            raise PartitionError(
                "stage_idx must be at least 0 and below num_stages", got=stage_idx, num_stages=self.num_stages
            )
        return self._stages[stage_idx]

    def build_stage(self, stage_index: int, device: torch.device | str, group: Any = None) -> PipelineStage:
        """Make the PipelineStage of a stage, for a schedule.

        Args:
            stage_index: index of the stage
            device: of the stage and its messages
            group: the ranks of the pipeline; None: all ranks

        Raises:
            PartitionError: if no stage has that index
            RunError: if torch.distributed is not initialised
        """
        return build_stage(self.get_stage_module(stage_index), stage_index, self.info(), device, group)

    def info(self) -> PipeInfo:
        """The number of stages and the parameters that several stages use, for `build_stage`."""
        users: dict[nn.Parameter, tuple[str, set[int]]] = {}
        for index, nodes in enumerate(self._partition.runs(self._captured.graph)):
            for name in sorted({name for node in nodes for name in node.parameters}):
                parameter = self._captured.model.get_parameter(name)
                users.setdefault(parameter, (name, set()))[1].add(index)
        tied = [(name, each, tuple(sorted(stages))) for each, (name, stages) in users.items() if len(stages) > 1]
        return PipeInfo(self.num_stages, tuple(tied))

    def print_readable(self) -> None:
        """Print the values that cross each cut."""
        print(self)

    def __str__(self) -> str:
        return explain(self._captured, self._partition)
