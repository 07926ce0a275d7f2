"""The schedule classes of torch.distributed.pipelining, which run steps over the stages of this rank."""

import warnings
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.batches import Microbatch, microbatch_sizes
from penstock.capture import spec_of
from penstock.errors import PenstockWarning, RunError, ScheduleError
from penstock.ir import Cuts, Kind, Program, Schedule, as_int, is_finite, leaves, map_leaves
from penstock.passes import DEFAULT_PASSES, lower, verify
from penstock.pipelining.actions import (
    CustomFunction,
    _Action,
    _ComputationType,
    _PipelineContext,
    as_torch_action,
    customisable_type,
    orders_text,
    with_custom_functions,
)
from penstock.pipelining.loss import StepLoss, split_target, target_rows
from penstock.pipelining.microbatch import merge_chunks, num_samples, split_args_kwargs_into_chunks
from penstock.pipelining.stage import PipelineStage
from penstock.runtime import (
    MAX_CONTENT,
    Agreement,
    ProcessGroups,
    RankMonitor,
    RunOptions,
    StageOutput,
    SyncRequest,
    SyncVote,
    TiedParameter,
    TiedReducer,
    UserStage,
    UserStageEngine,
    sent_values,
    watch_step,
)
from penstock.schedules import build

_FORMATS = ("compute_only", "compute_comms")


