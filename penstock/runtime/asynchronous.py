"""Trains without a flush between batches: each stage updates its own weights while other batches are in flight.

One 1F1B order covers the microbatches of all batches (`penstock.planner.Stream`); each call of `AsyncEngine.train` runs
one chunk of it. The last backwards of a batch run in the chunks of later batches. No rank waits for all others in a
step: votes and losses of a step are sent while later steps run, and are read `_lag` steps later.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.batches import Batch
from penstock.capture import ARITHMETIC_DTYPES, Recording
from penstock.errors import PenstockError, RunError
from penstock.ir import Cuts, Plan, Trace
from penstock.passes import verify
from penstock.planner import Stream, check_stream
from penstock.runtime.agreement import Agreement, autocast_dtype
from penstock.runtime.engine import Engine, generators_restored, step_options, tensors_requiring_grad
from penstock.runtime.executor import (
    ActionTimes,
    RankProgram,
    StagePass,
    StageRunner,
    action_times,
    execute,
    execute_local,
    watch_step,
)
from penstock.runtime.groups import LOSS_TAG, ProcessGroups
from penstock.runtime.loss_head import LossHead, WarningCause
from penstock.runtime.model_part import ModelPart
from penstock.runtime.options import RunOptions
from penstock.runtime.outputs import OutputDims
from penstock.runtime.step import NO_LOSS, LossVote, Result, Step
from penstock.runtime.step_compiler import Edges, compile_ranks
from penstock.runtime.sync import RankSync, SyncRequest, SyncVote
from penstock.runtime.trace import recorded_trace
from penstock.runtime.transports import LocalTransport
from penstock.runtime.weight_versions import StageWeights, Version, check_predicted, refuse_other_steps
from penstock.stages import StageRun, parameter_ranks

_OPTIMIZER_HINT = "optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)"
_MAX_KINDS = 64
"""kinds of chunks whose compiled programs are kept"""


class PendingResult(Result):
    """The Result of a step without a flush. It is known some steps later, or after `drain`; see `is_known`.

    A subclass, so that code written for a Result works with asynchronous pipelines too.
    """

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "_result", None)

    # Not __getattr__: fields of Result that have a default are attributes of the class, and would be found there.
    def __getattribute__(self, name: str) -> Any:
        if name not in _RESULT_FIELDS:
            return object.__getattribute__(self, name)
        result = object.__getattribute__(self, "_result")
        if result is None:
            raise RunError(
                "the result of an asynchronous step is not known yet",
                step=self.number,
                hint="read it once result.is_known is True, or call pipe.drain() first",
            )
        return getattr(result, name)

    number: int
    """of the step"""

    @property
    def is_known(self) -> bool:
        """Whether loss, losses and weights are known; the same on every rank."""
        return object.__getattribute__(self, "_result") is not None

    def set(self, result: Result) -> None:
        """Make the result known."""
        object.__setattr__(self, "_result", result)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        known = repr(self._result) if self.is_known else "not known yet"
        return f"PendingResult(step {self.number}: {known})"


_RESULT_FIELDS = frozenset(Result.__dataclass_fields__)


@dataclass(eq=False)
class StreamBatch:
    """A batch in flight."""

    number: int
    """in the stream, from 0"""
    step: Step
    result: PendingResult
    num_backwards_left: dict[int, int]
    """by stage of this process"""
    runs: dict[tuple[int, int], StageRun] = field(default_factory=dict)
    """by stage and microbatch, between forward and backward"""
    versions: dict[tuple[int, int], Version] = field(default_factory=dict)
    """by stage and microbatch, the weights of its forward, which its backward uses too"""


class StreamRunner(StageRunner):
    """Runs passes of several batches, each with its own version of the weights, and updates them after each batch."""

    def __init__(
        self,
        model_part: ModelPart,
        last_stage: int,
        loss_head: LossHead,
        weights: dict[int, StageWeights],
        checks: bool,
    ) -> None:
        """With `checks`, NaN or Inf in a loss or gradient raises an error before the update."""
        super().__init__(model_part, last_stage, loss_head)
        self._weights, self._checks = weights, checks
        self.window: Sequence[tuple[StreamBatch, int] | None] = ()
        """by microbatch of the chunk that runs now: its batch, and its index in the batch"""

    def forward(self, stage_pass: StagePass) -> None:
        batch, index = self._select_batch(stage_pass)
        weights = self._weights[stage_pass.stage]
        version = batch.versions[stage_pass.stage, index] = weights.acquire(batch.number)
        with weights.using(version):
            super().forward(stage_pass._replace(microbatch=index))
        if batch.step.weights_by_loss:
            raise RunError(
                "an asynchronous pipeline must have one loss",
                losses=", ".join(batch.step.weights_by_loss),
                hint="a loss function that returns their sum",
            )

    def backward(self, stage_pass: StagePass) -> None:
        batch, index = self._select_batch(stage_pass)
        stage, weights = stage_pass.stage, self._weights[stage_pass.stage]
        version = batch.versions.pop((stage, index))
        with weights.using(version):
            super().backward(stage_pass._replace(microbatch=index))
        weights.release(version)
        batch.num_backwards_left[stage] -= 1
        if not batch.num_backwards_left[stage]:
            if self._checks:
                self._check_finite(stage, batch)
            weights.update()

    def _select_batch(self, stage_pass: StagePass) -> tuple[StreamBatch, int]:
        """Select the batch of a pass; returns it with the index of the microbatch in the batch."""
        entry = self.window[stage_pass.microbatch]
        self.step, self._runs = entry[0].step, entry[0].runs
        return entry

    def _check_finite(self, stage: int, batch: StreamBatch) -> None:
        extremes, parameters = batch.step.extremes, self._model_part.stages[stage].parameters()
        extremes.add(stage, [parameter.grad for parameter in parameters], is_gradient=True)
        outputs, gradients = extremes.nonfinite_stages()
        is_forward = stage in outputs
        if is_forward or stage in gradients:
            raise RunError(
                "loss or gradient is NaN or Inf; the weights of this stage were not updated",
                step=batch.result.number,
                during="forward" if is_forward else "backward",
                hint="a smaller learning rate, or a checkpoint from before",
            )


@dataclass(eq=False)
class Chunk:
    """The compiled part of a stream that belongs to one call; not used again before its sends are finished."""

    key: object
    """equal for chunks that are compiled alike"""
    agreement: Agreement
    rank_programs: tuple[RankProgram, ...]


class LossMessages:
    """Sends the losses and weights of each batch from the last rank to all others, without waiting."""

    def __init__(self, groups: ProcessGroups, last_rank: int, tag: int) -> None:
        self._groups, self._last_rank, self._tag = groups, last_rank, tag
        self._started: deque[tuple[Tensor, list[Any]]] = deque()

    def start(self, losses_and_weights: Sequence[float], count: int) -> None:
        """Start to send or receive the losses and weights of a batch of `count` microbatches."""
        values = torch.tensor(losses_and_weights or [0.0] * 2 * count, dtype=torch.float64)
        works, groups = [], self._groups
        if not groups.is_local and groups.rank == self._last_rank:
            others = (rank for rank in range(groups.num_ranks) if rank != groups.rank)
            works = [groups.start(groups.control.send, [values], rank, self._tag) for rank in others]
        elif not groups.is_local:
            works = [groups.start(groups.control.recv, [values], self._last_rank, self._tag)]
        self._started.append((values, works))

    def finish(self) -> list[float]:
        """Wait for the losses and weights of the oldest batch that was started."""
        values, works = self._started.popleft()
        for work in works:
            self._groups.wait(work)
        return values.tolist()

    def clear(self) -> None:
        """Drop what was started, after a failure."""
        self._started.clear()


class AsyncEngine(Engine):
    """Runs the steps of streams. `drain` ends a stream; evaluation is that of `Engine`, between streams."""

    def __init__(
        self,
        model_part: ModelPart,
        plan: Plan,
        sync: RankSync,
        loss_head: LossHead,
        options: RunOptions,
        optimizer: torch.optim.Optimizer,
        staleness: str,
        **engine_options: Any,
    ) -> None:
        """`optimizer` updates the parameters of this process; `engine_options` are those of `Engine`."""
        super().__init__(model_part, plan, sync, loss_head, options, **engine_options)
        check_stream(plan, staleness)
        self._staleness = staleness
        self.weights = {
            index: StageWeights(list(stage.parameters()), optimizer, staleness)
            for index, stage in model_part.stages.items()
        }
        is_checked = options.nonfinite != "ignore"
        self._stream_runner = StreamRunner(model_part, plan.num_stages - 1, loss_head, self.weights, is_checked)
        local = LocalTransport(model_part.device, is_stream=True) if self._groups.is_local else None
        self._stream_transport = local or self._transport
        # This many steps later, all ranks have at least begun the step: reading its votes then does not wait.
        self._lag = -(-(plan.num_ranks - 1) // plan.num_microbatches) + 1
        self._syncs = [sync.concurrent(number) for number in range(1, self._lag + 2)]
        self._losses = LossMessages(self._groups, self._last_rank, LOSS_TAG + sync.tag_offset)
        self._streams: dict[Cuts, Stream] = {}
        self._stream_of(plan.cuts)  # so that a plan whose stream could deadlock is refused now
        self._free_chunks: dict[object, list[Chunk]] = {}
        self._num_calls = 0
        self._causes: list[WarningCause] = []
        """of the warnings that `drain` will issue"""
        self._reset()

    def _reset(self) -> None:
        """Begin a new stream."""
        self._stream: Stream | None = None
        self._counts: list[int] = []
        """number of microbatches of each batch of the stream"""
        self._batches: deque[StreamBatch] = deque()
        """those with microbatches that a later chunk may still use"""
        self._running: deque[Chunk] = deque()
        """chunks whose sends may not have arrived"""
        self._votes: deque[tuple[RankSync, StreamBatch | None]] = deque()
        """syncs that were started, each with the batch whose losses it carries"""
        self._finished: deque[tuple[StreamBatch, tuple[float, ...]]] = deque()
        """batches whose votes are known and whose results are not, with the sums of the votes"""
        self._times: list[ActionTimes] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no batch is in flight."""
        return not self._counts

    def check_usable(self) -> None:
        """Raise an error after a failure: the stages have weights of different batches."""
        if self._failure:
            raise RunError(
                "an asynchronous pipeline cannot continue after a failed step",
                failure=self._failure,
                hint="a new Pipeline, and pipe.load(...) of the last checkpoint",
            )

    def train(
        self,
        batch: Batch,
        step_number: int,
        keeps_outputs: bool,
        is_timed: bool,
        output_dims: OutputDims = None,
        scale: float = 1.0,
    ) -> Result:
        """Run the next chunk of the stream: the forwards of this batch, and the backwards that 1F1B has between them.

        Returns a PendingResult.
        """
        self.check_usable()
        options = step_options(False, is_timed, scale)
        if (dtype := autocast_dtype(self._model_part.device.type)) != "off":
            # Not only in the agreement: to report how that differs, all ranks must exchange it at once, but a rank for
            # which the shapes are known reads the votes of this step only in a later one.
            options = ", ".join(filter(None, (options, f"autocast={dtype}")))
        request = SyncRequest("step", step_number, options)
        with watch_step(self._groups.monitor, step_number, True):
            with self._sync_of_call.errors_on_all_ranks(request):
                if any(value.grad_fn is not None for value in tensors_requiring_grad(batch)):
                    problem = "an asynchronous pipeline returns no gradients to the computation of a batch"
                    raise RunError(problem, hint="x.detach()")
                entry, chunk, vote, is_new = self._begin(batch, step_number, keeps_outputs, is_timed, scale)
            with self._ending_stream_on_error():
                self._start_vote(request, vote)
                if is_new or self._groups.rank == self._last_rank:
                    # The ranks agree on new shapes before any data is sent. The last rank reads all votes at once;
                    # it does not wait for long, as each rank votes before it computes what the last rank needs.
                    self._finish_votes(0)
                for weights in self.weights.values():
                    if self.is_empty:
                        weights.start()
                    else:
                        weights.check_gradients()
                num_before = sum(self._counts)
                self._counts.append(len(entry.step.microbatches))
                self._batches.append(entry)
                self._run(chunk, is_timed, num_before)
                for weights in self.weights.values():
                    weights.note_gradients()
                # Warnings are issued when the stream is drained.
                new = self._warnings.find_new(entry.step)
                self._causes = list(dict.fromkeys((*self._causes, *new)))
                if len(self._running) > self._lag:
                    self._finish_chunk()
                self._finish_votes(self._lag)
                self._publish(self._lag)
            return entry.result

    def drain(self, step_number: int) -> Trace | None:
        """Finish all batches in flight; returns the Trace of the stream if its steps were recorded."""
        self.check_usable()
        if self.is_empty:
            return None
        with watch_step(self._groups.monitor, step_number, True):
            num_before = sum(self._counts)
            with self._ending_stream_on_error():
                for weights in self.weights.values():
                    weights.check_gradients()
                chunk, _ = self._chunk(self._stream, num_before, ())
                self._start_vote(SyncRequest("drain", step_number), SyncVote(chunk.agreement))
                if self._groups.rank == self._last_rank:
                    self._finish_votes(0)
                self._run(chunk, self._times is not None, num_before)
                self._finish_votes(0)
                while self._running:
                    self._finish_chunk()
                self._publish(0)
                causes, self._causes = self._causes, []
                end = self._sync.exchange(SyncRequest("the end of drain", step_number), SyncVote(sums=(len(causes),)))
                if end.sums[0]:
                    self._warnings.issue(causes, True)
                trace = None
                if self._times is not None:
                    program = self._stream.unrolled(self._counts)
                    trace = recorded_trace(program, self._plan.costs, self._groups, self._times)
            self._reset()
            return trace

    @property
    def _sync_of_call(self) -> RankSync:
        """The sync of this call: those of the last `_lag` calls are still in use."""
        return self._syncs[self._num_calls % len(self._syncs)]

    @contextmanager
    def _ending_stream_on_error(self) -> Iterator[None]:
        """End the stream for good if the body fails: the stages have applied updates of different batches."""
        # The check of an earlier evaluation does not cover the messages of this step.
        self._stream_transport.begin_step()
        try:
            yield
        except BaseException as error:
            self._failure = str(error)
            if isinstance(error, PenstockError):
                # Published, as other ranks may lose contact with this one before they read the same votes.
                error.is_shared = False
            for chunk in self._running:
                for program in chunk.rank_programs:
                    program.clear()
            self._stream_transport.clear()
            self._sync.abandon_messages()
            self._losses.clear()
            for weights in self.weights.values():
                weights.restore()
            self._free_chunks.clear()
            self._reset()
            raise

    def _begin(
        self, batch: Batch, step_number: int, keeps_outputs: bool, is_timed: bool, scale: float
    ) -> tuple[StreamBatch, Chunk, SyncVote, bool]:
        """Split a batch and compile its chunk; nothing is changed if that fails."""
        groups = self._groups
        if keeps_outputs:
            hint = "pipe.eval(..., return_outputs=True)"
            raise RunError("return_outputs must be False in an asynchronous pipeline", hint=hint)
        if not self.is_empty and is_timed != (self._times is not None):
            raise RunError("record must be the same in all steps between two drains", hint="pipe.drain() before")
        if self._staleness == "2bw" and self._counts and self._counts[-1] < self._plan.num_ranks - 1:
            raise RunError(
                'with staleness="2bw" all but the last batch before a drain must have at least ranks - 1 microbatches',
                got=self._counts[-1],
                ranks=self._plan.num_ranks,
                hint="pipe.drain() after a short batch",
            )
        step = self._new_step(step_number, True, scale=scale)
        batch = self._target_as_argument(batch)
        self._split_batch(batch, step)
        step.mean_size = float(sum(microbatch.size for microbatch in step.microbatches))
        edges = self._compiler.edges(True, step.recordings)
        cuts = self._compiler.cuts(edges)
        if not self.is_empty and self._stream is not None and self._stream.cuts != cuts:
            raise RunError(
                "stages must exchange the same values for all batches between two drains", hint="pipe.drain() before"
            )
        self._stream = stream = self._stream_of(cuts)
        chunk, is_new = self._chunk(stream, sum(self._counts), step.recordings)
        num_backwards_left = dict.fromkeys(self._model_part.stages, len(step.microbatches))
        entry = StreamBatch(len(self._counts), step, PendingResult(step_number), num_backwards_left)
        batch_checksum, batch_leaves = (
            (0, {}) if groups.is_local else self._comparison.checksum(batch, SyncRequest("step", step_number))
        )
        return entry, chunk, SyncVote(chunk.agreement, batch_checksum, batch=batch_leaves), is_new

    def _stream_of(self, cuts: Cuts) -> Stream:
        """The stream for these cuts. A new one is proven free of deadlock up to the point where its chunks repeat."""
        if cuts not in self._streams:
            stream, count = Stream(cuts), self._plan.num_microbatches
            verify(stream.unrolled([count] * (stream.num_distinct // count + 2)))
            self._streams[cuts] = stream
        return self._streams[cuts]

    def _chunk(self, stream: Stream, num_before: int, recordings: tuple[Recording, ...]) -> tuple[Chunk, bool]:
        """The compiled chunk of the next batch, and whether it is the first of its kind.

        Without `recordings`, the chunk that drains the stream.
        """
        start = min(num_before, stream.num_distinct)
        recent = [recording for batch in self._batches for recording in batch.step.recordings]
        earlier = tuple(recent[len(recent) - min(start, stream.num_ranks - 1) :])
        key = (stream.cuts, start, earlier, recordings)
        is_new = key not in self._free_chunks
        if free := self._free_chunks.setdefault(key, []):
            return free.pop(), is_new
        while len(self._free_chunks) > _MAX_KINDS:
            self._free_chunks.pop(next(iter(self._free_chunks)))
        program = stream.chunk(num_before, len(recordings))
        # Microbatches that no action of the chunk uses have no edges.
        unused: list[Edges] = [{}] * (start - len(earlier))
        edges = [*unused, *self._compiler.edges(True, (*earlier, *recordings))]
        name = f"train on {len(recordings)} microbatches after {start}" if recordings else "drain"
        agreement = self._compiler.agreement(program, edges, name, recordings)
        rank_programs = compile_ranks(
            program, edges, self._groups.own_ranks, self._stream_runner, self._stream_transport
        )
        return Chunk(key, agreement, rank_programs), is_new

    def _run(self, chunk: Chunk, is_timed: bool, num_before: int) -> None:
        """Run a chunk that comes after `num_before` microbatches."""
        start = min(num_before, self._stream.num_distinct)
        microbatches = [(batch, index) for batch in self._batches for index in range(len(batch.step.microbatches))]
        length = start + sum(self._counts) - num_before
        # The first batches may have been dropped: no action of the chunk uses their microbatches.
        missing = [None] * (length - len(microbatches))
        self._stream_runner.window = (*missing, *microbatches)[-length:]
        if is_timed and self._times is None:
            self._times = [action_times(self._model_part.device) for _ in chunk.rank_programs]
        monitor, times = self._groups.monitor, self._times
        self._running.append(chunk)
        try:
            with generators_restored():
                if self._groups.is_local:
                    execute_local(chunk.rank_programs, times)
                else:
                    execute(chunk.rank_programs[0], monitor.action_reporter, times[0] if times else None)
        finally:
            self._stream_runner.step, self._stream_runner.window = None, ()
        # Later chunks use at most the last `num_ranks - 1` microbatches.
        held = sum(len(batch.step.microbatches) for batch in self._batches)
        while held - len(self._batches[0].step.microbatches) >= self._stream.num_ranks - 1 and len(self._batches) > 1:
            held -= len(self._batches.popleft().step.microbatches)

    def _finish_chunk(self) -> None:
        """Wait for the sends of the oldest chunk, which can then be used again."""
        chunk = self._running.popleft()
        for program in chunk.rank_programs:
            for slot in program.send_slots:
                slot.finish()
        self._free_chunks.setdefault(chunk.key, []).append(chunk)

    def _start_vote(self, request: SyncRequest, vote: SyncVote) -> None:
        """Send the vote of a call, and with it the losses of the batch before."""
        batch = self._batches[-1] if self._batches else None
        if batch is not None:
            own = LossVote.of(batch.step)
            vote = vote._replace(sums=(own.total, own.added), maxes=(own.kind, own.dtype))
            self._losses.start(own.content, len(batch.step.microbatches))
        self._sync_of_call.start(request, vote)
        self._votes.append((self._sync_of_call, batch))
        self._num_calls += 1

    def _finish_votes(self, lag: int) -> None:
        """Read the votes of all calls but the last `lag`."""
        while len(self._votes) > lag:
            sync, batch = self._votes.popleft()
            result = sync.finish()
            if batch is not None:
                self._finished.append((batch, (*result.sums[:2], *result.maxes[:2])))

    def _publish(self, lag: int) -> None:
        """Make the results of all batches known whose votes were sent at least `lag` calls ago, on every rank."""
        # Not as soon as the votes are read, which the last rank does at once and the others up to `_lag` calls later:
        # `is_known` must change in the same call on every rank.
        while len(self._finished) + sum(batch is not None for _, batch in self._votes) > lag and self._finished:
            batch, (total, added, kind, dtype) = self._finished.popleft()
            count = len(batch.step.microbatches)
            numbers = self._losses.finish()
            if kind <= NO_LOSS:
                batch.result.set(Result(None, (), seed=batch.step.seed))
                continue
            loss_dtype = ARITHMETIC_DTYPES[int(dtype)]
            losses = torch.tensor(numbers[:count], dtype=torch.float64).to(loss_dtype)
            loss = torch.tensor(total + added, dtype=torch.float64).to(loss_dtype)
            batch.result.set(Result(loss, tuple(losses.unbind()), tuple(numbers[count:]), seed=batch.step.seed))


def make_optimizer(make: Any, model_part: ModelPart, plan: Plan, staleness: str) -> torch.optim.Optimizer:
    """Call `make(parameters)` with the parameters of this process; checks that they can be updated asynchronously."""
    shared = [name for name, ranks in parameter_ranks(plan).items() if len(ranks) > 1]
    if shared:
        raise RunError(
            "a parameter of an asynchronous pipeline must be used by one stage only",
            name=shared[0],
            hint="a partition that keeps its users on one stage, or no staleness",
        )
    if not callable(make) or isinstance(make, type):
        raise RunError("optimizer must be a function of the parameters", got=repr(make)[:60], hint=_OPTIMIZER_HINT)
    parameters = [parameter for parameter in model_part.parameters.values() if parameter.requires_grad]
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RunError(
            "optimizer must return an optimizer of torch", got=type(optimizer).__name__, hint=_OPTIMIZER_HINT
        )
    foreign = {p for group in optimizer.param_groups for p in group["params"]} - set(parameters)
    if foreign:
        raise RunError(
            "the optimizer must have parameters of this rank only",
            parameters_of_other_ranks=len(foreign),
            hint=_OPTIMIZER_HINT,
        )
    if staleness == "predict":
        check_predicted(optimizer)
    refuse_other_steps(optimizer)
    return optimizer
