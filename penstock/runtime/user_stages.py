"""Runs hand-written stages: functions or modules that exist on their own rank only, and are called as a whole.

Such stages form a chain: each receives the values that the previous one returned. They are not recorded, so the shapes
of their messages are known only once they have run. In the first step with inputs of some shapes every message has a
header (`transports/described.py`); later steps with such inputs send the tensors alone. Orders, compiled actions, split
backward and transports are those of recorded stages.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.capture import LruCache, spec_of
from penstock.errors import RunError
from penstock.ir import Crossing, Cuts, Program, TensorSpec, Value
from penstock.launch import one_line
from penstock.runtime.executor import LOSS, RankProgram, SameRankSlot, StagePass, execute
from penstock.runtime.fsdp import FsdpStages
from penstock.runtime.gradients import ReplicaReducer
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.step_compiler import Edges, compile_ranks
from penstock.runtime.sync import RankSync, SyncRequest
from penstock.runtime.transports import DescribedTransport, make_transport
from penstock.stages import DeferredAccumulator, ForwardRun

# Stands for the values of a message that has a header: any number of any shape. It requires a gradient, so that a
# message with gradients goes back.
_DESCRIBED = Value("values", TensorSpec((), "float32", requires_grad=True))
_MAX_COMPILED = 32


class StageOutput(NamedTuple):
    """The result of one forward of a hand-written stage."""

    values: Sequence[Tensor]
    """for the next stage"""
    loss: Callable[[], tuple[Tensor, float]] | None = None
    """of the last stage: computes the loss that backward starts from, and the factor of its gradient"""
    backward: Callable[[Sequence[Tensor | None]], object] | None = None
    """called with the gradients of `values` in place of autograd's backward"""


def sent_values(output: Any) -> list[Tensor]:
    """The values that a stage sends to the next one, from the output of its forward."""
    values = [output] if isinstance(output, Tensor) else output
    if not isinstance(values, list | tuple) or not values or not all(isinstance(value, Tensor) for value in values):
        raise RunError(
            "the forward of a stage must return a tensor, or a list or tuple of tensors",
            got=type(output).__name__,
            hint="return the values that the next stage reads; the last stage may return anything",
        )
    return list(values)


class UserStage(ABC):
    """A stage as the caller wrote it."""

    module: nn.Module | None = None
    """its parameters, if it is a module: `fully_shard` and DistributedDataParallel inside are found in it"""
    build_weight_grad: Callable[[], Callable[..., None]] | None = None
    """called after each backward; it returns a function that computes the weight gradients, which backward did not"""

    @abstractmethod
    def forward(self, microbatch: int, received: list[Tensor]) -> StageOutput:
        """Run the stage on the values of the previous stage; the first stage is given an empty list."""


