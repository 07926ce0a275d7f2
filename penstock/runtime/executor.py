"""Runs the compiled actions of a step: the order of each rank, and the passes of this process's stages in it.

`step_compiler.py` turns the order of a rank into a RankProgram, whose actions call the methods of one StageRunner.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.capture import DrawSeed, call_hook
from penstock.errors import PenstockError, RunError
from penstock.ir import ComputeAction, Message, Overlap, decode_one
from penstock.loss import ADDED_COLLECTOR, Added
from penstock.runtime.fsdp import FsdpStages
from penstock.runtime.loss_head import LossHead
from penstock.runtime.model_part import ModelPart
from penstock.runtime.monitor import RankMonitor
from penstock.runtime.nonfinite import NonfiniteProbe
from penstock.runtime.step import Step
from penstock.runtime.transports import RecvSlot, SendSlot, Tensors
from penstock.stages import StageRun, add_gradient

_LOG = logging.getLogger(__name__)
Thunk = Callable[[], None]
_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_OUT_OF_MEMORY_TEXTS = ("not enough memory", "can't allocate memory")
_CHANGED_TEXT = "modified by an inplace operation"
_CHANGED_HINT = (
    "if a hook changes a parameter during backward, as an optimizer in a hook does, change it after pipe.step instead: "
    "the backwards of other microbatches still need its value"
)
_MEMORY_HINT = "more microbatches, recompute='full', more ranks, or a schedule that holds less (1f1b, v_half, v_min)"

_STEP_LOCK = threading.RLock()
"""held by the thread that runs a step: recordings patch classes, and passes seed torch's generators, which all threads
of the process share"""

LOSS, ADDED = "the loss", "added losses"
"""names of the values that backward starts from, beside those that leave a stage"""


class SameRankSlot:
    """Values that one stage passes to another stage of the same rank."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: Tensors = ()

    def put(self, tensors: Tensors) -> None:
        """Store the values."""
        self._tensors = tensors

    def take(self) -> Tensors:
        """The values; the slot keeps no reference."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def clear(self) -> None:
        """Drop the values, after a failure."""
        self._tensors = ()


class SlotValues(NamedTuple):
    """Names of values that a pass reads from another stage or passes to one, and the slot that carries them."""

    names: tuple[str, ...]
    slot: RecvSlot | SendSlot | SameRankSlot


class StagePass(NamedTuple):
    """One forward, backward or weight gradient of a stage on a microbatch."""

    stage: int
    microbatch: int
    incoming: tuple[SlotValues, ...]
    """for a backward in the order in which gradients are added up"""
    outgoing: tuple[SlotValues, ...]
    splits_backward: bool
    """whether backward computes input gradients only, and weight gradients follow later"""
    received: tuple[str, ...] = ()
    """of the `incoming` values, those that come in messages"""


class PassRunner(Protocol):
    """The calls that compiled actions make: StageRunner for recorded stages, UserStageRunner for hand-written ones."""

    has_replicas: bool
    """whether gradients are averaged over replicas after the last backward of a stage"""
    fsdp: FsdpStages
    """the stages whose parameters are gathered before their passes and sharded afterwards"""

    def forward(self, stage_pass: StagePass) -> None:
        """Run the forward of a stage."""

    def backward(self, stage_pass: StagePass) -> None:
        """Run the backward of a stage, whole or for the inputs only."""

    def weight_grad(self, stage_pass: StagePass) -> None:
        """Compute the weight gradients of a split backward."""

    def reduce(self, stage: int) -> None:
        """Start averaging the gradients of a stage over the replicas, after its last microbatch."""

    def clear(self) -> None:
        """Drop the state that a failed step left behind."""


class StageRunner:
    """Runs the passes of this process's stages; `step` is the step that they belong to."""

    def __init__(self, model_part: ModelPart, last_stage: int, loss_head: LossHead) -> None:
        self._model_part, self._last_stage, self._loss_head = model_part, last_stage, loss_head
        self.has_replicas, self.fsdp = model_part.groups.num_replicas > 1, model_part.fsdp
        self.step: Step | None = None
        self.probe: NonfiniteProbe | None = None
        """set while a step is run again to find where NaN or Inf came from"""
        self._runs: dict[tuple[int, int], StageRun] = {}
        """forwards that wait for their backward, by stage and microbatch"""
        self._loss_gradient_key = 0.0, torch.float32, torch.device("cpu")
        self._loss_gradient = torch.zeros(())
        """cached gradient of the loss; its key (weight * scale, dtype, device) is usually equal for all microbatches"""

    def forward(self, stage_pass: StagePass) -> None:
        """Run a stage on its incoming values, and the loss after the last stage; pass on the outputs."""
        stage, microbatch, step = stage_pass.stage, stage_pass.microbatch, self.step
        if stage in self.fsdp.modules:
            self.fsdp.wait(stage)
        incoming: dict[str, Any] = {}
        for names, slot in stage_pass.incoming:
            incoming.update(zip(names, slot.take(), strict=True))
        recording, inputs = step.recordings[microbatch], step.inputs[microbatch]
        probe = self.probe.start(stage, microbatch, recording.graph, inputs) if self.probe else None
        added: list[Added] = []
        # Not a context manager: this runs for every pass.
        token = ADDED_COLLECTOR.set(added.append)
        try:
            seed, module = DrawSeed(step.seed, microbatch), self._model_part.stages[stage]
            given = (module, recording, inputs, incoming, stage_pass.splits_backward, seed, stage_pass.received)
            if probe is None:
                run = StageRun(*given)
            else:
                with call_hook(probe.check_call):
                    run = StageRun(*given)
        finally:
            ADDED_COLLECTOR.reset(token)
        loss = self._loss_head.loss(step, microbatch, run.outputs) if stage == self._last_stage else None
        if loss is not None:
            run.add_root(LOSS, loss)
        outputs = run.take_outputs()
        # Detached once, for the check and for all messages. The last stage has no outgoing values.
        detached: dict[str, Any] = {}
        if loss is None:
            detached = {
                name: value.detach() if isinstance(value, Tensor) and value.requires_grad else value
                for name, value in outputs.items()
            }
        # A loss of weight 0, of a microbatch without any label that counts, is 0/0: it is not checked.
        if step.is_training and (loss is None or step.weights[microbatch]):
            step.extremes.add(stage, detached.values() if loss is None else (step.losses[microbatch],))
            if probe is not None:
                probe.end(outputs.values(), loss, step.microbatches[microbatch].target)
        if added:
            total = self._loss_head.added_loss(step, stage, microbatch, added)
            step.added_losses.setdefault(microbatch, []).append(total.detach())
            run.add_root(ADDED, total)
        if step.is_training:
            self._runs[stage, microbatch] = run
        for names, target in stage_pass.outgoing:
            # Another stage of this rank reads `requires_grad` of the values, which detached ones have lost.
            values = outputs if isinstance(target, SameRankSlot) else detached
            target.put(list(map(values.__getitem__, names)))

    def backward(self, stage_pass: StagePass) -> None:
        """Run the backward of a stage, whole or for the inputs only; pass back the gradients of its incoming values."""
        stage, microbatch, step = stage_pass.stage, stage_pass.microbatch, self.step
        if stage in self.fsdp.modules:
            self.fsdp.before_backward(stage)
        gradients: dict[str, Tensor | None] = {}
        if microbatch in step.added_losses:
            # Ignored by stages that added no loss: they have no such root.
            gradients[ADDED] = torch.full_like(step.added_losses[microbatch][0], step.gradient_scale)
        if stage == self._last_stage:
            weight = step.weights[microbatch]
            # Backward through a loss of weight 0 could give 0 * NaN: it is left out instead.
            if weight:
                loss = step.losses[microbatch]
                key = weight * step.gradient_scale, loss.dtype, loss.device
                if key != self._loss_gradient_key:
                    self._loss_gradient_key, self._loss_gradient = key, torch.full_like(loss, key[0])
                # A copy, as hooks may change it in place.
                gradients[LOSS] = self._loss_gradient.clone()
        for names, slot in stage_pass.incoming:
            for name, gradient in zip(names, slot.take(), strict=True):
                if gradient is not None:
                    add_gradient(gradients, name, gradient)
        if stage_pass.splits_backward:
            returned = self._runs[stage, microbatch].input_grad(gradients)
        else:
            returned = self._runs.pop((stage, microbatch)).backward(gradients)
        for names, target in stage_pass.outgoing:
            target.put(list(map(returned.get, names)))

    def weight_grad(self, stage_pass: StagePass) -> None:
        """Compute the weight gradients of a split backward; a no-op if backward was not split."""
        run = self._runs.pop((stage_pass.stage, stage_pass.microbatch), None)
        if run is not None:
            run.weight_grad()

    def reduce(self, stage: int) -> None:
        """Start averaging the gradients of the stage over the replicas, after its last microbatch."""
        self._model_part.replicas.start(stage)

    def clear(self) -> None:
        """Drop the forwards that a failed step has left."""
        self._runs.clear()


