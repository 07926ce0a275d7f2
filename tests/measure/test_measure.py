"""measure: every node has a cost, the sum is the step's, and the model is as it was."""

import math
import time
from importlib import import_module

import pytest
import torch
from torch import nn

from penstock.ir import Profile, compute_stage_costs
from penstock.measure import estimate, measure
from penstock.measure.profiler import calibration
from penstock.measure.timing import Times
from penstock.partitioners import uniform
from tests.measure.subjects import WIDTH, Block, batch, chain, measured
from tests.measure.test_memory import SPEED


class SimulatedClock:
    """Seconds that pass only when a node says so, so that no other work on the machine disturbs them."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """The seconds that have passed."""
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock, timing = SimulatedClock(), import_module("penstock.measure.timing")
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "waited_seconds", lambda: 0.0)
    return clock


class Timed(nn.Module):
    """Takes so many seconds of a simulated clock."""

    def __init__(self, clock: SimulatedClock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x times one."""
        self.clock.now += self.seconds
        return x * 1.0


class Sleep(nn.Module):
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x times one."""
        time.sleep(self.seconds)
        return x * 1.0


def quick(model: nn.Module, *args: object) -> Profile:
    return measure(measured(model, *args), iterations=1)


def test_a_node_that_takes_four_times_as_long_is_found_to(clock):
    profile = quick(chain(Block(), Timed(clock, 0.03), Timed(clock, 0.12)))
    assert profile["2"].forward / profile["1"].forward == pytest.approx(4.0, rel=1e-3)
    assert profile["0"].forward < profile["1"].forward


def test_the_nodes_together_take_as_long_as_the_step():
    profile = quick(chain(Block(), Sleep(0.05), Block()))
    assert profile.seconds == pytest.approx(profile.step_seconds)
    # Half of it: on a busy machine some of the sleep counts as waiting for a core.
    assert profile.step_seconds > 0.025


def test_forwards_and_backwards_are_calibrated_each():
    assert calibration([Times(1.0, 4.0), Times(1.0, 6.0)], Times(3.0, 5.0)) == (1.5, 0.5)
    assert calibration([Times()], Times(3.0, 5.0)) == (1.0, 1.0)


@pytest.mark.parametrize(("ratio", "different"), [(math.inf, 1), (0.0, 7)])
def test_nodes_that_look_alike_share_their_cost_unless_samples_of_them_are_far_apart(monkeypatch, ratio, different):
    monkeypatch.setattr(import_module("penstock.measure.profiler"), "_MAX_RATIO", ratio)
    monkeypatch.setattr(import_module("penstock.measure.profiler"), "_MAX_DIFFERENCE_SECONDS", 0.0)
    costs = quick(chain(*(Block(number) for number in range(8)))).costs
    assert len({(cost.forward, cost.backward) for cost in costs[1:]}) == different


def test_a_node_that_looks_like_others_and_takes_longer_is_found(clock):
    slow, *others = (Timed(clock, 0.001) for _ in range(5))

    def forward(x):
        clock.now += 0.1
        return x * 1.0

    slow.forward = forward
    profile = quick(chain(slow, *others))
    assert profile["0"].forward > 3 * profile["4"].forward


def test_a_profile_fits_its_graph_and_any_cut_of_it():
    subject = measured(chain())
    costs = compute_stage_costs(subject.graph, measure(subject, iterations=1), uniform(subject.graph, 3))
    assert min(*costs.forward, *costs.backward, *costs.activation_bytes) > 0


def test_measured_memory_is_the_estimated_one():
    subject = measured(chain(Block(), nn.BatchNorm1d(WIDTH), Block()))
    timed, estimated = measure(subject, iterations=1), estimate(subject, SPEED)
    assert [cost.memory for cost in timed.costs] == [cost.memory for cost in estimated.costs]
    assert timed.held == estimated.held


class Differentiating(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) + torch.func.grad(lambda y: y.sin().sum())(x)


def test_a_block_that_takes_gradients_in_its_forward_is_measured():
    cost = quick(chain(Block(), Differentiating()))["1"]
    assert min(cost.forward, cost.backward, cost.input_grad) > 0.0


def test_a_model_without_parameters_has_no_backward():
    assert quick(chain(nn.ReLU(), nn.Tanh()))["1"].backward == 0.0


def test_the_model_is_left_as_it_was():
    model = chain(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    model(batch()).sum().backward()
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    generator = torch.get_rng_state()
    quick(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in model.parameters())))
    assert torch.equal(torch.get_rng_state(), generator)
    assert [model.training, model[2].training] == [True, False]


def test_no_optimizer_that_hangs_on_gradients_takes_a_step():
    model, steps = chain(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: steps.append(1))
    quick(model)
    model(batch()).sum().backward()
    assert len(steps) == len(list(model.parameters()))


def test_hooks_of_the_user_run_as_they_do_in_training():
    model, calls = chain(), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    quick(model)
    assert calls


def test_rounds_report_progress_and_end_with_the_budget():
    progress = []
    measure(measured(chain()), 50, budget_seconds=0.0, progress=lambda done, total: progress.append((done, total)))
    assert progress == [(1, 52), (2, 52), (3, 52)]
