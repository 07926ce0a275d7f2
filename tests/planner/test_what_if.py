"""Recordings of pipelines from several formats, and the answers about them."""

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.errors import FormatError
from penstock.ir import Cluster, StageCosts, Trace, to_json
from penstock.passes import lower
from penstock.planner import RecordedPass, RecordedStep, RecordedTraining, read_recording, what_if, what_if_document
from penstock.planner.training_trace_files import COLUMNS, recording_of_rows
from penstock.planner.training_traces import recording_of_traces
from penstock.schedules import build
from penstock.simulate import simulate
from penstock.views import Chrome

PUBLISHED = Path(os.environ.get("PENSTOCK_PUBLISHED", Path(__file__).parents[3] / "shared/data/published"))
SLOW = StageCosts((1.0, 1.0, 2.0, 1.0), (1.0, 1.0, 2.0, 1.0), (1.0, 1.0, 2.0, 1.0))


def trace_of(costs: StageCosts = SLOW, microbatches: int = 8, name: str = "1f1b", latency: float = 0.0) -> Trace:
    schedule = build(name, costs.num_stages, microbatches)
    return simulate(lower(schedule), costs, Cluster(costs.num_stages, latency=latency))


def two_replicas() -> RecordedTraining:
    """Two steps of two replicas, the second of which takes twice as long."""
    steps = []
    for step in range(2):
        for replica in range(2):
            costs = StageCosts.uniform(2, 1.0 + replica, 1.0 + replica, 0.0)
            passes = recording_of_traces("", [trace_of(costs, 4)]).steps[0].passes
            steps.append(RecordedStep(step, replica, passes))
    return RecordedTraining("two", tuple(steps), outside=0.5)


def test_a_recorded_trace_is_simulated_exactly():
    unequal = StageCosts(((1.0, 2.0, 3.0), 1.0), ((1.0, 1.0, 4.0), 0.5), (0.5, 0.5))
    for trace in (trace_of(), trace_of(unequal, 3), trace_of(unequal, 3, "zb_h1"), trace_of(unequal, 3, "gpipe", 0.25)):
        recording = recording_of_traces("trace", [trace])
        assert recording.errors[0] == pytest.approx(0.0, abs=1e-12)
        assert recording.run(recording.steps[0].schedule, recording.steps[0].costs).makespan == pytest.approx(
            trace.makespan
        )


def test_microbatches_in_another_order_are_simulated_too():
    passes = [
        *(RecordedPass(0, "F", 0, m, start, 1.0) for start, m in enumerate((1, 0))),
        *(RecordedPass(0, "B", 0, m, 2.0 + 2 * start, 2.0) for start, m in enumerate((0, 1))),
    ]
    recording = RecordedTraining("", (RecordedStep(0, 0, tuple(passes)),))
    assert recording.errors == (0.0,)
    assert what_if(recording, 0.0).simulated == 6.0


def test_the_slow_stage_is_named_with_its_cost():
    found = what_if(recording_of_traces("trace", [trace_of()]), budget_seconds=0.05)
    worst = found.parts[0]
    assert (worst.kind, worst.number, worst.slowness) == ("stage", 2, 1.6)
    # With stages of 3, 3, 3.75 and 3 seconds a step takes that much less.
    assert worst.cost == pytest.approx(trace_of().makespan - trace_of(StageCosts(*((1, 1, 1.25, 1),) * 3)).makespan)
    assert found.ideal == pytest.approx(trace_of(StageCosts.uniform(4, 1.25, 1.25, 1.25)).makespan)
    assert found.bound <= min(each.seconds for each in found.alternatives if each.change.startswith("schedule auto"))
    assert sum(share for _, share in found.bubble) == pytest.approx(trace_of().bubble)
    changes = {each.change: each.seconds for each in found.alternatives}
    assert {"equal stages", "schedule gpipe", "schedule zb_h1", "16 microbatches"} <= changes.keys()
    assert changes["16 microbatches"] == pytest.approx(trace_of(microbatches=16).makespan / 2)
    assert "stage 2 takes 1.60 times the mean: costs" in str(found)