class OverlappedPasses:
    """Runs the passes of an overlapped action in turn; a later one waits for its messages only when its turn comes.

    The messages of the first pass are waited for before the action. Those of the others may arrive while it runs.
    """

    __slots__ = ("_calls", "_num_waited", "_waits")

    def __init__(self, calls: Sequence[Thunk], waits: Sequence[tuple[Thunk, ...]]) -> None:
        """`waits` has those of each pass; those of the first are the `waits` of the action."""
        self._calls, self._waits = calls, waits
        self._num_waited = 1

    def __call__(self) -> None:
        self._num_waited = 1
        self._calls[0]()
        for index in range(1, len(self._calls)):
            self._wait(index)
            self._calls[index]()
        self._num_waited = 1

    def wait_for_rest(self) -> None:
        """Wait for the messages of the passes that have not run, without running them; see `exchange_remaining`."""
        for index in range(self._num_waited, len(self._calls)):
            self._wait(index)
        self._num_waited = 1

    def _wait(self, index: int) -> None:
        self._num_waited = index + 1
        for wait in self._waits[index]:
            wait()


class CompiledAction(NamedTuple):
    """One action, ready to run."""

    code: int
    run: Thunk | None = None
    """None if there is nothing to do, as for a message without content"""
    waits: tuple[Thunk, ...] = ()
    """to be called before `run`"""
    recv_slots: tuple[RecvSlot, ...] = ()
    """the messages that it waits for, before `run` or, if passes overlap, in it"""
    is_reported: bool = True
    """whether the monitor is notified; not for posting a receive, which takes no time"""


