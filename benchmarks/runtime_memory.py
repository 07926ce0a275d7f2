"""runtime_memory: bytes of activations and receive buffers during a step, compared with the simulation and with torch.

A dispatch mode tracks the storages of every tensor with the size of an activation that any operation of a step
allocates, until the storage is freed. The bytes are sampled before every action. Gradients that are being sent are not
counted, because the simulation does not count them either.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from benchmarks.table import Line, Table
from benchmarks.torch_pipeline import TorchPipeline
from penstock.runtime.step_compiler import RankProgram
from penstock.runtime.transports import SendSlot

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "v_half")
_SAMPLES, _WIDTH = 4, 48
_BYTES = _SAMPLES * _WIDTH * 4
"""bytes of a value between two layers, for one microbatch in float32"""


class PeakBytes(NamedTuple):
    """Peaks of one rank: activations with receive buffers, receive buffers, and torch's receive buffers."""

    held: int
    buffers: int
    torch_buffers: int


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (activations(), receive_buffers())


def activations(ranks: int = 4, microbatches: int = 8, names: tuple[str, ...] = SCHEDULES) -> Table:
    """Measured peak of every rank, which must equal the simulated one."""

    def lines() -> Iterator[Line]:
        for name in names:
            schedule = penstock.schedule(name, ranks, microbatches)
            trace = penstock.simulate(schedule, costs(schedule))
            for rank, peak in enumerate(measure(name, schedule)):
                predicted = trace.peak_bytes(rank)
                cells = (name, str(rank), f"{predicted:,}", f"{peak.held:,}", f"{abs(peak.held - predicted)}")
                yield Line(cells, abs(peak.held - predicted), 0, at_least=False)

    columns = ("schedule", "rank", "simulated", "measured", "difference")
    return Table(f"peak bytes of activations and receive buffers, {microbatches} microbatches", columns, lines())


def receive_buffers(ranks: int = 4, microbatches: int = 64, name: str = "1f1b") -> Table:
    """Peak bytes of receive buffers, compared with torch's runtime."""

    def lines() -> Iterator[Line]:
        for rank, peak in enumerate(measure(name, penstock.schedule(name, ranks, microbatches))):
            share = peak.buffers / peak.torch_buffers
            cells = (name, str(rank), f"{peak.buffers:,}", f"{peak.torch_buffers:,}", f"{share:.3f}")
            yield Line(cells, share, 1.0, at_least=False)

    columns = ("schedule", "rank", "ours", "torch", "ratio")
    return Table(f"peak bytes of receive buffers, {microbatches} microbatches", columns, lines())


def costs(schedule: penstock.Schedule) -> penstock.StageCosts:
    """The bytes that a stage of one layer keeps.

    Until its backward, a stage keeps its output, and its input if that was received from another rank: an input from
    the same rank counts for the stage that made it, and that of the first stage is a part of the batch. Between input
    and weight gradient a stage keeps two values: its input and the gradient of its linear layer. The input gradient of
    the first stage computes nothing, so there the two are its output and the received gradient.
    """
    stages, ranks = range(schedule.num_stages), schedule.placement.ranks
    is_received = [stage > 0 and ranks[stage] != ranks[stage - 1] for stage in stages]
    return penstock.StageCosts(
        *([1.0] * schedule.num_stages for _ in range(3)),
        activation_bytes=tuple(_BYTES * (1 + received) for received in is_received),
        weight_grad_bytes=(2 * _BYTES,) * schedule.num_stages,
        messages=tuple(penstock.MessageCost(stage, stage + 1, _BYTES, _BYTES) for stage in stages[:-1]),
    )


def measure(name: str, schedule: penstock.Schedule) -> list[PeakBytes]:
    """Measures the peaks of all ranks in one step."""
    stages = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(schedule.num_stages)]
    model = nn.Sequential(*stages)
    batch = torch.randn(_SAMPLES * schedule.num_microbatches, _WIDTH)
    plan = penstock.plan(
        model,
        (batch,),
        ranks=schedule.num_ranks,
        microbatches=schedule.num_microbatches,
        schedule=schedule,
        partitioner=[[str(stage)] for stage in range(schedule.num_stages)],
    )
    return penstock.launch(_measure_rank, schedule.num_ranks, name, plan, model, batch)


def _measure_rank(name: str, plan: penstock.Plan, model: nn.Sequential, batch: Tensor) -> PeakBytes:
    # The simulation assumes receive buffers, which messages in shared memory do not have.
    options = penstock.RunOptions(transport="distributed")
    ours = penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss, options=options)
    ours.step(batch, target=batch)
    with track_peaks(ours, _BYTES) as peaks:
        ours.step(batch, target=batch)
    own = plan.schedule.placement.stages[dist.get_rank()]
    theirs = TorchPipeline.in_order(name, plan.schedule, {stage: model[stage] for stage in own}, nn.functional.mse_loss)
    theirs.step(batch, target=batch)
    return PeakBytes(peaks.held, peaks.buffers, theirs.receive_bytes)


class Storages(TorchDispatchMode):
    """Tracks the storages of one size that are allocated inside this mode and still exist."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == self._size and storage._cdata not in self.alive:
            self.alive.add(storage._cdata)
            weakref.finalize(storage, self.alive.discard, storage._cdata)


class Peaks:
    """Running maxima: activations with receive buffers, and receive buffers alone."""

    def __init__(self) -> None:
        self.held = self.buffers = 0

    def update(self, held: int, buffers: int) -> None:
        """Takes the current bytes into account."""
        self.held, self.buffers = max(self.held, held), max(self.buffers, buffers)


@contextmanager
def track_peaks(pipeline: penstock.Pipeline, size: int) -> Iterator[Peaks]:
    """Tracks the peaks of the steps inside the context; the step must have been compiled before."""
    engine, peaks = pipeline._engine, Peaks()
    (prepared,) = (rank for compiled in engine._compiled_steps.values() for rank in compiled.rank_programs)
    status, storages = engine._groups.monitor._status, Storages(size)
    note_action = status.working

    def working(step: int, code: int) -> None:
        peaks.update(
            size * (len(storages.alive) - len(storages.alive & _sent_gradients(prepared))), _posted_bytes(prepared)
        )
        note_action(step, code)

    status.working = working
    try:
        with storages:
            yield peaks
    finally:
        del status.working


def _sent_gradients(prepared: RankProgram) -> set[int]:
    """The storages of gradients that are being sent or about to be."""
    gradients = [slot for slot in prepared.send_slots if slot.route.key[0] > slot.route.key[1]]
    held = [tensor for slot in gradients for tensor in (*slot._tensors, *_packed(slot)) if tensor is not None]
    return {tensor.untyped_storage()._cdata for tensor in held}


def _packed(slot: SendSlot) -> list[Tensor]:
    """The tensors of a message in the form in which they are sent, while the slot keeps them."""
    if (message := getattr(slot, "_message", None)) is not None:  # in shared memory, if the ring is full
        return [part for _, part in message.parts]
    return getattr(slot, "_packed", [])


def _posted_bytes(prepared: RankProgram) -> int:
    """Bytes of the receive buffers of messages that have not arrived."""
    # Messages in shared memory have no buffers of their own.
    return sum(buffer.nbytes for slot in prepared.recv_slots for buffer in getattr(slot, "_buffers", ()))