class _StepArguments(NamedTuple):
    """The arguments of a call of `step` or `eval` on this rank."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    losses: list[Any] | None
    keeps_outputs: bool
    loss_kwargs: dict[str, Any]


@dataclass
class _Step:
    """The microbatches of the current step on this rank, and its outputs."""

    given: _StepArguments
    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    num_samples: int | None
    """of the inputs of this rank; None if they do not show it"""
    targets: tuple[Microbatch, ...] | None = None
    target_rows: dict[str, int] = field(default_factory=dict)
    """the number of rows of every tensor in the target, by name"""
    outputs: dict[int, Any] = field(default_factory=dict)


class _PipelineSchedule:
    """The base of all schedules; see `step`."""

    schedule_name: ClassVar[str] = ""
    """the name in penstock's table of schedules; empty if the orders are loaded with `_load_csv`"""
    deadline_seconds: float = RunOptions.deadline_seconds
    """how long a rank waits for another before it raises an error; may be set before the first step"""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None,
        args_chunk_spec: tuple[Any, ...] | None,
        kwargs_chunk_spec: dict[str, Any] | None,
        output_merge_spec: Any,
        scale_grads: bool,
    ) -> None:
        count = as_int(n_microbatches)
        if count is None or count < 1:
            raise RunError("n_microbatches must be a whole number, 1 or more", got=repr(n_microbatches))
        if not stages or not all(isinstance(stage, PipelineStage) for stage in stages):
            given = [f"{type(stage).__module__}.{type(stage).__qualname__}" for stage in stages]
            hint = "from penstock.pipelining import PipelineStage, in place of torch's"
            raise RunError("stages must be one or more PipelineStages of penstock", got=given, hint=hint)
        if len({(stage.num_stages, id(stage.group)) for stage in stages}) > 1:
            raise RunError("the stages of a schedule must have the same num_stages and group")
        if loss_fn is not None and not callable(loss_fn):
            raise RunError("loss_fn must be a function", got=type(loss_fn).__name__)
        self._stages, self._n_microbatches, self._loss_fn = list(stages), count, loss_fn
        self._args_chunk_spec, self._kwargs_chunk_spec = args_chunk_spec, kwargs_chunk_spec
        self._output_merge_spec, self.scale_grads = output_merge_spec, scale_grads
        self._num_stages, self.pp_group_size = stages[0].num_stages, stages[0].group_size
        self.rank = stages[0].group_rank
        self._has_backward = loss_fn is not None
        self._loss = None if loss_fn is None else StepLoss(loss_fn, scale_grads)
        self._functions: dict[_ComputationType, CustomFunction] = {}
        self._order: Schedule | Program | None = None
        self._version = 0
        """how often orders or custom functions were changed"""
        self._programs: dict[bool, Program] = {}
        """of a training step (True) and of an evaluation, for the current orders and custom functions"""
        self._engine: UserStageEngine | None = None
        self._tied: TiedReducer | None = None
        self._num_calls = 0
        self._step: _Step | None = None
        if self.schedule_name:
            per_rank, rest = divmod(self._num_stages, self.pp_group_size)
            if rest:
                raise ScheduleError(
                    "num_stages must be a multiple of the number of ranks",
                    num_stages=self._num_stages,
                    ranks=self.pp_group_size,
                )
            self._set_order(build(self.schedule_name, self.pp_group_size, count, per_rank))

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The rank of every stage."""
        return dict(enumerate(self._checked_order().placement.ranks))

    @property
    def pipeline_order(self) -> dict[int, list[_Action | None]]:
        """The compute actions of every rank."""
        order = self._checked_order()
        rows = order.orders if isinstance(order, Schedule) else order.schedule.orders
        return {rank: [as_torch_action(action) for action in row] for rank, row in enumerate(rows)}

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[_Action]]:
        """The actions of every rank in a training step, including messages."""
        rows = enumerate(self._program(True).orders)
        # torch has no action that frees memory.
        return {rank: [as_torch_action(action) for action in row if action.kind is not Kind.FREE] for rank, row in rows}

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and, if there is a loss function, backward of one whole batch. Every rank of the group calls it.

        Args:
            *args: arguments of the first stage, for the whole batch; given on its rank
            target: of the loss function, for the whole batch; given on the rank of the last stage
            losses: a list that is filled with the loss of each microbatch, on the rank of the last stage
            return_outputs: whether the outputs are merged and returned
            loss_kwargs: further keyword arguments of the loss function, which are not split
            **kwargs: keyword arguments of this rank's stages, for the whole batch

        Returns:
            The outputs of the whole batch on the rank of the last stage, None on others.

        Raises:
            RunError: if the step failed on any rank, or ranks made different calls
            ScheduleError: if the orders cannot be run
        """
        given = _StepArguments(args, kwargs, target, losses, return_outputs, loss_kwargs or {})
        return self._run(given, self._has_backward)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forward of one whole batch without gradients. As in torch, modules stay in train or eval mode.

        Args:
            *args: as in `step`
            target: as in `step`; None: no loss is computed
            losses: as in `step`
            return_outputs: as in `step`
            loss_kwargs: as in `step`
            **kwargs: as in `step`

        Returns:
            That of `step`.
        """
        given = _StepArguments(args, kwargs, target, losses, return_outputs, loss_kwargs or {})
        return self._run(given, False)

    def _run(self, given: _StepArguments, is_training: bool) -> Any:
        """Run one batch: split it, agree on the step with all ranks, execute the program, merge the outputs."""
        engine = self._started_engine()
        number, self._num_calls = self._num_calls, self._num_calls + 1
        request = SyncRequest("step" if is_training else "eval", number)
        last = next((stage for stage in self._stages if stage.is_last), None)
        if self._loss is not None:
            # A step that failed may have left losses.
            self._loss.end()
        with watch_step(engine.groups.monitor, number, is_training):
            program, step, shapes = self._begin(request, engine, given, last, is_training)
            if self._loss is not None and step.targets is not None:
                self._loss.begin(step.targets, is_training, given.loss_kwargs)
            # Gradients of earlier steps are set aside: they were already summed over the ranks that share a parameter.
            aside = [(parameter, parameter.grad) for parameter in self._tied.parameters] if self._tied else []
            for parameter, _ in aside:
                parameter.grad = None
            self._step = step
            adapt = partial(with_custom_functions, dict(self._functions), self._context)
            try:
                with torch.set_grad_enabled(is_training):
                    engine.execute(program, (self._version, is_training), number, is_training, shapes, adapt)
                if is_training and self._tied is not None:
                    self._tied.finish()
            finally:
                self._step = None
                for parameter, earlier in aside:
                    if earlier is not None:
                        parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        if self._loss is not None:
            if given.losses is not None and self._loss.losses:
                given.losses[:] = [self._loss.losses[index] for index in range(self._n_microbatches)]
            self._loss.end()
        if last is None or not given.keeps_outputs:
            return None
        # Not part of the step: if merging fails, the gradients of all ranks are complete.
        return merge_chunks([step.outputs[index] for index in range(self._n_microbatches)], self._output_merge_spec)

    def _begin(
        self,
        request: SyncRequest,
        engine: UserStageEngine,
        given: _StepArguments,
        last: PipelineStage | None,
        is_training: bool,
    ) -> tuple[Program, _Step, Hashable]:
        """Split the batch and agree with all ranks on the step; an error of one rank is raised on all ranks.

        Returns the program, the step, and a key that is equal for steps in which all ranks send values of the same
        shapes.
        """
        count = self._n_microbatches
        with engine.sync.errors_on_all_ranks(request):
            if is_training and not torch.is_grad_enabled():
                raise RunError("step must be called with gradients enabled", hint="eval(...), or step without no_grad")
            program = self._program(is_training)
            self._check_arguments(given, last, is_training)
            step = self._split(given, last)
            digest = self._digest(step)
        # Only the first stage is given all samples; a rank without them must not affect the maximum.
        has_samples = step.num_samples is not None and any(stage.is_first for stage in self._stages)
        maxes = (float(step.num_samples or 0) if has_samples else -float("inf"),)
        agreement = Agreement.of_step(program, [], f"{request.name} on {count} microbatches")
        content = (digest, *sorted(set(step.target_rows.values())))
        result = engine.sync.exchange(request, SyncVote(agreement, maxes=maxes, content=content))
        contents = [result.content(rank) for rank in range(engine.groups.num_ranks)]
        all_samples = result.maxes[0]
        uneven = [int(number) for _, *rows in contents for number in rows if all_samples > 0 and number % all_samples]
        if uneven:
            problem = "the target must have the same number of rows for every sample of the inputs"
            raise RunError(problem, samples=int(all_samples), rows=", ".join(map(str, uneven))).on_all_ranks()
        if all_samples > 0 and any(number != all_samples for number in step.target_rows.values()):
            sizes = microbatch_sizes(int(all_samples), count)
            step.targets = split_target(given.target, step.target_rows, sizes, count)
        return program, step, tuple(digest for digest, *_ in contents)

    def _split(self, given: _StepArguments, last: PipelineStage | None) -> _Step:
        """Split the inputs and the target of this rank into microbatches.

        The target is split into even parts: the number of samples may be known only on another rank. That finds all
        errors but uneven numbers of rows.
        """
        count, is_first = self._n_microbatches, any(stage.is_first for stage in self._stages)
        # As in torch, arguments by position are those of the first stage; others receive their inputs.
        own_args = given.args if is_first else ()
        specs = self._args_chunk_spec if is_first else None
        arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(
            own_args, given.kwargs, count, specs, self._kwargs_chunk_spec if given.kwargs else None
        )
        for stage in self._stages:
            for parts in zip(arg_mbs, kwarg_mbs, strict=True) if stage.is_first else ():
                stage.check_microbatch(*parts)
        samples = num_samples(own_args, specs) or num_samples(given.kwargs, self._kwargs_chunk_spec)
        step = _Step(given, arg_mbs, kwarg_mbs, samples)
        if last is not None and given.target is not None and self._loss is not None:
            step.target_rows = target_rows(given.target)
            step.targets = split_target(given.target, step.target_rows, None, count)
            num_different = len(set(step.target_rows.values()))
            if num_different >= MAX_CONTENT:
                problem = f"the tensors of a target must have at most {MAX_CONTENT - 1} different numbers of rows"
                raise RunError(problem, got=num_different, hint="tensors with one row per sample")
        return step

    def _check_arguments(self, given: _StepArguments, last: PipelineStage | None, is_training: bool) -> None:
        """Raise a RunError if this rank cannot run a step with its arguments."""
        if given.losses is not None and not isinstance(given.losses, list):
            raise RunError("losses must be a list", got=type(given.losses).__name__)
        if not isinstance(given.loss_kwargs, dict) or not all(isinstance(name, str) for name in given.loss_kwargs):
            raise RunError("loss_kwargs must be a dict of keyword arguments", got=repr(given.loss_kwargs))
        if last is not None and is_training and given.target is None:
            raise RunError("the rank of the last stage must pass a target", hint="schedule.step(target=y)")
        if last is not None and self._loss is not None and given.target is not None:
            self._loss.check_call(given.loss_kwargs)
        for stage in self._stages:
            stage.check_call(given.args, given.kwargs)

    def _digest(self, step: _Step) -> float:
        """A checksum of everything on this rank that may change the shapes of the values that are sent."""
        entries: list[object] = []
        for leaf in leaves((step.args, step.kwargs)):
            is_plain = isinstance(leaf, bool | int | float | str | type(None))
            entries.append(spec_of(leaf) if isinstance(leaf, Tensor) else leaf if is_plain else type(leaf).__name__)
        for stage in self._stages:
            entries += [parameter.requires_grad for parameter in stage.submod.parameters()]
            entries += [module.training for module in stage.submod.modules()]
        return float(zlib.crc32(repr(entries).encode()))

    def _context(self) -> _PipelineContext:
        """The context of custom functions in the current step."""
        step = self._step
        targets = None if step.targets is None else [microbatch.target for microbatch in step.targets]
        return _PipelineContext(self, step.args, step.kwargs, targets, step.given.losses)

    def _set_order(self, order: Schedule | Program) -> None:
        """Use these orders in later steps; raises a ScheduleError if they do not fit the stages."""
        if (order.num_ranks, order.num_stages) != (self.pp_group_size, self._num_stages):
            raise ScheduleError(
                "orders must have the ranks and stages of the pipeline",
                orders=f"{order.num_ranks} ranks, {order.num_stages} stages",
                pipeline=f"{self.pp_group_size} ranks, {self._num_stages} stages",
            )
        if order.num_microbatches != self._n_microbatches:
            raise ScheduleError(
                "orders must have the number of microbatches of the schedule",
                got=order.num_microbatches,
                n_microbatches=self._n_microbatches,
            )
        placed = order.placement.stages[self.rank]
        given = sorted(stage.stage_index for stage in self._stages)
        if sorted(placed) != given:
            raise ScheduleError(
                "a rank must have the stages that the schedule places there",
                rank=self.rank,
                stages=given,
                schedule=sorted(placed),
                hint=f"PipelineStage(..., stage_index={placed[0]}, ...)",
            )
        self._order, self._version = order, self._version + 1
        self._programs.clear()

    def _checked_order(self) -> Schedule | Program:
        if self._order is None:
            raise ScheduleError("orders must be loaded before they are used", hint="schedule._load_csv(path)")
        return self._order

    def _program(self, is_training: bool) -> Program:
        """The lowered orders of a training or evaluation step."""
        if is_training not in self._programs:
            order = self._checked_order()
            if isinstance(order, Program) and is_training:
                program = order
            else:
                schedule = order if isinstance(order, Schedule) else order.schedule
                passes: tuple[str, ...] = ("add_transfers", "hoist_receives")
                if is_training:
                    # Sharded stages need unshard and reshard actions, and custom functions may replace them.
                    modules = [module for stage in self._stages for module in stage.submod.modules()]
                    has_shards = any(hasattr(module, "unshard") for module in modules)
                    has_shards |= bool({_ComputationType.UNSHARD, _ComputationType.RESHARD} & set(self._functions))
                    passes = (*DEFAULT_PASSES, "add_shard_moves") if has_shards else DEFAULT_PASSES
                program = lower(schedule if is_training else schedule.forwards(), passes=passes)
            verify(program)
            if is_training and program.is_forward_only:
                raise ScheduleError("orders of a step must have backwards", hint="schedule.eval(...), or no loss_fn")
            self._programs[is_training] = program
        return self._programs[is_training]

    def _started_engine(self) -> UserStageEngine:
        """The engine of this rank, made in the first step: that is a collective call."""
        if self._engine is None:
            first = self._stages[0]
            groups = _process_groups(first.group, self.deadline_seconds)
            stages = {stage.stage_index: _ScheduleStage(stage, self) for stage in self._stages}
            engine = UserStageEngine(groups, first.device, self._num_stages, stages)
            options = {
                "schedule": type(self).__name__,
                "n_microbatches": self._n_microbatches,
                "stages": self._num_stages,
                "loss_fn": "none" if self._loss_fn is None else "given",
                "scale_grads": self.scale_grads,
            }
            engine.sync.first_sync(Agreement.of_options(options))
            shared = [entry for stage in self._stages for entry in stage.tied]
            ranks = self.stage_index_to_group_rank if shared else {}
            tied = {
                name: TiedParameter(name, parameter, tuple(sorted({ranks[index] for index in users})))
                for name, parameter, users in shared
            }
            across = [each for _, each in sorted(tied.items()) if len(each.ranks) > 1]
            self._tied = TiedReducer(groups, across) if across else None
            self._engine = engine
        return self._engine


class _ScheduleStage(UserStage):
    """Runs a PipelineStage on the microbatches of the schedule's current step."""

    def __init__(self, stage: PipelineStage, schedule: _PipelineSchedule) -> None:
        self._stage, self._schedule = stage, schedule
        self.module, self.build_weight_grad = stage.submod, stage.dw_builder

    def forward(self, microbatch: int, received: list[Tensor]) -> StageOutput:
        stage, step, loss = self._stage, self._schedule._step, self._schedule._loss
        args = step.args[microbatch] if stage.is_first else tuple(received)
        if not stage.is_first:
            stage.check_values(args, stage.input_args, "inputs")
        output = stage.submod(*args, **step.kwargs[microbatch])
        if not stage.is_last:
            values = sent_values(output)
            stage.check_values(values, stage.output_args, "outputs")
            return StageOutput(values)
        if step.given.keeps_outputs:
            step.outputs[microbatch] = map_leaves(output, _detached)
        if loss is None or step.targets is None:
            return StageOutput(())
        return StageOutput((), partial(loss.loss, microbatch, output))


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule with one stage per rank."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
    ) -> None:
        """Build the orders of all ranks.

        Args:
            stage: the stage of this rank
            n_microbatches: number of microbatches that every batch is split into
            loss_fn: called with the output and the target of a microbatch on the rank of the last stage; None: `step`
                runs forwards only
            args_chunk_spec: how positional arguments are split, a TensorChunkSpec or None each; None: tensors along
                dimension 0
            kwargs_chunk_spec: how keyword arguments are split, by name
            output_merge_spec: how outputs of microbatches are merged; None: tensors along dimension 0
            scale_grads: whether the gradients of a mean loss are those of the batch; False: those of microbatches are
                summed

        Raises:
            ScheduleError: if there are not as many stages as ranks
            RunError: if an argument has a wrong type
        """
        if isinstance(stage, PipelineStage) and stage.num_stages != stage.group_size:
            raise ScheduleError(
                "a schedule with one stage per rank must have as many stages as ranks",
                stages=stage.num_stages,
                ranks=stage.group_size,
                hint="ScheduleInterleaved1F1B or another schedule with several stages per rank",
            )
        super().__init__(
            [stage], n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        )
        self._stage = stage


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """Runs forwards only."""

    schedule_name = "gpipe"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_backward = False


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    schedule_name = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward."""

    schedule_name = "1f1b"


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule with several stages per rank; without a schedule of its own, its orders are loaded by `_load_csv`."""

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        *,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        """Build the orders of all ranks.

        Args:
            stages: the stages of this rank, in any order
            n_microbatches: as in PipelineScheduleSingle
            loss_fn: as in PipelineScheduleSingle
            args_chunk_spec: as in PipelineScheduleSingle
            kwargs_chunk_spec: as in PipelineScheduleSingle
            output_merge_spec: as in PipelineScheduleSingle
            use_full_backward: deprecated and without effect, as in torch
            scale_grads: as in PipelineScheduleSingle
            backward_requires_autograd: must be True
            defer_pp_recv: without effect: receives are posted some passes before they are needed

        Raises:
            ScheduleError: if the schedule places other stages on this rank
            RunError: if an argument has a wrong type
        """
        if use_full_backward is not None:
            warnings.warn(
                "use_full_backward has no effect: the schedule decides whether backward is split",
                PenstockWarning,
                stacklevel=2,
            )
        if not backward_requires_autograd:
            raise RunError("backward_requires_autograd must be True", hint="a custom function may ignore autograd")
        super().__init__(
            stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        )

    def _load_csv(self, filename: str | Path, format: str = "compute_only") -> None:  # noqa: A002
        """Run the orders of a CSV file, of compute actions only or with messages ("compute_comms")."""
        self._set_order(_read_order(Path(filename), format))

    def _dump_csv(self, filename: str | Path, format: str = "compute_comms") -> None:  # noqa: A002
        """Write the orders as CSV, without or with messages."""
        _check_format(format)
        rows = self.pipeline_order if format == "compute_only" else self.pipeline_order_with_comms
        Path(filename).write_text(orders_text(rows), encoding="utf-8")

    def _prepare_schedule_with_comms(self, actions: Mapping[int, Sequence[Any]], format: str = "compute_only") -> None:  # noqa: A002
        """Run orders given as actions by rank; None is a bubble."""
        self._set_order(_read_order(orders_text(actions), format))

    def register_custom_function(self, computation_type: Any, custom_function: CustomFunction) -> None:
        """Call a function in place of actions of a type.

        Args:
            computation_type: a member of torch's enumeration of actions, or its text
            custom_function: called with the action and a context; `ctx.run()` runs the action itself

        Raises:
            RunError: if `custom_function` cannot be called, or actions of the type cannot be replaced
        """
        if not callable(custom_function):
            raise RunError("custom_function must be a function", got=type(custom_function).__name__)
        self._functions[customisable_type(computation_type)] = custom_function
        self._version += 1
        self._programs.clear()


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """A class name of torch: here every PipelineScheduleMulti runs orders with messages and custom functions."""


