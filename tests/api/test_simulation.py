"""schedule, lower, verify and simulate, called as the documentation of the public surface writes them."""

import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import errors
from penstock.errors import CostError, FormatError, PenstockError, ScheduleError
from penstock.planner import synthesise

COSTS = penstock.StageCosts(
    forward=(1.0, 1.0, 1.0, 1.0),
    input_grad=(1.0, 1.0, 1.0, 1.0),
    weight_grad=(1.0, 1.0, 1.0, 1.0),
    activation_bytes=(2**30,) * 4,
)
NAMES = "gpipe 1f1b interleaved looped_bfs zb_h1 zb_h2 interleaved_zb zbv v_half v_min dualpipe_v"
OTHER_NAMES = "interleaved1f1b interleavedzerobubble zbvzerobubble dualpipev loopedbfs"


@pytest.mark.parametrize("name", f"{NAMES} {OTHER_NAMES}".split())
def test_from_a_name_to_a_trace_in_four_calls(name):
    sched = penstock.schedule(name, 4, 8)
    program = penstock.lower(sched)
    assert penstock.verify(sched) is penstock.verify(program) is None
    trace = penstock.simulate(program)
    assert 0 < trace.bubble < 1
    assert trace == penstock.simulate(sched)


def test_a_schedule_shows_its_orders_sizes_and_placement():
    sched = penstock.schedule("zbv", 4, 8, stages_per_rank=2)
    assert (sched.num_ranks, sched.num_microbatches) == (4, 8)
    assert [sched.placement[stage] for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert " ".join(map(str, sched.orders[3][:8])) == "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3"
    assert isinstance(sched.orders, tuple)
    assert str(penstock.schedule("zb_h1", 2, 4).orders[1][1]) == "1I0"


def test_all_options_but_the_sizes_are_given_by_name():
    with pytest.raises(TypeError, match="positional arguments"):
        penstock.schedule("1f1b", 4, 8, 1)
    with pytest.raises(TypeError, match="positional argument"):
        penstock.lower(penstock.schedule("1f1b", 4, 8), ("add_transfers",))


def test_a_schedule_goes_to_csv_and_back(tmp_path):
    sched = penstock.schedule("dualpipe_v", 3, 7)
    assert penstock.Schedule.from_csv(sched.to_csv()) == sched
    sched.to_csv(tmp_path / "orders.csv")
    assert penstock.Schedule.from_csv(tmp_path / "orders.csv") == sched
    assert penstock.Schedule.from_csv(str(tmp_path / "orders.csv")) == sched


def test_a_program_goes_to_csv_and_back_with_its_communication(tmp_path):
    program = penstock.lower(penstock.schedule("interleaved", 3, 6))
    assert "SEND_F" in program.to_csv(tmp_path / "program.csv")
    assert penstock.Program.from_csv(tmp_path / "program.csv") == program


def test_lowering_takes_cuts_and_passes():
    cuts = penstock.Cuts.of(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    sched = penstock.schedule("1f1b", 4, 4)
    program = penstock.lower(sched, cuts=cuts, passes=("add_transfers", "add_shard_moves"))
    text = str(program)
    assert "0SEND_F0>3" in text
    assert "2UNSHARD" in text
    assert "FREE" not in text
    penstock.verify(program)


def test_lowering_leaves_the_schedule_as_it_was():
    sched, same = penstock.schedule("zbv", 2, 3), penstock.schedule("zbv", 2, 3)
    penstock.lower(sched)
    assert sched == same


def test_a_trace_has_both_measures_of_length_bubbles_peaks_and_spans():
    trace = penstock.simulate(penstock.schedule("zb_h2", 4, 8), COSTS, penstock.Cluster(4))
    assert (trace.makespan, trace.span) == (27.0, 24.0)
    assert (trace.bubble, trace.span_bubble) == (pytest.approx(1 - 96 / (4 * 27)), 0.0)
    assert trace.peak_bytes(0) == 7 * 2**30
    rank, action, start, end = trace.spans[0]
    assert (rank, str(action), start, end) == (0, "0F0", 0.0, 1.0)


def test_costs_and_links_change_the_prediction():
    sched = penstock.schedule("1f1b", 4, 8)
    plain = penstock.simulate(sched)
    assert penstock.simulate(sched, penstock.StageCosts.uniform(4, forward=2.0)).makespan > plain.makespan
    assert penstock.simulate(sched, cluster=penstock.Cluster(4, latency=0.5)).makespan > plain.makespan


def test_uniform_costs_make_a_full_backward_of_its_two_halves():
    assert penstock.StageCosts.uniform(3, input_grad=2.0, weight_grad=1.5).backward == (3.5, 3.5, 3.5)


def test_a_cluster_has_memory_and_links_by_rank():
    cluster = penstock.Cluster(2, memory="24GiB", latency=1e-5, bandwidth=1e9, links=(penstock.Link(0, 1, 1e-3, 1e6),))
    assert cluster.memory == (24 * 2**30,) * 2
    assert (cluster.link(0, 1).latency, cluster.link(1, 0).latency) == (1e-3, 1e-5)


def test_measured_costs_reach_the_schedule():
    costs = penstock.StageCosts((3, 1), (1, 1), (1, 2))
    plain, measured = penstock.schedule("zb_h1", 2, 3), penstock.schedule("zb_h1", 2, 3, costs=costs)
    assert penstock.simulate(measured, costs).makespan < penstock.simulate(plain, costs).makespan


def test_a_schedule_that_keeps_the_memory_limit_is_given():
    limited = penstock.schedule("1f1b", 4, 8, costs=COSTS, memory="4GiB")
    assert limited == penstock.schedule("1f1b", 4, 8)
    assert penstock.schedule("1f1b", 4, 8, costs=COSTS, memory=4 * 2**30) == limited


def test_a_schedule_that_breaks_the_memory_limit_is_refused_with_rank_and_bytes():
    with pytest.raises(ScheduleError) as refused:
        penstock.schedule("gpipe", 4, 8, costs=COSTS, memory="4GiB")
    assert str(refused.value).splitlines() == [
        "the schedule does not fit in memory (rank: 0, peak bytes: 8589934592, limit: 4294967296)",
        "try: v_half or v_min, which hold fewer activations, or more microbatches of smaller size",
    ]


def test_a_memory_limit_without_costs_is_refused_with_the_way_out():
    with pytest.raises(ScheduleError, match=r"(?s)a memory limit needs costs.*try: costs=StageCosts"):
        penstock.schedule("gpipe", 4, 8, memory="4GiB")


def test_a_memory_limit_with_costs_that_hold_no_bytes_is_refused():
    with pytest.raises(ScheduleError, match=r"(?s)a memory limit needs bytes.*try: costs with activation_bytes"):
        penstock.schedule("gpipe", 4, 8, costs=penstock.StageCosts.uniform(4), memory="4GiB")


@pytest.mark.parametrize("memory", ["lots", 0, -1, "4 parsecs", 1.5, True])
def test_a_memory_limit_that_is_no_size_is_refused(memory):
    with pytest.raises(CostError, match="not a size in bytes"):
        penstock.schedule("gpipe", 4, 8, costs=COSTS, memory=memory)


def test_verify_holds_a_schedule_to_the_stated_number_in_flight():
    sched = penstock.schedule("1f1b", 4, 8)
    penstock.verify(sched, in_flight=4)
    with pytest.raises(ScheduleError, match=r"more microbatches in flight than allowed .* most: 4, limit: 3"):
        penstock.verify(sched, in_flight=3)


def test_verify_names_the_actions_that_block_each_other():
    stuck = penstock.Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1")
    with pytest.raises(ScheduleError, match=r"(?s)deadlock: rank 0 -> rank 1.*0B0.*1B0.*1F1.*0F1"):
        penstock.verify(stuck)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: penstock.schedule("1f2b", 4, 8),
        lambda: penstock.schedule("1f1b", 0, 8),
        lambda: penstock.schedule("1f1b", 4, 8, stages_per_rank=2),
        lambda: penstock.lower(penstock.schedule("1f1b", 4, 8), passes=("add_magic",)),
        lambda: penstock.lower(penstock.schedule("1f1b", 4, 8), passes=("add_frees",)),
        lambda: penstock.lower(penstock.schedule("1f1b", 4, 8), cuts=penstock.Cuts.chain(3)),
        lambda: penstock.simulate(penstock.schedule("1f1b", 4, 8), penstock.StageCosts.uniform(5)),
        lambda: penstock.Schedule.from_csv("0F0,0X0"),
        lambda: penstock.Schedule.from_csv("/no/such/file.csv"),
        lambda: penstock.Cluster(0),
    ],
)
def test_a_users_mistake_is_one_family_of_errors(mistake):
    with pytest.raises(PenstockError) as refused:
        mistake()
    assert isinstance(refused.value, ValueError)


