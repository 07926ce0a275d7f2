"""planning: CPU time to build, lower, verify and simulate schedules, by size and compared with torch."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.table import Line, Table
from benchmarks.timing import cpu_seconds
from penstock.ir import Program
from penstock.passes import lower, verify
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate

TORCH_PASSES = ("add_transfers", "hoist_receives", "add_reductions", "add_shard_moves", "add_frees")
"""the lowering passes of penstock that torch's lowering also does, and add_frees"""
IN_TORCH = ("interleaved", "zbv", "interleaved_zb", "looped_bfs", "dualpipe_v")
"""schedules with two stages per rank that torch has as well"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    wide = (against_torch(64, 256, at_least=10.0), against_torch(128, 512, at_least=20.0))
    return (growth(), speed(), *wide, cold(), demo_plan())


def build_lower_verify(name: str, ranks: int, microbatches: int) -> Program:
    """Builds a schedule, lowers it as far as torch does, adds the frees, and verifies it."""
    program = lower(build(name, ranks, microbatches), passes=TORCH_PASSES)
    verify(program)
    return program


def growth(ranks: int = 16, microbatches: Sequence[int] = (64, 128, 256, 512, 1024), times: int = 3) -> Table:
    """CPU seconds by number of actions, and the exponent of a power-law fit."""

    def lines() -> Iterator[Line]:
        for name in SCHEDULES:
            actions = [len(build_lower_verify(name, ranks, each).table.codes) for each in microbatches]
            seconds = [
                cpu_seconds(lambda name=name, each=each: build_lower_verify(name, ranks, each), times)
                for each in microbatches
            ]
            exponent = float(np.polyfit(np.log(actions), np.log(seconds), 1)[0])
            cells = (name, *(f"{each:.3f}" for each in seconds), f"{actions[-1]:,}", f"{exponent:.2f}")
            yield Line(cells, exponent, 1.1, at_least=False)

    columns = ("schedule", *(f"M={each}" for each in microbatches), "actions", "exponent")
    return Table(f"build + lower + verify, CPU seconds, {ranks} ranks, by number of actions", columns, lines())


def speed(ranks: int = 64, microbatches: int = 256, times: int = 3) -> Table:
    """Simulated actions per second."""

    def lines() -> Iterator[Line]:
        for name in SCHEDULES:
            program = build_lower_verify(name, ranks, microbatches)
            seconds = cpu_seconds(lambda program=program: simulate(program), times)
            rate = len(program.table.codes) / seconds
            yield Line((name, f"{len(program.table.codes):,}", f"{seconds:.3f}", f"{rate:,.0f}"), rate, 300_000.0)

    columns = ("schedule", "actions", "seconds", "actions/s")
    return Table(f"simulate, CPU seconds, {ranks} ranks, {microbatches} microbatches", columns, lines())


def against_torch(ranks: int, microbatches: int, at_least: float, times: int = 5) -> Table:
    """CPU seconds of build + lower + verify, compared with torch's build + lower of the same schedule."""
    from benchmarks.torch_pipeline import build_and_lower

    def lines() -> Iterator[Line]:
        for name in IN_TORCH:
            actions = len(build_lower_verify(name, ranks, microbatches).table.codes)
            ours = cpu_seconds(lambda name=name: build_lower_verify(name, ranks, microbatches), times)
            theirs = cpu_seconds(lambda name=name: build_and_lower(name, ranks, microbatches))
            cells = (name, f"{actions:,}", f"{ours:.3f}", f"{theirs:.2f}", f"{theirs / ours:.1f}")
            yield Line(cells, theirs / ours, at_least)

    columns = ("schedule", "actions", "ours", "torch", "ratio")
    title = f"build + lower + verify, CPU seconds, {ranks} ranks, {microbatches} microbatches, 2 stages per rank"
    return Table(f"{title}; torch builds and lowers", columns, lines())


def cold(ranks: int = 64, microbatches: int = 256, times: int = 5) -> Table:
    """The same for `interleaved`, each time in a new process, alternating with torch."""
    arguments = f'"interleaved", {ranks}, {microbatches}'
    calls = {
        "ours": f"from benchmarks.planning import build_lower_verify as call; arguments = {arguments}",
        "torch": f"from benchmarks.torch_pipeline import build_and_lower as call; arguments = {arguments}",
    }

    def lines() -> Iterator[Line]:
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
        for _ in range(times):
            for name, imports in calls.items():
                found[name].append(_in_new_process(imports, "call(*arguments)", os.environ))
        for place, (what, target) in enumerate((("the call", 12.0), ("with imports", -math.inf))):
            ours, theirs = (median(each[place] for each in found[name]) for name in calls)
            yield Line((what, f"{ours:.3f}", f"{theirs:.2f}", f"{theirs / ours:.1f}"), theirs / ours, target)

    title = f"interleaved, {ranks} x {microbatches}, build + lower + verify in a new process, CPU seconds"
    return Table(f"{title}; median of {times}", ("", "ours", "torch", "ratio"), lines())


def demo_plan(times: int = 3) -> Table:
    """Seconds of the plan of `penstock demo`, with an empty cache and with a filled one, and CPU seconds of imports."""
    imports = "import penstock.api.plan, penstock.demo.training; from penstock.cli.demo import _plan as call"

    def lines() -> Iterator[Line]:
        found: dict[str, list[tuple[float, ...]]] = {"empty cache": [], "filled cache": []}
        for _ in range(times):
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "PENSTOCK_CACHE": cache, "PENSTOCK_MEASURE_RANKS": "1"}
                for each in found.values():
                    each.append(_in_new_process(imports, "call(2, 2, len)", environment))
        for what, each in found.items():
            cpu, with_imports, seconds = (median(column) for column in zip(*each, strict=True))
            cells = (what, f"{with_imports - cpu:.2f}", f"{cpu:.2f}", f"{seconds:.2f}")
            yield Line(cells, seconds, 5.0, at_least=False)

    columns = ("", "imports, CPU s", "CPU s", "seconds")
    return Table(f"plan of `penstock demo` for 2 ranks, median of {times}", columns, lines())


def _in_new_process(imports: str, call: str, environment: Mapping[str, str]) -> tuple[float, ...]:
    """Runs a call in a new process; returns its CPU seconds, those with imports, and its seconds."""
    code = f"""
import time
{imports}
cpu, start = time.process_time(), time.perf_counter()
{call}
seconds, end = time.perf_counter() - start, time.process_time()
print("\\n", end - cpu, end, seconds)
"""
    root = os.fspath(Path(__file__).parents[1])
    result = subprocess.run(
        (sys.executable, "-c", code), cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return tuple(map(float, result.stdout.splitlines()[-1].split()))
