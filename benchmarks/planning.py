"""How long it takes to build, lower, prove and simulate schedules, and how that grows."""

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.clock import cpu_seconds
from benchmarks.table import Line, Table
from penstock.ir import Program
from penstock.passes import lower, verify
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate

AS_TORCH = ("add_transfers", "hoist_receives", "add_reductions", "add_shard_moves", "add_frees")
WITH_TORCH = ("interleaved", "zbv", "interleaved_zb", "looped_bfs", "dualpipe_v")


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about planning."""
    return (growth(), speed(), against_torch(64, 256, at_least=10.0), against_torch(128, 512, at_least=20.0))


def planned(name: str, ranks: int, microbatches: int) -> Program:
    """A schedule, lowered as far as torch does and freed, and proven."""
    program = lower(build(name, ranks, microbatches), passes=AS_TORCH)
    verify(program)
    return program


def growth(ranks: int = 16, microbatches: Sequence[int] = (64, 128, 256, 512, 1024), times: int = 3) -> Table:
    """Seconds against the number of actions, and the exponent that fits them best."""

    def lines() -> Iterator[Line]:
        for name in SCHEDULES:
            actions = [len(planned(name, ranks, each).table.codes) for each in microbatches]
            seconds = [
                cpu_seconds(lambda name=name, each=each: planned(name, ranks, each), times) for each in microbatches
            ]
            exponent = float(np.polyfit(np.log(actions), np.log(seconds), 1)[0])
            cells = (name, *(f"{each:.3f}" for each in seconds), f"{actions[-1]:,}", f"{exponent:.2f}")
            yield Line(cells, exponent, 1.1, at_least=False)

    columns = ("schedule", *(f"M={each}" for each in microbatches), "actions", "exponent")
    return Table(f"build + lower + verify, CPU seconds, {ranks} ranks: growth with the actions", columns, lines())


def speed(ranks: int = 64, microbatches: int = 256, times: int = 3) -> Table:
    """Simulated actions per second."""

    def lines() -> Iterator[Line]:
        for name in SCHEDULES:
            program = planned(name, ranks, microbatches)
            seconds = cpu_seconds(lambda program=program: simulate(program), times)
            rate = len(program.table.codes) / seconds
            yield Line((name, f"{len(program.table.codes):,}", f"{seconds:.3f}", f"{rate:,.0f}"), rate, 300_000.0)

    columns = ("schedule", "actions", "seconds", "actions/s")
    return Table(f"simulate, CPU seconds, {ranks} ranks, {microbatches} microbatches", columns, lines())


def against_torch(ranks: int, microbatches: int, at_least: float, times: int = 5) -> Table:
    """Our build + lower + verify against torch's build + lowering of the same schedule."""
    from benchmarks.torch_side import build_and_lower

    def lines() -> Iterator[Line]:
        for name in WITH_TORCH:
            actions = len(planned(name, ranks, microbatches).table.codes)
            ours = cpu_seconds(lambda name=name: planned(name, ranks, microbatches), times)
            theirs = cpu_seconds(lambda name=name: build_and_lower(name, ranks, microbatches))
            cells = (name, f"{actions:,}", f"{ours:.3f}", f"{theirs:.2f}", f"{theirs / ours:.1f}")
            yield Line(cells, theirs / ours, at_least)

    columns = ("schedule", "actions", "ours", "torch", "ratio")
    title = f"build + lower + verify, CPU seconds, {ranks} ranks, {microbatches} microbatches, 2 stages per rank"
    return Table(f"{title}; torch builds and lowers", columns, lines())
