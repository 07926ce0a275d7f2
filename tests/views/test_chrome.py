"""The Chrome trace, read back as JSON."""

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.ir import Cluster, Series, StageCosts, Trace
from penstock.views import Chrome
from tests.views.samples import PAIR, TWO_RANKS, VEE, heavy, jittered, named, run

Events = list[dict[str, Any]]


def events(trace: Trace, phase: str, flows: bool = False) -> Events:
    return [event for event in json.loads(Chrome(flows=flows)(trace))["traceEvents"] if event["ph"] == phase]


def tracks(trace: Trace) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Start and end, in nanoseconds, of every span of every track."""
    found = defaultdict(list)
    for event in events(trace, "X"):
        start, length = round(1000 * event["ts"]), round(1000 * event["dur"])
        found[event["pid"], event["tid"]].append((start, start + length))
    return found


def track_names(trace: Trace) -> set[tuple[int, str]]:
    return {(e["pid"], e["args"]["name"]) for e in events(trace, "M") if e["name"] == "thread_name"}


SLOW = Cluster(4, latency=2.5)
HOSTILE = {
    "free links": named("1f1b", 4, 8),
    "concurrent messages": named("1f1b", 4, 8, SLOW),
    "overlapped pairs": named("dualpipe_v", 4, 8, SLOW),
    "recorded": jittered(named("zbv", 4, 8, SLOW)),
    "thirds of a second": run(TWO_RANKS, StageCosts((1 / 3, 0.1), (0.7, 1 / 7), (1 / 9, 1 / 11))),
}


@pytest.mark.parametrize("trace", HOSTILE)
def test_spans_of_one_track_never_overlap_in_part(trace: str) -> None:
    for spans in tracks(HOSTILE[trace]).values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert end <= start


def test_a_rank_is_a_process_named_with_its_stages() -> None:
    names = [e["args"]["name"] for e in events(run(VEE), "M") if e["name"] == "process_name"]
    assert names == ["rank 0 (stages 0, 3)", "rank 1 (stages 1, 2)"]


def test_every_pass_is_a_span_in_microseconds_with_its_arguments() -> None:
    forward, backward = events(run("0F0,0B0"), "X")
    assert (forward["name"], forward["ts"], forward["dur"]) == ("0F0", 0.0, 1e6)
    assert (backward["ts"], backward["dur"]) == (1e6, 2e6)
    assert backward["args"] == {"kind": "backward", "stage": 0, "text": "0B0", "microbatch": 0}


def test_an_overlapped_pair_names_both_passes() -> None:
    pair = next(e for e in events(run(PAIR), "X") if e["cat"] == "overlap")
    assert pair["args"]["microbatch"] == 1
    assert pair["args"]["backward"] == {"stage": 0, "microbatch": 0}


def test_messages_have_tracks_of_their_own_per_direction() -> None:
    assert track_names(run(TWO_RANKS)) == {(0, "passes"), (1, "passes"), (0, "to rank 1"), (1, "to rank 0")}


def test_concurrent_messages_go_to_further_lanes() -> None:
    assert (0, "to rank 1, lane 2") in track_names(named("gpipe", 2, 4, Cluster(2, latency=2.5)))


def test_every_message_is_a_span() -> None:
    trace = HOSTILE["concurrent messages"]
    assert sum(e["cat"] == "send" for e in events(trace, "X")) == len(trace.transfers)


def test_an_action_that_took_time_beside_the_passes_is_on_another_track() -> None:
    trace = run("0F0,0B0")
    ends = np.where(np.arange(len(trace.ends)) == len(trace.ends) - 1, 4.0, trace.ends.values)
    assert (0, "other") in track_names(replace(trace, ends=Series(ends)))


def test_memory_is_a_counter_of_bytes() -> None:
    held = [e["args"]["bytes"] for e in events(heavy(), "C") if e["pid"] == 0]
    assert held == [int(bytes_) for bytes_ in heavy().memory[0].held]


def test_arrows_lead_from_the_pass_that_made_a_message_to_the_one_that_used_it() -> None:
    trace = run(TWO_RANKS)
    leaves, enters = (events(trace, phase, flows=True) for phase in "sf")
    assert len(leaves) == len(enters) == len(trace.transfers)
    assert (leaves[0]["name"], leaves[0]["ts"], enters[0]["ts"]) == ("0SEND_F0", pytest.approx(1e6, abs=0.01), 1e6)
    assert not events(trace, "s")


def test_several_traces_have_processes_of_their_own() -> None:
    document = json.loads(Chrome()({"one": run(TWO_RANKS), "two": run(TWO_RANKS)}))
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert names == ["one: rank 0 (stage 0)", "one: rank 1 (stage 1)", "two: rank 0 (stage 0)", "two: rank 1 (stage 1)"]
    assert {e["pid"] for e in document["traceEvents"]} == {0, 1, 2, 3}