@dataclass(frozen=True)
class RankProgram:
    """The compiled actions of one rank in order, and the slots that they use."""

    rank: int
    actions: tuple[CompiledAction, ...]
    runner: PassRunner
    send_slots: tuple[SendSlot, ...]
    recv_slots: tuple[RecvSlot, ...]
    same_rank_slots: tuple[SameRankSlot, ...]

    @cached_property
    def runnable(self) -> tuple[CompiledAction, ...]:
        """The actions that do something, for the executor's inner loop."""
        return tuple(action for action in self.actions if action.run is not None)

    @cached_property
    def sent_edges(self) -> dict[int, tuple[int, int]]:
        """By code of a send, the source and target stage of its message."""
        return {slot.route.code: slot.route.key[:2] for slot in self.send_slots}

    def clear(self) -> None:
        """Drop the values and messages of an interrupted step."""
        self.runner.clear()
        for slot in (*self.send_slots, *self.recv_slots, *self.same_rank_slots):
            slot.clear()


@dataclass
class ActionTimes:
    """When each action of a rank ran, in seconds of the host's clock, in the order of its program."""

    began: float = field(default_factory=perf_counter)
    """when the step began, after all ranks had synchronised"""
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Record the start of an action."""
        self.starts.append(perf_counter())

    def end(self) -> None:
        """Record the end of the action."""
        self.ends.append(perf_counter())

    def read(self) -> None:
        """No-op: the clock was read while the actions ran."""


class DeviceTimes(ActionTimes):
    """When the kernels of each action ran: events on the queue of a device, which are read once, after the step.

    Python only starts kernels: its own clock would show when each action was put into the queue. All times are counted
    from the first event, so they are early by as long as the queue was busy when it was recorded.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._events: list[tuple[torch.Event, bool]] = []
        """in the order of recording, each with whether it is a start"""
        self._first = self._record()

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Record the start of an action."""
        self._events.append((self._record(), True))

    def end(self) -> None:
        """Record the end of the action."""
        self._events.append((self._record(), False))

    def read(self) -> None:
        """Wait for the last event, and turn all of them into seconds of the host's clock."""
        events, self._events = self._events, []
        if events:
            events[-1][0].synchronize()
        for event, is_start in events:
            seconds = self.began + 1e-3 * self._first.elapsed_time(event)
            (self.starts if is_start else self.ends).append(seconds)


