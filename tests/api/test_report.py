"""report and its advice: what is shown was computed, and only what helps is advised."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

import penstock
from penstock.api.report import advise, contents_of, digest_of
from penstock.errors import ViewError
from penstock.ir import Cluster, Plan, Prediction, save_record
from tests.views.reports import MIB, contents, planned


@cache
def changes(plan: Plan) -> dict[str, float]:
    return {each.change: each.seconds for each in advise(plan)}


PLAN = planned("1f1b", 4, 8)


def limited(plan: Plan, size: int) -> Plan:
    return replace(plan, cluster=replace(plan.cluster, memory=size))


def test_a_report_is_returned_and_written(tmp_path) -> None:
    document = penstock.report(planned(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == document
    assert document.startswith("<!doctype html>")


def test_the_report_of_a_run_is_that_of_its_plan_with_what_was_measured() -> None:
    run = contents().run
    found = contents_of(run)
    assert (found.plan, found.run) == (run.plan, run)
    assert found.predicted == penstock.simulate(run.plan)
    assert found.predicted.makespan == run.plan.predicted.makespan


def test_the_digest_is_that_of_the_saved_plan(tmp_path) -> None:
    planned().save(tmp_path / "plan.json")
    assert digest_of(planned()) == hashlib.sha256((tmp_path / "plan.json").read_bytes()).hexdigest()
    assert digest_of(planned()) != digest_of(planned("gpipe"))


def test_a_report_needs_a_plan_or_a_run() -> None:
    with pytest.raises(ViewError, match=r"needs a plan or a run \(got: StageCosts\)"):
        penstock.report(planned().costs)


def test_a_schedule_with_less_idle_time_is_advised_with_what_it_would_take() -> None:
    order = penstock.schedule("zb_h1", 4, 8, costs=PLAN.costs)
    expected = penstock.simulate(penstock.lower(order, cuts=PLAN.cuts), PLAN.costs, PLAN.cluster).makespan
    assert changes(PLAN)["schedule zb_h1"] == expected


def test_an_order_that_was_searched_for_is_advised_only_if_no_name_does_as_well() -> None:
    assert "schedule auto" not in changes(PLAN)
    plan = planned("interleaved", 3, 6, 2)
    plan = replace(plan, costs=replace(plan.costs, forward=(0.01, 0.03, 0.01, 0.01, 0.02, 0.01)))
    found = changes(replace(plan, predicted=Prediction.of(penstock.simulate(plan), 0.05)))
    assert found["schedule auto"] < 0.995 * found["schedule interleaved_zb"]


def test_an_order_that_does_not_fit_is_not_advised() -> None:
    tight = limited(PLAN, 8 * MIB + 4 * MIB)  # the state, and as many microbatches as 1f1b has in flight
    assert "schedule zb_h1" in changes(tight)
    assert "schedule zb_h1" not in changes(limited(PLAN, 8 * MIB + 3 * MIB))


def test_no_change_is_advised_that_does_not_help() -> None:
    alone = planned("gpipe", 1, 4)
    assert set(changes(alone)) == set()


def test_gains_are_shares_of_the_predicted_step_and_the_largest_comes_first() -> None:
    found = advise(PLAN)
    assert [each.gain for each in found] == sorted((each.gain for each in found), reverse=True)
    assert all(each.gain == 1 - each.seconds / PLAN.predicted.makespan for each in found)


def test_microbatches_of_one_sample_are_not_halved() -> None:
    spec = replace(PLAN.graph.inputs[0].spec, shape=(1, 8))
    inputs = (replace(PLAN.graph.inputs[0], spec=spec),)
    whole = replace(PLAN, graph=replace(PLAN.graph, inputs=inputs))
    assert "16 microbatches" in changes(PLAN)
    assert "16 microbatches" not in changes(whole)


def test_links_that_take_no_time_are_not_to_blame() -> None:
    fast = replace(PLAN, cluster=Cluster(4, memory="64MiB"))
    assert "faster links" in changes(PLAN)
    assert "faster links" not in changes(fast)


def test_ranks_that_share_cores_are_noted() -> None:
    shared = replace(PLAN, cluster=replace(PLAN.cluster, cores=2))
    shared = replace(shared, predicted=Prediction.of(penstock.simulate(shared), 0.05))
    assert changes(shared)["a core for every rank"] == PLAN.predicted.makespan
    assert "a core for every rank" not in changes(PLAN)


def test_equal_ranks_have_nothing_to_gain_from_other_cuts() -> None:
    even = replace(PLAN, costs=penstock.StageCosts.uniform(4, 0.01, 0.01, 0.01))
    even = replace(even, predicted=Prediction.of(penstock.simulate(even), 0.05))
    assert "finer cuts" in changes(PLAN)
    assert "finer cuts" not in changes(even)


def test_a_report_is_made_without_torch(tmp_path) -> None:
    save_record(planned(), tmp_path / "plan.json")
    program = (
        "import sys, penstock; "
        f"penstock.report(penstock.Plan.load({str(tmp_path / 'plan.json')!r})); "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr
