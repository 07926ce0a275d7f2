"""All benchmarks run with tiny sizes; only the structure of their results is checked."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import (
    asynchronous,
    backward,
    capture,
    documents,
    joint_plan,
    layouts,
    literature,
    measure,
    overlap,
    partition,
    planning,
    prediction,
    published,
    rank_failure,
    rank_sync,
    reference,
    results,
    runtime_compute,
    runtime_memory,
    runtime_sleep,
    saving,
    slow_ranks,
    soak,
    synthesis,
    vocabulary,
    walk,
)
from benchmarks.__main__ import main
from benchmarks.table import Line, Table
from benchmarks.timing import cpu_seconds
from penstock.demo.gpt import Sizes
from penstock.schedules import SCHEDULES


def test_a_line_is_compared_with_its_target_in_the_right_direction():
    assert Line(("a", "12.0"), 12.0, 10.0).row == ("a", "12.0", ">= 10", "PASS")
    assert Line(("a", "1.2"), 1.2, 1.1, at_least=False).row == ("a", "1.2", "<= 1.1", "FAIL")


def test_a_table_reports_whether_all_of_its_lines_pass(capsys):
    good, bad = Line(("a", "300001"), 300_001.0, 300_000.0), Line(("b", "7"), 7.0, 300_000.0)
    assert Table("speed", ("schedule", "rate"), [good]).show().passes
    assert not Table("speed", ("schedule", "rate"), [bad, good]).show().passes
    assert "  b                          7  >= 300,000  FAIL\n" in capsys.readouterr().out


def test_the_run_fails_if_a_line_does(monkeypatch, capsys):
    for value, code in ((1.0, 0), (0.0, 1)):
        table = Table("one", ("what", "value"), [Line(("a", "1"), value, 1.0)])
        monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"capture": lambda table=table: (table,)})
        assert main(["capture"]) == code
    assert capsys.readouterr().out.endswith("failed:\n  capture: one: a 1 >= 1\n")
    assert main(["cooking"]) == 2
    assert "unknown benchmark: cooking\ntry: capture" in capsys.readouterr().err


def test_a_table_is_chosen_by_a_part_of_its_title(monkeypatch, capsys):
    tables = [Table(title, ("what", "value"), [Line(("a", "1"), 1.0, 1.0)]) for title in ("of 20 ms", "of 80 ms")]
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"capture": lambda: tables})
    assert main(["capture", "--table", "80 ms"]) == 0
    assert "of 20 ms" not in capsys.readouterr().out
    assert main(["capture", "--table", "8 s"]) == 2


def test_without_names_the_benchmarks_of_the_readme_run_and_their_results_are_stored(monkeypatch, tmp_path, capsys):
    line = Line(("8 billion, time", "8.1 s"), 8.1, 10.0, at_least=False)
    table = Table("a plan for Llama-3 8B", ("model", ""), [line])
    row = results.Row("planning", "joint_plan", results.Metric("Llama", "{} s", ".0f", ("8 billion, time",)))
    monkeypatch.setattr(results, "ROWS", (row,))
    monkeypatch.setattr(results, "PATH", tmp_path / "results.json")
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"joint_plan": lambda: (table,), "capture": lambda: 1 / 0})
    assert main(["--write"]) == 0
    assert "  PASS  planning: 8 s (target <= 10 s)" in capsys.readouterr().out
    stored = results.read(tmp_path / "results.json")
    assert [list(each.lines) for each in stored["joint_plan"].tables] == [[line]]
    assert "| planning | 8 s | <= 10 s | yes | `B joint_plan` |" in documents.measured(stored)


def test_a_table_that_runs_alone_is_stored_beside_the_others(monkeypatch, tmp_path):
    values = iter((1.0, 2.0, 3.0))

    def lines():
        yield Line(("a",), next(values), 1.0)

    def tables():
        return [Table(title, ("what",), lines()) for title in ("one", "two")]

    monkeypatch.setattr(results, "PATH", tmp_path / "results.json")
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {"capture": tables})
    for title in ("", "one"):
        assert main(["--write", "--table", title, "capture"]) == 0
    stored = results.read(tmp_path / "results.json")["capture"]
    assert [(table.title, table.lines[0].value) for table in stored.tables] == [("one", 3.0), ("two", 2.0)]


def test_the_table_of_the_readme_is_that_of_the_stored_results():
    text = documents.README.read_text(encoding="utf-8")
    assert documents.replace_table(text, "measured", documents.measured(results.read())) == text


def test_every_row_of_the_readme_whose_benchmark_is_stored_shows_its_results():
    stored = results.read()
    rows = [row.what for row in results.ROWS if row.benchmark in stored]
    assert [row.what for row in results.readme_rows(stored)] == rows


def test_the_readme_has_the_dates_of_its_own_tables(monkeypatch):
    row = results.Row("planning", "joint_plan", results.Metric("Llama", "{} s", ".0f"))
    monkeypatch.setattr(results, "ROWS", (row,))
    dates = {"Llama on 8 ranks": "2026-02-03", "Llama on 16 ranks": "2026-03-04", "GPT": "2026-01-02"}
    tables = tuple(Table(title, ("what",), [Line(("a",), 1.0, 2.0)], date) for title, date in dates.items())
    text = documents.measured({"joint_plan": results.Run("2 CPU cores", 1.0, tables)})
    assert text.startswith("On 2 CPU cores, 2026-02-03 to 2026-03-04. ")


def test_cpu_seconds_are_those_of_the_fastest_call():
    sizes = iter([200_000, 1, 200_000])
    assert cpu_seconds(lambda: sum(range(next(sizes))), repeats=3) < 0.001


def test_growth_and_speed_are_measured_for_every_schedule(capsys):
    planning.growth(ranks=2, microbatches=(4, 8), times=1).show()
    planning.speed(ranks=2, microbatches=4, times=1).show()
    shown = capsys.readouterr().out
    assert all(len(re.findall(rf"^  {name} .*(PASS|FAIL)$", shown, re.MULTILINE)) == 2 for name in SCHEDULES)


def test_a_rank_sync_is_measured_beside_an_all_gather():
    pytest.importorskip("torch")
    (line,) = rank_sync.costs((2,), rounds=1, times=2).lines
    assert line.cells[0] == "2 ranks"
    assert line.value > 0


def test_every_schedule_that_torch_has_is_measured_beside_it():
    pytest.importorskip("torch")
    lines = list(planning.against_torch(2, 4, at_least=10.0, times=1).lines)
    assert [line.cells[0] for line in lines] == list(planning.IN_TORCH)
    assert all(line.value > 0 for line in lines)


@pytest.mark.whole
def test_planning_is_measured_in_new_processes():
    call, with_imports = planning.cold(2, 4, times=1).lines
    assert [call.cells[0], with_imports.cells[0]] == ["the call", "with imports"]
    assert 0 < float(call.cells[1]) < float(with_imports.cells[1])


def test_the_benchmark_of_capture_measures_recording_and_replay():
    (recorded,), (replayed,) = capture.recording(2, 16, 1).lines, capture.replaying(2, 16, 1).lines
    assert recorded.value > 0
    assert 0 < replayed.value < 100


@pytest.mark.whole
def test_the_benchmark_of_measuring_compares_the_sum_of_nodes_with_the_step():
    models = {name: lambda build=build: build(16) for name, build in measure.MODELS.items() if name != "T5"}
    lines = list(measure.sums(models, iterations=1).lines)
    assert [line.cells[0] for line in lines] == list(models)
    assert all(float(cell) > 0 for line in lines for cell in line.cells[1:5])
    (again,) = measure.cached(lambda: measure.mlp(16)).lines
    assert again.value > 0


def test_the_benchmark_of_partitioners_compares_them_with_their_bounds():
    (line,) = partition.speed(nodes=50, stages=4, times=1).lines
    assert 0 < line.value < 1000
    assert all(line.passes for table in (partition.several_per_rank(), partition.mixed()) for line in table.lines)


@pytest.mark.skipif(not partition.DATA.exists(), reason="the measured graphs are not here")
def test_the_benchmark_of_partitioners_reads_published_measurements():
    assert [line.passes for line in partition.measured(("vgg16",)).lines] == [True, True]
    assert [line.passes for line in partition.fewest_bytes(("vgg16",)).lines] == [True, True]
    assert [line.passes for line in partition.known_optima({"bert24_inference": 17.7899}).lines] == [True]


def test_the_benchmark_of_the_split_backward_measures_both_sides():
    (line,) = backward.parts([(8, 2, 1.2)], seconds=0.0).lines
    assert line.cells[0] == "2 x 8"
    assert all(float(cell) > 0 for cell in line.cells[1:])
    assert [line.cells[0] for line in backward.growth((1, 2), 8, seconds=0.0).lines] == ["penstock", "torch"]


def test_the_benchmark_of_failed_ranks_measures_the_time_until_all_stop():
    assert [float(line.cells[1]) > 0 for line in rank_failure.ends(repetitions=1).lines] == [True, True]
    assert [float(line.cells[1]) > 0 for line in rank_failure.entries(repetitions=1).lines] == [True]


def test_sleeping_stages_are_measured_beside_torch_and_their_simulation():
    lines = list(runtime_sleep.sleeping(runtime_sleep.Setting(2, 2, 0.001, 1.05, 1), ("zbv",)).lines)
    assert [line.cells[5] for line in lines] == ["simulated", "as alone", "torch", "CPU, shared", "CPU, gloo"]
    assert all(line.value > 0 for line in lines[:3])
    assert [line.row[-2] for line in lines] == ["<= 1.05", "none", "<= 1", "<= 0.5", "<= 0.9"]


def test_steps_without_a_flush_are_measured_beside_steps_with_one(monkeypatch):
    monkeypatch.setattr(asynchronous, "STALENESS", ("2bw",))
    lines = list(asynchronous.without_flushes(asynchronous.Setting(2, 2, 2, 0.001, 1)).lines)
    assert [(line.cells[0], line.cells[6]) for line in lines] == [
        ("flushed", "simulated"),
        ("2bw", "simulated"),
        ("2bw", "flushed"),
    ]
    assert all(line.value > 0 for line in lines)


def test_recording_is_measured_against_steps_without_it():
    (line,) = runtime_sleep.recording(runtime_sleep.Setting(2, 2, 0.001, 1.05, 1), ("1f1b",)).lines
    assert 0 < line.value < 100


def test_a_gpt_is_trained_by_two_pipelines_and_one_process():
    sizes = Sizes(layers=2, width=8, heads=2, vocabulary=16, length=4, samples=2, microbatches=2)
    lines = list(runtime_compute.throughput(sizes, 1, ("1f1b",)).lines)
    assert [line.cells[7] for line in lines] == ["torch", "one process", "limit", "torch"]
    assert all(line.value > 0 for line in lines)


def test_a_rank_holds_just_the_bytes_that_were_simulated():
    lines = list(runtime_memory.activations(2, 4, ("zb_h1",)).lines)
    assert [line.value for line in lines] == [0, 0]


def test_receive_buffers_exist_for_the_microbatches_in_flight_only():
    lines = list(runtime_memory.receive_buffers(2, 8).lines)
    assert all(line.value < 0.5 for line in lines)


@pytest.mark.whole
def test_synthesised_orders_are_compared_with_the_solver_the_bound_and_named_schedules():
    pytest.importorskip("ortools")
    assert [line.value for line in synthesis.certified(count=4).lines] == [0, 0]
    share, worst = synthesis.optimal(count=2, budget_seconds=0.3).lines
    assert 0 <= share.value <= 1 <= worst.value
    assert all(line.value > 0 for line in synthesis.near_the_bound(2, 4, budget_seconds=0.1).lines)
    assert len(list(synthesis.against_named(2, 4, budget_seconds=0.1).lines)) == 6


@pytest.mark.skipif(not synthesis.GOLDEN.exists(), reason="the published figures are not here")
def test_synthesised_orders_are_compared_with_published_rates():
    line = next(iter(synthesis.published(budget_seconds=0.2).lines))
    assert line.cells[0] == "8 x 24"


def test_a_searched_plan_is_compared_with_an_even_division():
    even, linear, auto = joint_plan.heavy_head(8, 2.0, 2, 4, budget_seconds=0.2).lines
    assert auto.value <= linear.value <= even.value


@pytest.mark.whole
def test_predictions_are_compared_with_steps():
    pytest.importorskip("torch")
    tiny = Sizes(layers=2, width=16, heads=2, vocabulary=16, length=8, samples=4, microbatches=2)
    (line,) = prediction.computing(tiny, times=1, names=("1f1b",)).lines
    assert line.cells[0] == "1f1b"
    assert len(list(prediction.against_torch(8, 2, 2, unit=0.0005, times=1, budget_seconds=0.5).lines)) >= 5


@pytest.mark.whole
def test_steps_of_replicas_on_two_hosts_are_compared_with_their_simulation():
    task = overlap.Task("one", stages_per_rank=2, microbatches=2, unit=0.005, stage_bytes=4000, steps=1)
    (line,) = overlap.replicas((task,)).lines
    if line.cells[0].startswith("not here"):
        pytest.skip(line.cells[0])
    assert line.cells[5] == "simulated"
    assert 0 < line.value < 100


def test_a_save_is_measured_while_ranks_wait_and_beside_their_steps():
    sizes = Sizes(layers=2, width=8, heads=2, vocabulary=16, length=4, samples=2, microbatches=2)
    lines = list(saving.lost(sizes, every=1, rounds=1).lines)
    assert [line.cells[0] for line in lines] == ["synchronous", "asynchronous"]
    assert lines[0].value > 0


@pytest.mark.whole
def test_the_gain_of_a_split_output_layer_is_predicted_and_measured():
    sizes = Sizes(layers=2, width=8, heads=2, vocabulary=64, length=4, samples=2, microbatches=2)
    lines = list(vocabulary.computing(sizes, times=1, budget_seconds=0.2).lines)
    assert [line.cells[0] for line in lines] == ["predicted", "measured", "error"]
    assert all(line.value > 0 for line in lines)


@pytest.mark.whole
def test_a_slow_rank_is_detected(capsys):
    setting = slow_ranks.Setting(ranks=2, microbatches=2, unit=0.001, clean=2)
    slow_ranks.delays(setting, factors=(4.0,)).show()
    assert re.search(r"^  4 times .*(PASS|FAIL)$", capsys.readouterr().out, re.MULTILINE)


def test_results_equal_their_record_until_a_value_changes(tmp_path, capsys):
    path = tmp_path / "reference.json"
    assert reference.main(["--write", str(path), "--only", "skip_connections"]) == 0
    assert reference.main(["--against", str(path), "--only", "skip_connections"]) == 0
    record = json.loads(path.read_text())
    record["skip_connections"]["gpipe, 2 ranks"]["makespan"] = "1.0"
    path.write_text(json.dumps(record))
    capsys.readouterr()
    assert reference.main(["--against", str(path), "--only", "skip_connections"]) == 1
    assert "skip_connections / gpipe, 2 ranks / makespan: was '1.0', is" in capsys.readouterr().out


def test_the_functions_of_a_step_are_counted():
    calls = walk.count_calls(walk.penstock_step(), Path(walk.penstock.__file__).parent)
    assert calls[walk.penstock.Pipeline.step.__code__] == 1


def test_published_iterations_are_predicted_from_configuration():
    rows = {each.name: each for each in literature.PAPERS["Korthikanti et al., table 5"]}
    small = rows["22B"]
    rate = small.rate
    assert 1e14 < rate < 2.72e14  # the range that large matrix products reach on an A100
    assert small.predicted(rate) == pytest.approx(small.seconds, rel=1e-3)
    assert rows["22B, full"].predicted(rate) == pytest.approx(rows["22B, full"].seconds, rel=0.05)
    scaled = literature.PAPERS["Narayanan et al., table 2"][0]
    assert scaled.parameters == pytest.approx(174.6e9, rel=0.01)
    assert scaled.gpus == 384


def test_published_pass_times_predict_the_iteration(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "DATA", tmp_path)
    assert list(published.given()) == []
    text = "name,iteration_ms,forward_us,backward_us\nsmall,387,1000 1000,2000 2000\n"
    (tmp_path / "times.csv").write_text(text)
    (row,) = published.given()
    assert row.error == pytest.approx(0.0, abs=1e-9)
    assert "| small | 0.387 s | 0.387 s | +0.0% |" in published.table_of(iter([row]))


def test_the_files_of_a_soak_that_failed_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training = SimpleNamespace(directory=tmp_path / "one", wait_for_steps=lambda *_: None)
    reference = SimpleNamespace(directory=tmp_path / "other", losses=[1.0])
    for each in (training, reference):
        (each.directory / "scratch").mkdir(parents=True)
        (each.directory / "errors.txt").write_text("a word")
    training.stop = lambda: (_ for _ in ()).throw(RuntimeError("it does not stop"))
    monkeypatch.setattr(soak, "_pair", lambda: nullcontext((training, reference)))
    with pytest.raises(RuntimeError, match="it does not stop"):
        soak.soak(seconds=0.0)
    assert (soak.LOG / "disturbed" / "errors.txt").read_text() == "a word"
    assert {path.name for path in soak.LOG.iterdir()} == {"disturbed", "undisturbed", "faults.txt"}
    assert not (soak.LOG / "undisturbed" / "scratch").exists()


def test_a_published_layout_is_compared_with_the_best_prediction():
    shape = layouts.Shape("gpt", 4, 64, 4, 16, 64)
    given = layouts.layout_of(4, 8, tensor=1, ranks=2, depth=1)
    row = layouts.compare(layouts.Published("a paper", "tiny", "a100", shape, given, 1.0))
    assert row.best.makespan <= row.layout.makespan
    assert row.slower == row.layout.makespan / row.best.makespan - 1
    assert row.published_mfu == pytest.approx(row.layout.mfu * row.layout.makespan)


def test_the_tables_of_a_page_are_replaced_between_their_comments():
    page = "before\n\n<!-- begin given -->\n\n| old |\n\n<!-- end given -->\n\nafter\n"
    assert documents.replace_table(page, "given", "| new |") == page.replace("old", "new")
    with pytest.raises(ValueError, match="must have one table ahead, got 0"):
        documents.replace_table(page, "ahead", "| new |")
    for name, (path, _) in documents.TABLES.items():
        assert path.read_text().count(f"<!-- begin {name} -->") == 1


def test_ranks_in_the_same_order_are_correlated():
    assert layouts.rank_correlation([(1, 2), (2, 4), (3, 9)]) == pytest.approx(1.0)
    assert layouts.rank_correlation([(1, 9), (2, 4), (3, 2)]) == pytest.approx(-1.0)