class ScheduleLoopedBFS(_PipelineScheduleRuntime):
    """All microbatches of one stage before the next stage of the rank."""

    schedule_name = "looped_bfs"


class ScheduleInterleaved1F1B(_PipelineScheduleRuntime):
    """One forward, one backward, over several stages per rank."""

    schedule_name = "interleaved"


class ScheduleInterleavedZeroBubble(_PipelineScheduleRuntime):
    """Interleaved 1F1B with weight gradients in the gaps."""

    schedule_name = "interleaved_zb"


class ScheduleZBVZeroBubble(_PipelineScheduleRuntime):
    """Two stages per rank in the shape of a V, with weight gradients in the gaps."""

    schedule_name = "zbv"


class ScheduleDualPipeV(_PipelineScheduleRuntime):
    """Two stages per rank in the shape of a V; forwards and backwards of different microbatches in pairs."""

    schedule_name = "dualpipe_v"


_CLASSES: tuple[type[_PipelineSchedule], ...] = (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleGPipe,
    ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble,
    PipelineScheduleSingle,
    PipelineScheduleMulti,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
)


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The class of a schedule by its name.

    Args:
        schedule_name: such as "1F1B", "Schedule1F1B" or "interleaved"; case does not matter

    Returns:
        The class.

    Raises:
        ScheduleError: if no schedule has that name
    """
    wanted = str(schedule_name).lower()
    for member in _CLASSES:
        name = member.__name__.lower()
        if wanted in (name, name.removeprefix("schedule"), member.schedule_name or name):
            return member
    names = ", ".join(member.__name__.removeprefix("Schedule") for member in _CLASSES)
    raise ScheduleError("unknown schedule", name=repr(schedule_name), hint=f"one of {names}")


def _process_groups(group: Any, deadline_seconds: float) -> ProcessGroups:
    """The groups of a pipeline whose ranks are those of a group of torch.distributed."""
    if not (is_finite(deadline_seconds) and deadline_seconds > 0):
        raise RunError("deadline_seconds must be a number above 0", got=repr(deadline_seconds), hint="60.0")
    ranks, is_gloo = dist.get_process_group_ranks(group), dist.get_backend(group) == "gloo"
    control = group if is_gloo else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    setting = f"schedule.deadline_seconds, set before the first step (now {deadline_seconds:g})"
    monitor = RankMonitor(ranks, (), deadline_seconds, setting)
    return ProcessGroups(dist.get_rank(group), len(ranks), group, control, monitor=monitor)


def _check_format(name: str) -> None:
    if name not in _FORMATS:
        raise RunError('format must be "compute_only" or "compute_comms"', got=repr(name))


def _read_order(path_or_text: Path | str, format_name: str) -> Schedule | Program:
    """Read orders from CSV, without or with messages."""
    _check_format(format_name)
    if format_name == "compute_only":
        return Schedule.from_csv(path_or_text)
    program = Program.from_csv(path_or_text)
    if program.cuts.edges != Cuts.chain(program.num_stages).edges:
        raise ScheduleError("messages must be between neighbouring stages", edges=program.cuts.edges)
    verify(program)
    return program


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
