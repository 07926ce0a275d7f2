"""Reads recordings: Chrome traces of torch.profiler, parquet files, Megatron logs, and penstock's run.json.

The columns of the parquet files are those of the traces published with Lin et al., "Understanding Stragglers in Large
Model Training Using What-if Analysis", OSDI 2025.
"""

import gzip
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from penstock.errors import FormatError
from penstock.ir import MAX_JSON_BYTES, ComputeAction, Run, Trace, from_json
from penstock.planner.training_traces import (
    RecordedPass,
    RecordedStep,
    RecordedTraining,
    recording_of_traces,
    without_waiting,
)
from penstock.schedules import build

_RANGE = re.compile(r"(?:PP:)?(\d{1,9})([FBIW])(\d{1,9})")
"""the name of a range, such as PP:2F0"""
COLUMNS = ("step", "dp_rank", "stage", "optype", "seq_id", "mb_id", "start_ts", "duration")
"""columns of the parquet files"""
_OPERATIONS = {"forward-compute": "F", "backward-compute": "B"}
"""kinds of passes by their names in parquet files and Megatron logs"""
_TIMER = re.compile(r"^\s*(forward-compute|backward-compute)[ .]*:\s*(.*)$")
_RANK = re.compile(r"^\s*rank\s+(\d{1,9})\s*:\s*(\d{1,12}(?:\.\d*)?)\s*$")
_ITERATION = re.compile(r"elapsed time per iteration \(ms\):\s*(\d{1,12}(?:\.\d*)?)")
_PIPELINE_SIZE = re.compile(r"^\s*pipeline_model_parallel_size[ .]+(\d{1,9})\s*$", re.MULTILINE)
_MILLI = 1e-3


def read_recording(files: Sequence[Path], microbatches: int | None = None) -> RecordedTraining:
    """The recording of one file, or of Chrome traces of one rank each.

    Args:
        files: JSON (also compressed with gzip), parquet, or the log of Megatron
        microbatches: microbatches per step, which a log of Megatron does not have

    Raises:
        FormatError: if a file has no passes of a pipeline, or has them in no known form, or if `microbatches` is given
            for a file that has them
    """
    first = files[0]
    is_parquet = first.suffix == ".parquet"
    text = "" if is_parquet else _read(first)
    is_json = text.lstrip()[:1] in ("{", "[")
    if microbatches is not None and (is_parquet or is_json):
        hint = "leave it out; the answer has a row for more microbatches"
        raise FormatError("the number of microbatches must not be given: the file has it", file=first, hint=hint)
    if is_parquet:
        return _only(files, read_parquet(first))
    if not text.strip():
        raise FormatError("the file is empty", file=first)
    if is_json:
        head = text.lstrip()[:200]
        if '"penstock"' in head:
            return _only(files, _of_record(first, from_json(text)))
        return read_chrome([(first, text), *((each, _read(each)) for each in files[1:])])
    return _only(files, read_megatron(first, text, microbatches))


def _only(files: Sequence[Path], recording: RecordedTraining) -> RecordedTraining:
    """The recording; raises FormatError if further files were given."""
    if len(files) > 1:
        raise FormatError("several files must be Chrome traces, one per rank", file=files[0])
    return recording


