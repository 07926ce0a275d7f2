"""Measures the costs of ranks that are processes of this machine: per pass, per message and per step.

Two ranks run a small pipeline as any other would be run, and the recorded traces show where the time goes. They also
compute one at a time and at the same time: then each is slower, because they share caches and memory. The result is
kept in the cache of profiles, so that a machine is measured once, unless other load made it unreliable.
"""

import multiprocessing
import os
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.api.measuring import measure, measured_model
from penstock.api.pipeline import Pipeline
from penstock.capture import capture
from penstock.errors import PenstockError, PenstockWarning
from penstock.ir import (
    Cluster,
    DeviceSpeed,
    Kind,
    MessageCpu,
    Overhead,
    Plan,
    Trace,
    microbatch_of,
    peer_of,
    stage_of,
)
from penstock.launch import launch, num_cores
from penstock.measure import Cache, Clock, device_name, measure_copies
from penstock.planner import Measured, PlanOptions, search

MEASURE_RANKS_VARIABLE = "PENSTOCK_MEASURE_RANKS"
"""an environment variable: with 0, ranks of this machine count as ranks with free messages and a core each"""
_METHOD = 6
"""increased when the method of measuring changes: then cached results are not used"""
_MICROBATCHES = 8
_WARM_UP, _MIN_STEPS, _MAX_STEPS, _STEPS_SECONDS = 2, 4, 12, 0.3
"""after the warm-up at least 4 rounds, and more of them, up to 12, for 0.3 seconds"""
_ATTEMPTS = 2
"""how often ranks are measured at most, if other load makes the result unreliable"""
_TIMEOUT = 120.0
_WAIT = 1e-3
"""seconds that a pass waits, so that the runtime finds the caches cold, as after real work"""
_WIDTH, _SAMPLES = 256, 16
"""of the values that are sent: 16 KiB"""
_BUSY_ROUNDS = 8
"""how often a rank computes a step of a layer alone, and how often both ranks do so at the same time"""
_BUSY_WIDTH, _BUSY_SAMPLES = 512, 256
"""of that layer: weights of 12 MiB and activations of 6 MiB"""


def local_ranks(ranks: int) -> Cluster:
    """The ranks of a pipeline as processes of this machine, with measured links and overhead.

    Nothing is measured in a process that is itself a rank, that may not start others (a daemon of multiprocessing), or
    if the environment variable forbids it: then messages take no time.
    """
    cannot_launch = dist.is_initialized() or multiprocessing.current_process().daemon
    if ranks == 1 or cannot_launch or os.environ.get(MEASURE_RANKS_VARIABLE) == "0":
        return Cluster(ranks)
    cache = Cache()
    parts = (_METHOD, platform.node(), device_name(torch.device("cpu")), num_cores(), torch.__version__)
    key = "ranks-" + "-".join("".join(c if c.isalnum() else "_" for c in str(part)) for part in parts)
    found = cache.get(key, Cluster)
    if found is None:
        try:
            for _ in range(_ATTEMPTS):
                found, is_reliable = _measure_ranks()
                if is_reliable:
                    cache.put(key, found)
                    break
            else:
                text = "other load disturbed the measurement of the runtime's own costs; the next plan measures again"
                warnings.warn(text, PenstockWarning, stacklevel=3)
        except (PenstockError, OSError) as error:
            warnings.warn(f"messages count as free, they could not be measured: {error}", PenstockWarning, stacklevel=3)
            return Cluster(ranks)
    return replace(found, ranks=ranks)


def ranks_that_compute(cluster: Cluster, cpu_share: float) -> Cluster:
    """The local ranks, for a model whose profile has this `cpu_share`: how much they slow each other down.

    A rank that mostly waits leaves its core, caches and memory to others; one with several threads needs more than a
    core.
    """
    slowdown = 1 + min(cpu_share, 1.0) * (cluster.overhead.slowdown - 1)
    cores = _shared_cores(cluster.ranks, cluster.replicas.count, cpu_share)
    return replace(cluster, cores=cores, overhead=replace(cluster.overhead, slowdown=slowdown))