def test_a_bad_cell_is_refused_with_its_place():
    with pytest.raises(FormatError, match=r"row: 2, column: 3, cell: '1F1!'"):
        penstock.Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1!,1B1")


def test_the_public_names_are_those_that_are_there():
    assert all(hasattr(penstock, name) for name in penstock.__all__)
    assert {"schedule", "lower", "simulate", "verify", "Schedule", "StageCosts", "Cluster"} <= set(penstock.__all__)


def test_every_error_is_a_public_name():
    classes = {name for name, value in vars(errors).items() if getattr(value, "__module__", None) == errors.__name__}
    assert classes
    assert classes <= set(penstock.__all__)
    assert penstock.ScheduleError is ScheduleError


@pytest.mark.parametrize("subject", [None, "1f1b"])
def test_only_a_program_or_a_schedule_is_simulated(subject):
    with pytest.raises(ScheduleError, match=r"program must be a Plan, a Program or a Schedule \(got: (NoneType|str)\)"):
        penstock.simulate(subject)


def test_planning_needs_no_torch():
    script = "import sys, penstock; penstock.simulate(penstock.schedule('zbv', 4, 8)); print('torch' in sys.modules)"
    repository = Path(penstock.__file__).parents[1]
    result = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


UNEVEN = penstock.StageCosts((1, 3, 2, 2), (2, 2, 3, 1), (1, 2, 1, 2), activation_bytes=(1, 1, 1, 1))