def test_the_slow_replica_is_named_with_its_cost():
    found = what_if(two_replicas(), budget_seconds=0.05)
    parts = {each.number: each for each in found.parts if each.kind == "replica"}
    assert parts[1].slowness == pytest.approx(4 / 3)
    assert found.simulated == found.measured == 20.5
    assert found.ideal == pytest.approx(15.5)
    assert parts[1].cost == pytest.approx(20.5 - 15.5)
    assert parts[1].slowdown == pytest.approx(20.5 / 15.5)
    assert parts[0].slowdown == 1.0
    assert json.loads(json.dumps(found.to_dict()))["slowdown"] == pytest.approx(20.5 / 15.5)
    assert "replica 1 takes 1.33 times the mean" in str(found)
    assert what_if_document(two_replicas(), found).count("<svg") == 2


def test_chrome_traces_of_all_ranks_or_of_one_each(tmp_path):
    trace = trace_of()
    whole = tmp_path / "trace.json.gz"
    whole.write_bytes(gzip.compress(Chrome()(trace).encode()))
    recording = read_recording([whole])
    assert recording.errors[0] == pytest.approx(0.0, abs=1e-6)
    files = []
    for rank in range(4):
        spans = [span for span in trace.spans if span.rank == rank and hasattr(span.action, "parts")]
        events = [
            {
                "ph": "X",
                "name": f"PP:{span.action}",
                "pid": 77,
                "ts": step * 1e8 + span.start * 1e6,
                "dur": 1e6 * (span.end - span.start),
            }
            for span in spans
            for step in range(2)
        ]
        events += [{"ph": "X", "name": "aten::mm", "ts": 0, "dur": 1}, {"ph": "i", "name": "PP:0F0"}, "text"]
        # On a GPU the same range a second time, when its kernels ran; the first is when they were launched.
        launches = [{**event, "dur": 1} for event in events if isinstance(event, dict)]
        events = [{**event, "cat": "gpu_user_annotation"} if isinstance(event, dict) else event for event in events]
        events += launches
        files.append(tmp_path / f"rank{rank}.json")
        files[-1].write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}}))
    apart = read_recording(files)
    assert len(apart.steps) == 2
    assert apart.steps[0].schedule == recording.steps[0].schedule == trace.program.schedule
    assert [each.seconds for each in apart.steps[0].passes] != [1e-6] * len(apart.steps[0].passes)


def test_a_run_or_a_trace_of_penstock(tmp_path):
    file = tmp_path / "trace.json"
    file.write_text(to_json(trace_of()))
    assert read_recording([file]).errors[0] == pytest.approx(0.0, abs=1e-12)
    file.write_text(to_json(trace_of().program))
    with pytest.raises(FormatError, match=r"no recorded trace.*type: Program"):
        read_recording([file])


LOG = """
 iteration       10/     100 | elapsed time per iteration (ms): 12500.0 | global batch size:     8 |
times across ranks (ms):
  forward-backward:
     rank  0: 12000.00
  forward-compute:
     rank  0: 800.00
     rank  1: 1600.00
  backward-compute:
     rank  0: 1600.00
     rank  1: 3200.00
  optimizer:
     rank  0: 10.00
"""