def action_times(device: torch.device) -> ActionTimes:
    """Records the actions of a rank that computes on the device."""
    return ActionTimes() if device.type == "cpu" else DeviceTimes(device)


def execute(
    program: RankProgram,
    report: Callable[[int], None],
    times: ActionTimes | None = None,
    on_error: Callable[[RankProgram, int], None] | None = None,
) -> None:
    """Run the actions of one rank in order; `report` is given the code of each action that takes time.

    If an action fails, `on_error` is given its code before the error is raised.
    """
    code = 0
    try:
        if times is not None or is_profiled_or_logged():
            times = times or ActionTimes()
            for action in program.actions:
                code = action.code
                _run_timed(program, action, times, report)
            return
        for code, run, waits, _, is_reported in program.runnable:
            for wait in waits:
                wait()
            if is_reported:
                report(code)
            run()
    except Exception as error:
        if on_error is not None:
            on_error(program, code)
        raise located_error(error, program.rank, code) from error


def exchange_remaining(program: RankProgram, code: int) -> None:
    """Exchange the messages that follow the failed action `code`, without running passes.

    Sends zeros, so all ranks must discard the step. No message is left over for the next step.
    """
    program.runner.clear()
    for slot in program.send_slots:
        slot.put([None] * len(slot.route.codecs))
    start = [action.code for action in program.actions].index(code)
    for index, action in enumerate(program.actions[start:]):
        # The failed action has waited, except for messages of passes that come after the failed one.
        for wait in action.waits if index else ():
            wait()
        if isinstance(action.run, OverlappedPasses):
            action.run.wait_for_rest()
        for received in action.recv_slots:
            received.take()
        if action.run is not None and not isinstance(decode_one(action.code), ComputeAction | Overlap):
            action.run()
    for slot in program.send_slots:
        slot.finish()


def execute_local(programs: Sequence[RankProgram], times: Sequence[ActionTimes] | None = None) -> None:
    """Run all ranks in this process, in turn: each of them until it needs a message that was not sent yet.

    They run in rounds, in the order of their numbers. A rank that waits is not visited again before its message is
    sent: with many ranks, most of them wait.
    """
    if times is None and is_profiled_or_logged():
        times = [ActionTimes() for _ in programs]
    positions = [0] * len(programs)
    # Ranks by index. Those of this round are a heap, because they run in ascending order.
    this_round, next_round = list(range(len(programs))), list[int]()
    # By source and target stage of a message, the rank that waits for it. One per key: a target stage is on one rank.
    waiting: dict[tuple[int, int], int] = {}
    while this_round:
        index = heappop(this_round)
        program = programs[index]
        while positions[index] < len(program.actions):
            action = program.actions[positions[index]]
            missing = [slot for slot in action.recv_slots if not slot.is_ready]
            if missing:
                waiting[missing[0].route.key[:2]] = index
                break
            try:
                if times is not None:
                    _run_timed(program, action, times[index])
                elif action.run is not None:
                    for wait in action.waits:
                        wait()
                    action.run()
            except Exception as error:
                raise located_error(error, program.rank, action.code) from error
            positions[index] += 1
            if waiting and (message := program.sent_edges.get(action.code)) in waiting:
                woken = waiting.pop(message)
                if woken > index:
                    heappush(this_round, woken)
                else:
                    next_round.append(woken)
        if not this_round:
            this_round, next_round = sorted(next_round), []
    if waiting:
        codes = [programs[index].actions[positions[index]].code for index in sorted(waiting.values())]
        actions = [str(decode_one(code)) for code in codes]
        raise RunError("deadlock: every rank waits for another", actions=actions)