def _read(path: Path) -> str:
    """The text of a file, which may be compressed with gzip."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        text = data.decode() if len(data) <= MAX_JSON_BYTES else None
    except (OSError, ValueError, EOFError) as error:
        raise FormatError("cannot read the file", file=path, reason=error) from None
    if text is None:
        raise FormatError("the file is too large", file=path, limit=MAX_JSON_BYTES)
    return text


def _of_record(path: Path, record: object) -> RecordedTraining:
    traces = record.traces if isinstance(record, Run) else (record,) if isinstance(record, Trace) else ()
    if not traces:
        hint = "penstock train --out DIRECTORY, which records steps, or step(..., record=True)"
        raise FormatError("the file has no recorded trace", file=path, type=type(record).__name__, hint=hint)
    return recording_of_traces(str(path), traces)


# Parquet


def read_parquet(path: Path) -> RecordedTraining:
    """The recording of a parquet file with one row per operation: step, dp_rank, stage, optype, start_ts, duration."""
    if find_spec("pyarrow") is None:
        raise FormatError(
            "parquet files need pyarrow, which is not installed", file=path, hint="pip install 'penstock[parquet]'"
        )
    import pyarrow.parquet

    try:
        missing = [name for name in COLUMNS if name not in pyarrow.parquet.read_schema(path).names]
        table = None if missing else pyarrow.parquet.read_table(path, columns=list(COLUMNS))
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors and OSErrors
        raise FormatError("cannot read the file", file=path, reason=str(error).splitlines()[0]) from None
    if table is None:
        hint = f"a file with the columns {', '.join(COLUMNS)}"
        raise FormatError("the file lacks a column", file=path, column=missing[0], hint=hint)
    return recording_of_rows(str(path), zip(*(table.column(name).to_pylist() for name in COLUMNS), strict=True))


def recording_of_rows(source: str, rows: Iterable[tuple[Any, ...]]) -> RecordedTraining:
    """The recording of operations, each a row of COLUMNS; start and duration are in seconds.

    Starts are counted from any time that is the same for all rows of a step.
    """
    passes: dict[tuple[int, int], list[RecordedPass]] = {}
    spans_of_steps: dict[int, tuple[float, float]] = {}
    # The ranks of an operation between ranks wait for each other: it takes from the last start to the end.
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for number, (step, replica, stage, operation, sequence, microbatch, start, seconds) in enumerate(rows):
        if not (
            all(isinstance(each, int) for each in (step, replica, stage, microbatch))
            and all(isinstance(each, int | float) and math.isfinite(each) for each in (start, seconds))
        ):
            values = {"step": step, "stage": stage, "mb_id": microbatch, "start_ts": start, "duration": seconds}
            raise FormatError("a row must have whole and finite numbers", file=source, row=number, **values)
        if operation in _OPERATIONS:
            one = RecordedPass(stage, _OPERATIONS[operation], stage, microbatch, start, seconds)
            passes.setdefault((step, replica), []).append(one)
        elif key := _group(operation, step, replica, stage, sequence):
            groups.setdefault(key, []).append((start, start + seconds))
        first, last = spans_of_steps.get(step, (math.inf, -math.inf))
        spans_of_steps[step] = min(first, start), max(last, start + seconds)
    taken: dict[str, list[float]] = {}
    for (operation, *_), spans in groups.items():
        seconds = max(0.0, max(end for _, end in spans) - max(start for start, _ in spans))
        taken.setdefault(str(operation), []).append(seconds)
    medians = {operation: median(values) for operation, values in taken.items()}
    latency = medians.pop("message", 0.0)
    steps = tuple(RecordedStep(step, replica, tuple(each)) for (step, replica), each in sorted(passes.items()))
    step_spans = (spans_of_steps[step] for step in sorted({each.step for each in steps}))
    whole = tuple(last - first for first, last in step_spans)
    return RecordedTraining(source, steps, latency, sum(medians.values()), whole)


def _group(operation: str, step: int, replica: int, stage: int, sequence: int) -> tuple[object, ...]:
    """A key that is equal on the ranks of one operation between ranks; empty for one that is not counted."""
    if operation.endswith(("-send", "-recv")):
        direction, end = operation.rsplit("-", 1)
        # The message between two stages, named by the earlier of them.
        lower = stage - (end == "recv") if direction == "forward" else stage - (end == "send")
        return ("message", direction, step, replica, lower, sequence)
    if operation in ("gc", "layernorm-grads-all-reduce"):
        return ()
    if operation == "embedding-grads-all-reduce":
        return (operation, step, replica)
    return (operation, step) if operation == "optimizer-clip-main-grad" else (operation, step, stage)


# Chrome traces


def read_chrome(files: Iterable[tuple[Path, str]]) -> RecordedTraining:
    """The recording of Chrome traces with ranges such as PP:2F0: one file with a process per rank, or a file per rank.

    A range that occurs several times belongs to successive steps. On the CPU, torch waits for the input of a pass
    inside its range; that does not count.
    """
    found: dict[tuple[int, str, int, int], list[tuple[float, float]]] = {}
    names = []
    files = list(files)
    for number, (path, text) in enumerate(files):
        names.append(str(path))
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError("not JSON", file=path, reason=str(error)) from None
        events = document.get("traceEvents") if isinstance(document, dict) else document
        if not isinstance(events, list):
            raise FormatError("not a Chrome trace", file=path, hint="a file that torch.profiler or penstock wrote")
        info = document.get("distributedInfo") if isinstance(document, dict) else None
        rank = info.get("rank") if isinstance(info, dict) else None
        ranges = [
            (event, match)
            for event in events
            if _is_span(event) and (match := _RANGE.fullmatch(str(event.get("name"))))
        ]
        # A GPU trace has each range twice: when its kernels were launched, and when they ran, which counts.
        on_device = [(event, match) for event, match in ranges if event.get("cat") == "gpu_user_annotation"]
        for event, match in on_device or ranges:
            # In one file each process is a rank; processes of two hosts may have the same number.
            where = event.get("pid", 0) if len(files) == 1 else rank if isinstance(rank, int) else number
            key = (_number(where), match[2], int(match[1]), int(match[3]))
            found.setdefault(key, []).append((event["ts"] * 1e-6, event["dur"] * 1e-6))
    steps: dict[int, list[RecordedPass]] = {}
    for (rank, kind, stage, microbatch), spans in found.items():
        for number, (start, seconds) in enumerate(sorted(spans)):
            steps.setdefault(number, []).append(RecordedPass(rank, kind, stage, microbatch, start, seconds))
    complete = [steps[number] for number in sorted(steps) if len(steps[number]) == len(steps.get(0, ()))]
    recorded = tuple(RecordedStep(number, 0, without_waiting(passes)) for number, passes in enumerate(complete))
    return RecordedTraining(", ".join(names), recorded)


def _is_span(event: object) -> bool:
    """Whether an event has a start and a duration."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return False
    return all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))