def test_auto_is_an_order_made_for_the_costs():
    made = penstock.schedule("auto", 4, 8, costs=UNEVEN)
    penstock.verify(made)
    named = [penstock.schedule(name, 4, 8, costs=UNEVEN) for name in ("1f1b", "zb_h1", "zb_h2", "gpipe")]
    best = min(penstock.simulate(one, UNEVEN).makespan for one in named)
    assert penstock.simulate(made, UNEVEN).makespan <= best


def test_auto_keeps_the_memory_limit(monkeypatch):
    monkeypatch.setitem(synthesise.__kwdefaults__, "budget_seconds", 0.5)
    trace = penstock.simulate(penstock.schedule("auto", 4, 8, costs=UNEVEN, memory=2), UNEVEN)
    assert max(trace.peak_bytes(rank) for rank in range(4)) <= 2


def test_auto_with_two_stages_per_rank_takes_loop_or_vee_whichever_is_shorter():
    made = penstock.schedule("auto", 2, 4, costs=UNEVEN)
    assert made.num_stages == 4
    assert (
        penstock.simulate(made, UNEVEN).makespan
        <= penstock.simulate(penstock.schedule("zbv", 2, 4, costs=UNEVEN), UNEVEN).makespan
    )


def test_auto_without_costs_takes_passes_of_equal_length():
    assert penstock.schedule("auto", 3, 6).num_stages == 3


def test_auto_for_costs_of_other_stages_is_refused():
    with pytest.raises(penstock.ScheduleError, match="stages of the costs"):
        penstock.schedule("auto", 3, 6, costs=UNEVEN)
    with pytest.raises(penstock.ScheduleError, match="needs bytes"):
        penstock.schedule("auto", 2, 6, memory=100)


@pytest.mark.parametrize(
    "options", [{"stages_per_rank": 0}, {"stages_per_rank": 10**9}, {"stages_per_rank": "2"}, {"costs": 5}]
)
def test_auto_is_refused_without_a_number_of_stages_or_costs(options):
    with pytest.raises(ScheduleError, match="try: "):
        penstock.schedule("auto", 2, 4, **options)
