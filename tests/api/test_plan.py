"""plan: from a model and a batch to a Plan, and the errors of wrong calls."""

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CaptureError, PartitionError, PlanError, RunError, ScheduleError

MODEL = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)])
X = torch.randn(8, 8)


def plan(**changed):
    return penstock.plan(MODEL, (X,), **{"ranks": 2, "microbatches": 4, "schedule": "1f1b", **changed})


def test_the_graph_is_that_of_one_microbatch():
    assert plan().graph.inputs[0].spec.shape == (2, 8)


def test_a_plan_is_saved_loaded_and_trained(tmp_path):
    plan(schedule="zbv").save(tmp_path / "plan.json")
    loaded = penstock.Plan.load(tmp_path / "plan.json")
    pipe = penstock.Pipeline(MODEL, loaded, loss_fn=nn.functional.mse_loss, local=True)
    assert pipe.step(X, target=X).loss > 0


def test_a_schedule_may_come_from_a_csv(tmp_path):
    path = tmp_path / "order.csv"
    penstock.schedule("gpipe", 2, 4).to_csv(path)
    assert plan(schedule=path).schedule == penstock.schedule("gpipe", 2, 4)
    assert plan(schedule=str(path)).choices.schedule == "given"


def test_a_given_schedule_brings_its_microbatches():
    given = penstock.schedule("gpipe", 2, 3)
    assert penstock.plan(MODEL, (X,), ranks=2, schedule=given).num_microbatches == 3


def test_explicit_module_lists_are_the_stages():
    lists = [["0", "1", "2"], ["3", "4", "5", "6", "7"]]
    assert [len(nodes) for nodes in plan(partitioner=lists).partition.stages] == [3, 5]


def test_a_plan_is_simulated_with_its_own_costs():
    found = plan()
    assert penstock.simulate(found).makespan == found.predicted.makespan