def _number(process: Any) -> int:
    try:
        return int(process)
    except (TypeError, ValueError):
        raise FormatError("the process of a range must be a number", pid=repr(process)) from None


# Logs of Megatron


def read_megatron(path: Path, text: str, microbatches: int | None) -> RecordedTraining:
    """The recording of a log with timers of every rank (`--timing-log-level 2 --timing-log-option all`).

    A log has the seconds of all microbatches together, so that each counts as the mean; the order is taken to be 1F1B.
    Every rank is a stage, unless the arguments of Megatron, at the beginning of the log, say otherwise.
    """
    iterations = _megatron_timers(path, text)
    totals = [each for _, each in iterations]
    if microbatches is None:
        hint = "--microbatches 8: the global batch size divided by micro-batch size and replicas"
        raise FormatError("a log does not have the number of microbatches", file=path, hint=hint)
    ranks, given = sorted({rank for _, rank in totals[0]}), _PIPELINE_SIZE.search(text)
    num_stages = int(given[1]) if given else len(ranks)
    if not num_stages or len(ranks) % num_stages:
        raise FormatError(
            "the log must have the timers of all ranks",
            file=path,
            ranks=len(ranks),
            pipeline_model_parallel_size=num_stages,
        )
    # Megatron numbers ranks by stage. Those of one stage, which differ in tensor or data parallelism, are in pipelines
    # of their own.
    num_replicas = len(ranks) // num_stages
    schedule, steps = build("1f1b", num_stages, microbatches), []
    for number, each in enumerate(totals):
        for replica in range(num_replicas):
            passes = []
            for stage, order in enumerate(schedule.orders):
                rank = ranks[stage * num_replicas + replica]
                for place, action in enumerate(order):
                    assert isinstance(action, ComputeAction)
                    if (action.letter, rank) not in each:
                        raise FormatError("the log lacks a timer", file=path, rank=rank, timer=action.letter)
                    taken = each[action.letter, rank] / microbatches
                    passes.append(RecordedPass(stage, action.letter, stage, action.microbatch, float(place), taken))
            steps.append(RecordedStep(number, replica, tuple(passes)))
    recording = RecordedTraining(str(path), tuple(steps))
    # A log has durations only: passes are put where the simulation has them.
    timed = []
    for step in recording.steps:
        trace = recording.run(step.schedule, step.costs)
        timed.append(replace(step, passes=recording_of_traces(recording.source, [trace]).steps[0].passes))
    known = tuple(seconds for seconds, _ in iterations if seconds is not None)
    step_seconds = known if len(known) == len(iterations) else ()
    return RecordedTraining(recording.source, tuple(timed), step_seconds=step_seconds)


def _megatron_timers(path: Path, text: str) -> list[tuple[float | None, dict[tuple[str, int], float]]]:
    """Of each logged iteration its seconds, if they are known, and the seconds of all passes by kind and rank."""
    found: list[tuple[float | None, dict[tuple[str, int], float]]] = []
    kind, has_ranges = "", False
    for line in text.splitlines():
        if iteration := _ITERATION.search(line):
            found.append((float(iteration[1]) * _MILLI, {}))
        elif timer := _TIMER.match(line):
            kind, has_ranges = _OPERATIONS[timer[1]], has_ranges or "(" in timer[2]
            if not found:
                found.append((None, {}))
        elif kind and (own := _RANK.match(line)):
            found[-1][1][kind, int(own[1])] = float(own[2]) * _MILLI
        elif line.strip() and not line.lstrip().startswith("rank"):
            kind = ""
    # Iterations may be logged more often than timers.
    found = [(seconds, timers) for seconds, timers in found if timers]
    if not found:
        hint = "--timing-log-level 2 --timing-log-option all, which logs the timers of every rank"
        problem = "the log has only the range over all ranks" if has_ranges else "the log has no timers of passes"
        raise FormatError(problem, file=path, hint=hint)
    return found
