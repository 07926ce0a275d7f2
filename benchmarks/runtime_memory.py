"""runtime_memory: bytes held during a step, beside the simulated bytes and torch's runtime."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from benchmarks.held_bytes import watched
from benchmarks.table import Line, Table
from benchmarks.torch_pipeline import TorchPipeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv", "v_half")
_SAMPLES, _WIDTH = 4, 48
_BYTES = _SAMPLES * _WIDTH * 4
"""of every value between two layers, for one microbatch of samples of float32"""


class Held(NamedTuple):
    """What one rank held at most, ours and torch's."""

    bytes: int
    buffers: int
    torch_buffers: int


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about memory."""
    return (activations(), receive_buffers())


def activations(ranks: int = 4, microbatches: int = 8, names: tuple[str, ...] = SCHEDULES) -> Table:
    """The peak of every rank, measured and simulated."""

    def lines() -> Iterator[Line]:
        for name in names:
            schedule = penstock.schedule(name, ranks, microbatches)
            trace = penstock.simulate(schedule, costs(schedule))
            for rank, held in enumerate(measured(name, schedule)):
                predicted = trace.peak_bytes(rank)
                cells = (name, str(rank), f"{predicted:,}", f"{held.bytes:,}", f"{abs(held.bytes - predicted)}")
                yield Line(cells, abs(held.bytes - predicted), 0, at_least=False)

    columns = ("schedule", "rank", "simulated", "measured", "difference")
    return Table(f"peak bytes of activations and receive buffers, {microbatches} microbatches", columns, lines())


def receive_buffers(ranks: int = 4, microbatches: int = 64, name: str = "1f1b") -> Table:
    """Bytes of receive buffers that are there at once, against torch's runtime."""

    def lines() -> Iterator[Line]:
        for rank, held in enumerate(measured(name, penstock.schedule(name, ranks, microbatches))):
            share = held.buffers / held.torch_buffers
            cells = (name, str(rank), f"{held.buffers:,}", f"{held.torch_buffers:,}", f"{share:.3f}")
            yield Line(cells, share, 1.0, at_least=False)

    columns = ("schedule", "rank", "ours", "torch", "ratio")
    return Table(f"bytes of receive buffers at once, {microbatches} microbatches", columns, lines())


def costs(schedule: penstock.Schedule) -> penstock.StageCosts:
    """What a stage of one layer keeps.

    A layer keeps what it is given and what it makes. What the first one is given is a part of the batch, and what was
    made on the same rank is kept by who made it. Between input and weight gradient a layer keeps what it is given and
    the gradient of its product; the first one has done nothing yet, and keeps what it made and what it was sent.
    """
    stages, ranks = range(schedule.num_stages), schedule.placement.ranks
    is_given = [stage > 0 and ranks[stage] != ranks[stage - 1] for stage in stages]
    return penstock.StageCosts(
        *([1.0] * schedule.num_stages for _ in range(3)),
        activation_bytes=tuple(_BYTES * (1 + given) for given in is_given),
        weight_grad_bytes=(2 * _BYTES,) * schedule.num_stages,
        messages=tuple(penstock.MessageCost(stage, stage + 1, _BYTES, _BYTES) for stage in stages[:-1]),
    )


def measured(name: str, schedule: penstock.Schedule) -> list[Held]:
    """The peaks of all ranks in one step."""
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
    return penstock.launch(_held, schedule.num_ranks, name, plan, model, batch)


def _held(name: str, plan: penstock.Plan, model: nn.Sequential, batch: Tensor) -> Held:
    # As the simulation has it: over shared memory a message has no buffer before it is read.
    options = penstock.RunOptions(transport="distributed")
    ours = penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss, options=options)
    ours.step(batch, target=batch)
    with watched(ours, _BYTES) as peaks:
        ours.step(batch, target=batch)
    own = plan.schedule.placement.stages[dist.get_rank()]
    theirs = TorchPipeline.in_order(name, plan.schedule, {stage: model[stage] for stage in own}, nn.functional.mse_loss)
    theirs.step(batch, target=batch)
    return Held(peaks.held, peaks.buffers, theirs.receive_bytes)