def _shared_cores(ranks: int, replicas: int, cpu_share: float) -> int | None:
    """How many ranks of a replica can compute at once on this machine; None if all of them can."""
    if os.environ.get(MEASURE_RANKS_VARIABLE) == "0":
        return None
    # 0.2, because the measured share of a rank that only computes may be a little above 1.
    at_once = max(1, int(num_cores() / replicas / max(cpu_share, 1e-3) + 0.2))
    return at_once if at_once < ranks else None


class _RankCosts(NamedTuple):
    """What one rank measured."""

    rounds: "list[_Round]"
    copies: tuple[MessageCpu, ...]
    """what it takes to copy large messages"""
    slowdown: float
    """how many times longer the rank computes while the other does so too, measured by the first rank"""


class _Round(NamedTuple):
    """Measurements of one rank at about the same time, so that other load affects all of them equally."""

    seconds: float
    """of a step without a trace"""
    trace: Trace
    """of another step"""
    alone: tuple[float, float]
    """typical seconds of a forward and of a backward of this rank's stage without the runtime"""


def _measure_ranks() -> tuple[Cluster, bool]:
    """The costs of two ranks, and whether they are reliable: each half of the measurement finds a cost of passes."""
    first, last = launch(_measure_rank, 2, _plan(), timeout=_TIMEOUT)
    rounds = list(zip(first.rounds, last.rounds, strict=True))
    overhead, *halves = [_overhead(part) for part in (rounds, rounds[::2], rounds[1::2])]
    # A difference of measured times: noise can make it 0, which is never true. That of a step says nothing: it is as
    # small as the cost of the trace that is subtracted from it.
    is_reliable = all(half.pass_seconds > 0 for half in halves)
    found = Cluster(
        2,
        # Below zero if the receiver wakes before the sender has recorded the end of its Send: then it adds nothing.
        latency=max(0.0, min(_latency(each.trace) for each in first.rounds)),
        # Ranks copy messages themselves: they take no time between a Send and the receiver's copy.
        overhead=replace(overhead, messages=first.copies, slowdown=max(1.0, first.slowdown)),
    )
    return found, is_reliable


def _overhead(rounds: Sequence[tuple[_Round, _Round]]) -> Overhead:
    """The costs of the runtime by some rounds of both ranks. Of several times the least: other load only ever adds."""
    first, last = zip(*rounds, strict=True)
    traces = [each.trace for each in first]
    message = min(float(np.median(trace.durations[trace.program.table.kinds == Kind.SEND])) for trace in traces)
    # The forward of the last stage includes the loss, which is the user's.
    passes = (
        min(_pass_seconds(trace, Kind.FORWARD, 0) for trace in traces) - min(each.alone[0] for each in first),
        min(_pass_seconds(trace, Kind.BACKWARD, 0) for trace in traces) - min(each.alone[1] for each in first),
        min(_pass_seconds(trace, Kind.BACKWARD, 1) for trace in traces) - min(each.alone[1] for each in last),
    )
    return Overhead(
        # A forward receives or sends a message, whose seconds are counted apart, and so does a backward.
        pass_seconds=max(0.0, sum(passes) / len(passes) - message / 2),
        message_seconds=message,
        step_seconds=max(0.0, min(each.seconds for each in first) - min(trace.makespan for trace in traces)),
    )