class UserStageRunner:
    """Runs the passes of this rank's hand-written stages."""

    def __init__(self, groups: ProcessGroups, num_stages: int, stages: Mapping[int, UserStage]) -> None:
        self.stages, self._last_stage = dict(stages), num_stages - 1
        self.is_training = False
        modules = {index: stage.module for index, stage in stages.items() if stage.module is not None}
        self.fsdp = FsdpStages(modules)
        self._replicated = {
            index: [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
            for index, module in modules.items()
        }
        self.has_replicas = any(self._replicated.values())
        self._groups = groups
        self._reducers: list[ReplicaReducer] = []
        self._accumulators: defaultdict[int, DeferredAccumulator] = defaultdict(DeferredAccumulator)
        self._runs: dict[tuple[int, int], ForwardRun] = {}
        self._loss_gradients: dict[tuple[int, int], Tensor] = {}
        self._weight_grads: dict[tuple[int, int], Callable[..., None]] = {}
        self.expected: Mapping[tuple[int, int], tuple[TensorSpec, ...]] | None = None
        """by stage and microbatch, the specs of the values that it must return; None in a step with headers"""
        self.sent: dict[tuple[int, int], tuple[TensorSpec, ...]] = {}
        """the specs of the values that each stage returned in this step"""
        self.received: dict[tuple[int, int], tuple[TensorSpec, ...]] = {}
        """the specs of the values that each stage received in this step"""
        self.missing_gradients: dict[tuple[int, int], set[int]] = {}
        """by the producing stage and the microbatch, the values for which backward found no gradient"""

    def forward(self, stage_pass: StagePass) -> None:
        """Run a stage on the values that it received; pass on its result."""
        index, microbatch = stage_pass.stage, stage_pass.microbatch
        self.fsdp.wait(index)
        stage, received, is_same_rank = self.stages[index], [], False
        # Stages form a chain, so that each pass has at most one slot of each direction.
        for _, slot in stage_pass.incoming:
            received += [value for value in slot.take() if value is not None]
            is_same_rank = isinstance(slot, SameRankSlot)
        self.received[index, microbatch] = tuple(map(spec_of, received))
        incoming = {str(number): value for number, value in enumerate(received)}
        outputs: list[StageOutput] = []

        def run_stage(values: dict[str, Any]) -> dict[str, Any]:
            with ExitStack() as stack:
                for module in self._replicated.get(index, ()):
                    # Gradients are averaged once, after the last microbatch.
                    stack.enter_context(module.no_sync())
                outputs.append(stage.forward(microbatch, list(values.values())))
            return {str(number): value for number, value in enumerate(outputs[0].values)}

        # A stage may write into its inputs. Those from another stage of this rank are needed for that stage's backward.
        written = tuple(incoming) if is_same_rank else ()
        splits_backward = stage_pass.splits_backward and stage.build_weight_grad is None
        accumulator = self._accumulators[index]
        run = ForwardRun(run_stage, incoming, accumulator.run, written=written, splits_backward=splits_backward)
        (output,) = outputs
        self._check_values(index, microbatch, output.values)
        if output.loss is not None:
            # Outside of the run, in which functions are replaced to defer weight gradients: a loss may take gradients.
            loss, weight = output.loss()
            if self.is_training:
                run.add_root(LOSS, loss)
                self._loss_gradients[index, microbatch] = torch.full_like(loss.detach(), weight)
        if self.is_training:
            if output.backward is not None:
                own_backward, count = output.backward, len(output.values)
                run.own_backward = lambda gradients: own_backward([gradients.get(str(each)) for each in range(count)])
            self._runs[index, microbatch] = run
        values = list(run.take_outputs().values())
        for _, target in stage_pass.outgoing:
            target.put(values)

    def _check_values(self, stage: int, microbatch: int, values: Sequence[Tensor]) -> None:
        """Compare the values with those of the step in which the shapes were exchanged."""
        specs = self.sent[stage, microbatch] = tuple(map(spec_of, values))
        if self.expected is None or stage == self._last_stage:
            return
        expected = self.expected[stage, microbatch]
        if [_comparable(spec) for spec in specs] != [_comparable(spec) for spec in expected]:
            raise RunError(
                "a stage must return values of the same shapes, dtypes and requires_grad for inputs of the same shapes",
                stage=stage,
                before=_texts(expected),
                now=_texts(specs),
                hint="pad the values to one shape",
            )

    def backward(self, stage_pass: StagePass) -> None:
        """Run the backward of a stage, whole or for the inputs only; pass back the gradients of its inputs."""
        key = index, microbatch = stage_pass.stage, stage_pass.microbatch
        stage = self.stages[index]
        if index in self.fsdp.modules:
            self.fsdp.before_backward(index)
        gradients: dict[str, Tensor | None] = {}
        if key in self._loss_gradients:
            gradients[LOSS] = self._loss_gradients.pop(key)
        names = [str(number) for number, spec in enumerate(self.sent[key]) if spec.requires_grad]
        for _, slot in stage_pass.incoming:
            given = slot.take()
            gradients.update(zip(names, given, strict=True))
            self.missing_gradients[key] = {int(name) for name, each in gradients.items() if each is None}
        if stage.build_weight_grad is not None:
            returned = self._runs.pop(key).backward(gradients)
            compute = stage.build_weight_grad()
            if stage_pass.splits_backward:
                self._weight_grads[key] = compute
            else:
                compute()
        elif stage_pass.splits_backward:
            returned = self._runs[key].input_grad(gradients)
        else:
            returned = self._runs.pop(key).backward(gradients)
        for _, target in stage_pass.outgoing:
            target.put(list(returned.values()))
            missing = {int(name) for name, each in returned.items() if each is None}
            self.missing_gradients[index - 1, microbatch] = missing

    def weight_grad(self, stage_pass: StagePass) -> None:
        """Compute the weight gradients of a split backward; a no-op if backward was not split."""
        key = stage_pass.stage, stage_pass.microbatch
        run, compute = self._runs.pop(key, None), self._weight_grads.pop(key, None)
        if run is not None:
            run.weight_grad()
        if compute is not None:
            compute()

    def reduce(self, stage: int) -> None:
        """Start averaging the gradients of modules wrapped in DistributedDataParallel, after the last microbatch."""
        for module in self._replicated.get(stage, ()):
            group = module.process_group
            groups = ProcessGroups(0, 1, group, replicas=group, monitor=self._groups.monitor)
            self._reducers.append(ReplicaReducer(groups, {stage: list(module.module.parameters())}))
            self._reducers[-1].start(stage)

    def begin(self, is_training: bool, num_microbatches: int) -> None:
        """Prepare a step."""
        self.clear()
        self.is_training = is_training
        if is_training:
            self.fsdp.begin_step(num_microbatches)
        else:
            self.fsdp.begin_evaluation()

    def finish(self) -> None:
        """Wait for the averages over replicas."""
        for reducer in self._reducers:
            reducer.finish()
        self._reducers.clear()

    def clear(self) -> None:
        """Drop everything of the last step."""
        for entries in (self._runs, self._loss_gradients, self._weight_grads, self.sent, self.received):
            entries.clear()
        self.missing_gradients.clear()
        self._reducers.clear()


class UserStageEngine:
    """Runs the steps of hand-written stages on this rank, together with all other ranks."""

    def __init__(
        self, groups: ProcessGroups, device: torch.device, num_stages: int, stages: Mapping[int, UserStage]
    ) -> None:
        """`stages` are those of this rank; `runner.stages` may also be set before every step."""
        self.groups, self.sync = groups, RankSync(groups)
        self.runner = UserStageRunner(groups, num_stages, stages)
        self._described = DescribedTransport(groups, device)
        # The "auto" transport: hand-written stages have no option to ask for another.
        self._transport = make_transport(groups, device)
        self._compiled: LruCache[Hashable, RankProgram] = LruCache(_MAX_COMPILED)
        self._specs: LruCache[Hashable, _Specs] = LruCache(_MAX_COMPILED)
        self._failure = ""
        """why no more steps can be taken"""

    def execute(
        self,
        program: Program,
        key: Hashable,
        number: int,
        is_training: bool,
        shapes: Hashable | None = None,
        adapt: Callable[[RankProgram], RankProgram] = lambda compiled: compiled,
    ) -> None:
        """Run this rank's actions of step `number`. Collective.

        `key` identifies the program, and `shapes` the shapes of the inputs of all ranks: messages have headers in the
        first step with these shapes, and none in later ones. Without `shapes` every message has a header. `adapt` may
        replace compiled actions.
        """
        if program.cuts.edges != Cuts.chain(program.num_stages).edges:
            raise RunError("hand-written stages must send to the next stage only", edges=program.cuts.edges)
        if self._failure:
            raise RunError(
                "hand-written stages cannot continue after a step that failed: its messages may still arrive",
                failure=self._failure,
                hint="start the processes again",
            )
        specs = None if shapes is None else self._specs.find((key, shapes))
        runner, transport = self.runner, self._transport if specs else self._described
        count = program.num_microbatches
        edges = (
            specs.edges if specs else [{edge: Crossing(*edge, (_DESCRIBED,)) for edge in program.cuts.edges}] * count
        )
        compiled = self._compiled.get_or_make(
            (key, shapes if specs else None),
            lambda: adapt(*compile_ranks(program, edges, self.groups.own_ranks, runner, transport)),
        )
        runner.begin(is_training, count)
        runner.expected = specs.sent if specs else None
        self._described.step_number = number
        try:
            execute(compiled, self.groups.monitor.action_reporter)
            for slot in compiled.send_slots:
                slot.finish()
            runner.finish()
            if shapes is not None and specs is None:
                # All ranks must know the same shapes: none uses them before all have finished this step.
                self.sync.exchange(SyncRequest("the end of a first step", number))
                self._specs.put((key, shapes), _Specs.of(runner, program.num_stages, count))
        except BaseException as error:
            if self.groups.num_ranks > 1:
                self._failure = one_line(error)
            compiled.clear()
            transport.clear()
            raise
        runner.clear()


class _Specs(NamedTuple):
    """The values between stages, as found in a step with headers."""

    sent: dict[tuple[int, int], tuple[TensorSpec, ...]]
    """by stage and microbatch"""
    edges: list[Edges]
    """by microbatch, those of this rank's stages"""

    @classmethod
    def of(cls, runner: UserStageRunner, num_stages: int, num_microbatches: int) -> "_Specs":
        """The values of the step that `runner` has just run."""
        between = {(stage - 1, microbatch): specs for (stage, microbatch), specs in runner.received.items() if stage}
        between |= {key: specs for key, specs in runner.sent.items() if key[0] < num_stages - 1}
        edges: list[dict[tuple[int, int], Crossing]] = [{} for _ in range(num_microbatches)]
        for (stage, microbatch), specs in between.items():
            values = tuple(Value(str(number), spec) for number, spec in enumerate(specs))
            optional = tuple(str(number) for number in sorted(runner.missing_gradients.get((stage, microbatch), ())))
            edges[microbatch][stage, stage + 1] = Crossing(stage, stage + 1, values, optional)
        return cls(dict(runner.sent), edges)


def _comparable(spec: TensorSpec) -> tuple[object, ...]:
    return spec.shape, spec.dtype, spec.requires_grad


def _texts(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec}{' with gradient' if spec.requires_grad else ''}" for spec in specs) or "nothing"
