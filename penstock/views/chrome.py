"""A trace as JSON for ui.perfetto.dev and chrome://tracing.

Choose it to zoom, search and measure, above all in recorded traces. A rank is a process: its passes are one track, its
other actions that took time another, and the messages that it sends one track per receiving rank. Where spans of one
track would partly overlap (a message leaves before the previous one has arrived), the later one goes to a further
lane. Memory is a counter.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.ir import COMPUTE_KINDS, ComputeAction, Fact, Message, Overlap, Span, Trace, Transfer
from penstock.views.base import Traces, View, traces_by_name

Event = dict[str, Any]
_PASSES, _OTHER, _MESSAGES = "passes", "other", "to rank"
_FIRST_TRACK, _LANES = 1, 1000


@dataclass(frozen=True)
class Chrome(View[Traces, str]):
    """JSON text in the trace event format, times in microseconds."""

    flows: bool = False
    """whether an arrow is drawn from the pass that made a message to the pass that used it"""
    name = "chrome"
    record = Trace
    suffix = ".json"

    def __call__(self, traces: Traces) -> str:
        events: list[Event] = []
        process = 0
        for name, trace in traces_by_name(traces).items():
            prefix = f"{name}: " if name else ""
            for rank, stages in enumerate(trace.program.placement.stages):
                held = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
                events.append(_metadata("process_name", process + rank, 0, name=f"{prefix}rank {rank} ({held})"))
                events.append(_metadata("process_sort_index", process + rank, 0, sort_index=process + rank))
            events += _spans(trace, process)
            for rank, curve in enumerate(trace.memory):
                for seconds, size in zip(curve.seconds, curve.held, strict=True):
                    times = {"ts": _nanoseconds(seconds) / 1000, "args": {"bytes": int(size)}}
                    events.append({"ph": "C", "name": "memory", "pid": process + rank, "tid": 0, **times})
            events += _flows(trace, process) if self.flows else ()
            process += trace.num_ranks
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def _metadata(what: str, process: int, thread: int, **arguments: object) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}


def _spans(trace: Trace, process: int) -> Iterator[Event]:
    """All spans, each on a track without partly overlapping spans; and the names of the tracks."""
    ends: dict[tuple[int, str], list[int]] = {}
    tracks = {(rank, _PASSES, 0): _FIRST_TRACK for rank in range(trace.num_ranks)}
    # Sends, receives and frees that take no time would only hide the passes.
    spans = (span for span in trace.spans if span.action.kind in COMPUTE_KINDS or span.end > span.start)
    shown: list[Span | Transfer] = [*spans, *trace.transfers]
    for item in sorted(shown, key=lambda item: item.start):
        if isinstance(item, Transfer):
            rank, group = item.source, f"{_MESSAGES} {item.target}"
        else:
            rank, group = item.rank, _PASSES if item.action.kind in COMPUTE_KINDS else _OTHER
        lanes = ends.setdefault((rank, group), [])
        start, end = _nanoseconds(item.start), _nanoseconds(item.end)
        lane = next((number for number, busy in enumerate(lanes) if busy <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        track = tracks.setdefault((rank, group, lane), len(tracks) + 1)
        action = item.action
        arguments: Event = {"kind": action.kind.name.lower(), "stage": action.stage, "text": str(action)}
        if isinstance(action, ComputeAction | Message):
            arguments["microbatch"] = action.microbatch
        if isinstance(action, Message):
            arguments["peer"] = action.peer
        if isinstance(action, Overlap):
            arguments["microbatch"] = action.forward.microbatch
            arguments["backward"] = {"stage": action.backward.stage, "microbatch": action.backward.microbatch}
        where = {"pid": process + rank, "tid": track, "ts": start / 1000, "dur": (end - start) / 1000}
        yield {"ph": "X", "name": arguments["text"], "cat": arguments["kind"], **where, "args": arguments}
    for (rank, group, lane), track in tracks.items():
        # Passes first, then other spans, then messages by their target.
        place = (_PASSES, _OTHER).index(group) if group in (_PASSES, _OTHER) else 2 + int(group.removeprefix(_MESSAGES))
        order = _LANES * place + min(lane, _LANES - 1)
        yield _metadata("thread_name", process + rank, track, name=f"{group}, lane {lane + 1}" if lane else group)
        yield _metadata("thread_sort_index", process + rank, track, sort_index=order)


def _flows(trace: Trace, process: int) -> Iterator[Event]:
    """An arrow per message, from the pass that made its values to the pass that used them."""
    program = trace.program
    makers = program.makers
    for number, transfer in enumerate(trace.transfers):
        message = transfer.action
        assert isinstance(message, Message)
        fact = Fact.INPUT_GRADIENT if message.is_gradient else Fact.OUTPUT
        maker, user = (int(makers[fact][stage, message.microbatch]) for stage in (message.stage, message.peer))
        if maker < 0 or user < 0:
            continue
        # A viewer binds an arrow to the span around its time: the last nanosecond of the maker, the start of the user.
        leaves = max(_nanoseconds(trace.starts[maker]), _nanoseconds(trace.ends[maker]) - 1)
        enters = _nanoseconds(trace.starts[user])
        arrow = {"name": str(message), "cat": "message", "id": f"{process}.{number}", "tid": _FIRST_TRACK}
        yield {"ph": "s", "pid": process + transfer.source, "ts": leaves / 1000, **arrow}
        yield {"ph": "f", "bp": "e", "pid": process + transfer.target, "ts": enters / 1000, **arrow}


def _nanoseconds(seconds: float) -> int:
    # Integers, so that rounding cannot make the end of one span later than the start of the next.
    return round(seconds * 1e9)