class _WaitingLayer(nn.Module):
    """A layer whose forward and backward wait."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_WAIT)
        made = self.layer(x)
        if made.requires_grad:
            made.register_hook(lambda _: time.sleep(_WAIT))
        return made * 1.0


def _model() -> nn.Sequential:
    return nn.Sequential(_WaitingLayer(), _WaitingLayer())


def _plan() -> Plan:
    """Two stages of a layer each, one after the other on two ranks."""
    captured = capture(_model(), (torch.ones(_SAMPLES, _WIDTH),))
    # Only the order of the passes is used, so that nothing needs to be measured.
    profile = measure(captured, loss_fn=_loss, speed=DeviceSpeed(1e12, 1e12), progress=False)
    models = {_MICROBATCHES: Measured(measured_model(captured, has_loss_fn=True).graph, profile)}
    return search(models, PlanOptions(Cluster(2), _MICROBATCHES, "1f1b", [["0"], ["1"]]))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).sum()


def _measure_rank(plan: Plan) -> _RankCosts:
    """Run by each of the two ranks."""
    return _RankCosts(_run_rounds(plan), measure_copies(), _slowdown())


def _slowdown() -> float:
    """How many times longer the first rank takes for a step of a layer while the other rank computes too."""
    if num_cores() < 2:
        return 1.0  # `_shared_cores` counts the ranks of a core
    layer = nn.TransformerEncoderLayer(_BUSY_WIDTH, 8, 4 * _BUSY_WIDTH, dropout=0.0, batch_first=True)
    batch, is_first = torch.randn(1, _BUSY_SAMPLES, _BUSY_WIDTH), dist.get_rank() == 0
    # Without the time in which other programs had the core: it depends on how many they are, not on this machine.
    clock = Clock(batch.device)
    alone, together = list[float](), list[float]()

    def compute() -> float:
        return clock.seconds(lambda: layer(batch).sum().backward())[0]

    compute()
    for _ in range(_BUSY_ROUNDS):
        dist.barrier()
        if is_first:
            alone.append(compute())
        dist.barrier()
        together.append(compute())
    if not is_first:
        return 1.0
    # Of several times the least: other load only ever adds.
    return min(together) / min(alone)


def _run_rounds(plan: Plan) -> list[_Round]:
    """A step of the pipeline without and one with a trace, and the passes without the runtime, several times."""
    model, rank = _model(), dist.get_rank()
    pipe, rounds = Pipeline(model, plan, loss_fn=_loss), list[_Round]()
    batch = torch.ones(_SAMPLES * _MICROBATCHES, _WIDTH)
    for _ in range(_WARM_UP):
        pipe.step(batch, target=batch)
    end = time.perf_counter() + _STEPS_SECONDS
    for number in range(_MAX_STEPS):
        # Both ranks begin a round at the same time, and stop once `end` has passed on either of them.
        is_over = torch.tensor([number >= _MIN_STEPS and time.perf_counter() > end], dtype=torch.int32)
        dist.all_reduce(is_over)
        if is_over:
            break
        start = time.perf_counter()
        pipe.step(batch, target=batch)
        seconds = time.perf_counter() - start
        trace = pipe.step(batch, target=batch, record=True).trace
        rounds.append(_Round(seconds, trace, _run_alone(model[rank], batch[:_SAMPLES], is_last=rank == 1)))
    return rounds


def _run_alone(layer: nn.Module, batch: Tensor, is_last: bool) -> tuple[float, float]:
    """The typical seconds of a forward and of a backward of a stage without the runtime."""
    forwards, backwards = [], []
    for _ in range(_MICROBATCHES):
        x = batch.clone().requires_grad_(is_last)
        start = time.perf_counter()
        made = layer(x)
        forwards.append(time.perf_counter() - start)
        root = _loss(made, batch) if is_last else made
        gradient = torch.ones_like(root)
        start = time.perf_counter()
        torch.autograd.backward(root, gradient)
        backwards.append(time.perf_counter() - start)
    return median(forwards), median(backwards)


def _latency(trace: Trace) -> float:
    """The typical seconds between a Send and the start of the pass that was waiting for the message."""
    program = trace.program
    sends = np.flatnonzero(program.table.kinds == Kind.SEND)
    codes = program.table.codes[sends]
    user = program.makers.users(stage_of(codes), peer_of(codes), microbatch_of(codes))
    sent = trace.ends.values[sends]
    waited = trace.ends.values[user - 1] < sent
    return float(np.median((trace.starts.values[user] - sent)[waited])) if waited.any() else 0.0


def _pass_seconds(trace: Trace, kind: Kind, stage: int) -> float:
    """The typical seconds of a kind of pass of a stage."""
    table = trace.program.table
    return float(np.median(trace.durations[(table.kinds == kind) & (stage_of(table.codes) == stage)]))