def test_a_log_of_megatron(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text(LOG)
    recording = read_recording([file], 8)
    assert recording.mean_costs().forward == pytest.approx((0.1, 0.2))
    assert recording.mean_costs().backward == pytest.approx((0.2, 0.4))
    assert recording.measured == 12.5
    found = what_if(recording, 0.0)
    assert found.parts[0].number == 1
    assert "1 step of 1 x 2 stages, 8 microbatches" in str(found)
    assert "longer than its passes explain" in str(found)
    assert "if a backward splits in half and a stage can be cut in 2" in str(found)
    with pytest.raises(FormatError, match="number of microbatches"):
        read_recording([file])
    file.write_text(LOG.replace("  backward-compute:\n     rank  0: 1600.00\n     rank  1: 3200.00\n", ""))
    with pytest.raises(FormatError, match="lacks a timer"):
        read_recording([file], 8)
    file.write_text("(min, max) time across ranks (ms):\n    forward-compute ......: (300.1, 400.2)\n")
    with pytest.raises(FormatError, match=r"only the range over all ranks"):
        read_recording([file], 8)
    file.write_text("nothing")
    with pytest.raises(FormatError, match="no timers of passes"):
        read_recording([file], 8)


def test_a_log_of_megatron_with_tensor_or_data_parallelism(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text("  pipeline_model_parallel_size .................... 1\n" + LOG + LOG)
    recording = read_recording([file], 8)
    assert (recording.num_stages, recording.replicas, len(recording.by_step)) == (1, (0, 1), 2)
    assert what_if(recording, 0.0).parts[1].slowness == pytest.approx(4 / 3)
    file.write_text("pipeline_model_parallel_size ... 4\n" + LOG)
    with pytest.raises(FormatError, match="must have the timers of all ranks"):
        read_recording([file], 8)


def test_iterations_may_be_logged_more_often_than_timers(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text("elapsed time per iteration (ms): 99000.0\n" + LOG)
    assert read_recording([file], 8).measured == 12.5


def spans(*names, dur="1", pid=0):
    events = (f'{{"ph":"X","name":"{name}","pid":{pid},"ts":{at},"dur":{dur}}}' for at, name in enumerate(names))
    return f"[{','.join(events)}]"


def test_ranks_of_several_files_are_the_files_unless_they_say_otherwise(tmp_path):
    # Processes of containers may all have the same number.
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for stage, file in enumerate(files):
        file.write_text(spans(f"{stage}F0", f"{stage}B0"))
    assert read_recording(files).num_ranks == 2


def test_waiting_inside_the_range_of_a_pass_does_not_count(tmp_path):
    files, trace = [], trace_of()
    for rank, order in enumerate(trace.program.schedule.orders):
        # As torch's schedules record on the CPU: the range of a pass begins when the one before has ended.
        ends = {str(span.action): span.end for span in trace.spans}
        times = pairwise([0.0, *(ends[str(action)] for action in order)])
        events = [
            {"ph": "X", "name": f"PP:{action}", "ts": 1e6 * start, "dur": 1e6 * (end - start)}
            for action, (start, end) in zip(order, times, strict=True)
        ]
        files.append(tmp_path / f"{rank}.json")
        files[-1].write_text(json.dumps(events))
    recording = read_recording(files)
    assert recording.errors[0] == pytest.approx(0.0, abs=1e-6)
    assert recording.mean_costs().forward == pytest.approx(recording_of_traces("", [trace]).mean_costs().forward)


def test_files_that_hold_no_passes(tmp_path):
    file = tmp_path / "file.json"
    for text, problem in (
        (" ", "the file is empty"),
        (spans("0F0", "0B0", dur="NaN"), "seconds of a pass must be finite"),
        (spans("0F0", "0B0", dur="-1"), "seconds of a pass must be finite"),
        (spans("0F0", "0B0", dur="1e300"), "seconds of a pass must be finite"),
        (spans("0F0", "0B0", dur="0"), "must take time"),
        (spans("0F0", "0B0", "0F999999999"), "microbatch out of range"),
        (spans("0F0", "0B0", "999999999F0"), "a stage has no passes"),
        (spans("0F" + 5000 * "9"), "no passes of a pipeline"),
        ('{"traceEvents": []}', "no passes of a pipeline"),
        ('{"traceEvents": 3}', "not a Chrome trace"),
        ("[{", "not JSON"),
        ('[{"ph": "X", "name": "0F0", "pid": "x", "ts": 0, "dur": 1}]', "process of a range must be a number"),
        ('[{"ph": "X", "name": "1F0", "pid": 0, "ts": 0, "dur": 1}]', "a stage has no passes"),
        ('[{"ph": "X", "name": "0B0", "pid": 0, "ts": 0, "dur": 1}]', "do not form a schedule"),
    ):
        file.write_text(text)
        with pytest.raises(FormatError, match=problem):
            read_recording([file])
    with pytest.raises(FormatError, match="cannot read the file"):
        read_recording([tmp_path / "none.json"])
    file.write_text(LOG)
    with pytest.raises(FormatError, match="one per rank"):
        read_recording([file, file], 8)


def test_recordings_must_be_consistent():
    one, two = (recording_of_traces("", [trace_of(microbatches=count)]).steps[0] for count in (2, 3))
    with pytest.raises(FormatError, match="same numbers of stages and microbatches"):
        RecordedTraining("", (one, two))
    moved = tuple(
        each._replace(rank=1 - each.rank) if each.kind == "B" and each.stage < 2 else each for each in one.passes
    )
    with pytest.raises(FormatError, match="must be on one rank"):
        _ = RecordedStep(0, 0, moved).schedule
    with pytest.raises(FormatError, match="overlapped pairs"):
        recording_of_traces("", [simulate(lower(build("dualpipe_v", 2, 4)))])


def rows_of_two_replicas() -> list[tuple]:
    rows = []
    for each in two_replicas().steps:
        for one in each.passes:
            name = {"F": "forward-compute", "B": "backward-compute"}[one.kind]
            rows.append(
                (each.step, each.replica, one.stage, name, one.microbatch, one.microbatch, one.start, one.seconds)
            )
        # The second rank comes to the reduction later, and both leave it together.
        rows += [(each.step, each.replica, stage, "optimizer", 0, -1, 20.0 + stage, 0.5) for stage in range(2)]
        # A message that its receiver waits for takes from the start of sending on.
        rows.append((each.step, each.replica, 0, "forward-send", 0, -1, 1.0, 0.25))
        rows.append((each.step, each.replica, 1, "forward-recv", 0, -1, 0.0, 1.25))
        rows.append((each.step, each.replica, 0, "embedding-grads-all-reduce", 0, -1, 18.0, 0.125))
        rows.append((each.step, each.replica, 0, "gc", 0, -1, 18.0, 0.5))
    return rows


def test_waiting_does_not_count_in_operations_between_ranks():
    recording = recording_of_rows("rows", rows_of_two_replicas())
    assert recording.latency == 0.25
    assert recording.outside == 0.5 + 0.125
    assert recording.measured == 21.5
    assert recording.replicas == (0, 1)
    assert [each.schedule.num_microbatches for each in recording.steps] == [4] * 4


def test_starts_of_a_step_may_be_counted_from_any_time():
    rows = [(*row[:6], row[6] + 1e6, row[7]) for row in rows_of_two_replicas()]
    assert recording_of_rows("rows", rows).measured == recording_of_rows("rows", rows_of_two_replicas()).measured


def test_files_above_the_limit_are_refused_also_with_characters_of_several_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.planner.training_trace_files.MAX_JSON_BYTES", 9)
    (file := tmp_path / "trace.json").write_text("ääääää")
    with pytest.raises(FormatError, match="the file is too large"):
        read_recording([file])


def test_parquet_files_of_the_straggler_study(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = map(list, zip(*rows_of_two_replicas(), strict=True))
    file = tmp_path / "job.parquet"
    parquet.write_table(arrow.table(dict(zip(COLUMNS, columns, strict=True))), file)
    assert read_recording([file]).steps == recording_of_rows("", rows_of_two_replicas()).steps
    parquet.write_table(arrow.table({"step": [1]}), file)
    with pytest.raises(FormatError, match=r"lacks a column .*column: dp_rank"):
        read_recording([file])
    file.write_bytes(b"PAR1")
    with pytest.raises(FormatError, match="cannot read the file"):
        read_recording([file])


@pytest.mark.parametrize("column", [0, 6, 7])
@pytest.mark.parametrize("value", [None, float("nan"), "x"])
def test_rows_without_numbers_are_refused(column, value):
    row = list(rows_of_two_replicas()[0])
    row[column] = value
    with pytest.raises(FormatError, match="a row must have whole and finite numbers"):
        recording_of_rows("rows", [tuple(row)])


def test_parquet_files_need_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.planner.training_trace_files.find_spec", lambda name: None)
    with pytest.raises(FormatError, match=r"penstock\[parquet\]"):
        read_recording([tmp_path / "job.parquet"])


@pytest.mark.parametrize("job", ["ST", pytest.param("SE", marks=pytest.mark.whole)])
def test_the_results_of_the_straggler_study_are_reproduced(job):
    pytest.importorskip("pyarrow")
    if not (PUBLISHED / f"trace-{job}.parquet").exists():
        pytest.skip("the published traces are not here")
    published = json.loads((PUBLISHED / f"result-{job}.json").read_text())
    found = what_if(read_recording([PUBLISHED / f"trace-{job}.parquet"]), budget_seconds=0.1)
    assert found.pipeline_error <= 0.012
    ideal = next(iter(published["step_t_noblk"].values()))
    assert found.ideal == pytest.approx(ideal, rel=0.03)
    assert found.simulated / found.ideal == pytest.approx(published["blocking_slowdown"], rel=0.03)
    for part in found.parts:
        named = published[f"blocking_decompose_by_{'stage' if part.kind == 'stage' else 'dp_rank'}"]
        assert part.slowdown == pytest.approx(named[str(part.number)], rel=0.03)