def _run_timed(
    program: RankProgram, action: CompiledAction, times: ActionTimes, report: Callable[[int], None] | None = None
) -> None:
    for wait in action.waits:
        wait()
    times.start()
    if report is not None:
        report(action.code)
    if action.run is not None:
        if is_profiled_or_logged():
            text = str(decode_one(action.code))
            _LOG.debug("rank %d: %s", program.rank, text)
            # A range such as PP:2F0, as torch's own pipelining has.
            with torch.profiler.record_function(f"PP:{text}"):
                action.run()
        else:
            action.run()
    times.end()


def is_profiled_or_logged() -> bool:
    """Whether a profiler of torch is active in this thread, or actions are logged."""
    return torch.autograd._profiler_enabled() or _LOG.isEnabledFor(logging.DEBUG)


@contextmanager
def watch_step(
    monitor: RankMonitor | None,
    step: int,
    is_training: bool,
    on_error: Callable[[BaseException], None] = lambda error: None,
) -> Iterator[None]:
    """Report a step to the monitor, and add the step's number to errors; `on_error` is called before one is raised.

    An error that only this rank raises is published, so that the others do not wait for it. `monitor` is None if all
    ranks are in this process.

    One thread of a process runs a step at a time. Others wait if all ranks are in this process. Over several processes
    their steps raise a RunError: ranks whose threads waited in other orders would wait for each other.
    """
    if monitor is not None:
        monitor.step_started(step, is_training)
    has_lock = False
    try:
        has_lock = _STEP_LOCK.acquire(blocking=monitor is None)
        if not has_lock:
            hint = "a threading.Lock around every step, or one thread for all pipelines"
            raise RunError("another thread of this process is running a step", hint=hint)
        yield
    except BaseException as error:
        # Also KeyboardInterrupt: the caller may handle it and continue.
        located = error.at(step=step) if isinstance(error, RunError) else error
        on_error(located)
        if monitor is not None:
            # An error that every rank raises needs no publishing.
            if isinstance(located, PenstockError) and located.is_shared:
                monitor.idle()
            else:
                monitor.step_failed(located)
        if located is error:
            raise
        raise located from error.__cause__
    finally:
        if has_lock:
            _STEP_LOCK.release()
    if monitor is not None:
        monitor.step_finished(is_training)


def located_error(error: Exception, rank: int, code: int) -> Exception:
    """The error as a RunError with rank, stage, microbatch and action; a RunError keeps its text."""
    action = decode_one(code)
    microbatch = action.microbatch if isinstance(action, ComputeAction | Message) else None
    position = {"rank": rank, "stage": action.stage, "microbatch": microbatch, "action": str(action)}
    known = {name: value for name, value in position.items() if value is not None}
    if isinstance(error, RunError):
        return error.at(**known)
    hint = ""
    if isinstance(error, _OUT_OF_MEMORY) or any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        hint = _MEMORY_HINT
    elif _CHANGED_TEXT in str(error):
        hint = _CHANGED_HINT
    return RunError(f"{type(error).__name__}: {error}", hint=hint, **known)