class TwoHeads(nn.Module):
    """A loss, and an output of an early layer that is not part of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        """The loss, and what the first layer made."""
        first = self.layers[0](x)
        y = self.layers[3](self.layers[2](self.layers[1](first.detach())))
        return {"loss": y.square().mean(), "first": first}


def test_gradients_are_predicted_only_of_what_the_loss_is_made_of():
    def returned(**kwargs):
        lists = [["layers.0"], ["layers.1", "layers.2", "layers.3"]]
        made = penstock.plan(TwoHeads(), (X,), ranks=2, microbatches=4, schedule="1f1b", partitioner=lists, **kwargs)
        return sum(message.backward_bytes for message in made.costs.messages)

    assert returned() == 0
    assert returned(loss_fn=lambda output, target: output["loss"] + output["first"].mean()) == 2 * 8 * 4


def test_a_cluster_brings_its_memory():
    with pytest.raises(PlanError, match="no plan fits in memory"):
        plan(ranks=penstock.Cluster(2, memory=100))


def test_a_model_on_the_meta_device_is_planned_and_not_trained_before_it_has_numbers():
    model = nn.Sequential(*[nn.Linear(8, 8, device="meta") for _ in range(4)])
    made = penstock.plan(model, (X.to("meta"),), ranks=2, microbatches=2, schedule="gpipe")
    assert made.num_stages == 2
    pipe = penstock.Pipeline(model, made, loss_fn=nn.functional.mse_loss, local=True)
    with pytest.raises(RunError, match=r"its weights are not loaded yet(.*\n)*try: pipe\.load"):
        pipe.step(X, target=X)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"ranks": 0}, PlanError, "ranks must be a whole number"),
        ({"ranks": "two"}, PlanError, "ranks must be a whole number"),
        ({"microbatches": -1}, PlanError, "microbatches must be a whole number"),
        ({"microbatches": 2.5}, PlanError, "microbatches must be a whole number"),
        ({"schedule": "onef1b"}, ScheduleError, "1f1b"),
        ({"partitioner": "metiss"}, PartitionError, "unknown partitioner"),
        ({"recompute": True}, PlanError, "recompute must be"),
        ({"memory": "10 bananas"}, penstock.PenstockError, "bananas"),
        ({"microbatches": 10**9}, PlanError, "microbatches must be at most"),
        ({"profile": "x"}, PlanError, "profile must be a Profile"),
        ({"speed": "fast"}, PlanError, "speed must be a DeviceSpeed"),
        ({"loss_fn": nn.MSELoss}, RunError, "an instance"),
        ({"split": "x"}, RunError, "split must be a dict"),
        ({"kwargs": [1]}, PlanError, "kwargs must be a dict"),
    ],
)
def test_wrong_arguments_are_named(changed, error, words):
    with pytest.raises(error, match=words):
        plan(**changed)


def test_a_tensor_in_the_place_of_a_tuple_comes_with_the_way_out():
    with pytest.raises(PlanError, match=r"args must be a tuple(.|\n)*try: \(x,\)"):
        penstock.plan(MODEL, X, ranks=2, microbatches=4)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(PlanError, match=r"must be a torch.nn.Module \(got: function\)"):
        penstock.plan(lambda x: x, (X,), ranks=2, microbatches=4)


def test_a_model_whose_parameters_have_no_shape_yet_is_refused():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
    with pytest.raises(CaptureError, match=r"no shape before the first forward .*\ntry: call the model once"):
        penstock.plan(model, (torch.ones(4, 4),), ranks=2, microbatches=2)


def test_a_batch_that_the_model_does_not_take_is_refused():
    with pytest.raises((CaptureError, RunError)):
        penstock.plan(MODEL, (torch.randn(8, 5),), ranks=2, microbatches=4)
    with pytest.raises(CaptureError, match="cannot be called with this batch"):
        penstock.plan(MODEL, (X, X), ranks=2, microbatches=4)


def test_the_plan_of_another_model_is_refused_before_training():
    other = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(7)], nn.Linear(8, 9))
    with pytest.raises(PlanError, match="the plan is for another model"):
        penstock.Pipeline(other, plan(), loss_fn=nn.functional.mse_loss, local=True)


class Targeted(nn.Module):
    """A model that wants the target itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, target=None):
        """A loss, or the output."""
        for layer in self.layers:
            x = layer(x)
        return x if target is None else nn.functional.mse_loss(x, target)


def test_a_forward_that_takes_the_target_is_given_it():
    model = Targeted()
    made = penstock.plan(model, (X, X), ranks=2, microbatches=4, schedule="1f1b")
    pipe = penstock.Pipeline(model, made, local=True)
    torch.testing.assert_close(pipe.step(X, target=X).loss, model(X, X).detach())


def test_a_loss_function_beside_a_forward_that_takes_the_target_is_ambiguous():
    model = Targeted()
    made = penstock.plan(model, (X, X), ranks=2, microbatches=4, schedule="1f1b")
    with pytest.raises(RunError, match="both a loss_fn and the model's forward take the target"):
        penstock.Pipeline(model, made, loss_fn=nn.functional.mse_loss, local=True)


def layout_sizes(speed):
    """The samples of a microbatch in the chosen layout of four devices, and those of all layouts."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    # No larger size is tried once most of the budget is spent, which a busy machine must not decide.
    asked = {"schedule": "1f1b", "stages_per_rank": 1, "budget_seconds": 120.0}
    layouts = penstock.plan(model, (torch.randn(256, 64),), devices=4, speed=speed, **asked).search.layouts
    return layouts[0].samples, {each.samples for each in layouts}


def test_larger_microbatches_are_tried_as_long_as_they_are_faster_per_sample():
    assert layout_sizes(penstock.DeviceSpeed(1e15, 1e15, operation_seconds=1e-3)) == (64, {1, 2, 4, 16, 64})
    assert layout_sizes(penstock.DeviceSpeed(1e6, 1e15))[1] == {1, 2, 4}
