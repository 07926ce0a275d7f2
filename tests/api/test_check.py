"""check: the proof on a user's own model, and its report when something is wrong."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock
from tests.plans import quick_plan

X, Y = torch.randn(10, 8, dtype=torch.float64), torch.randn(10, 8, dtype=torch.float64)


def chain(*extra):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), *(make() for make in extra), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).double()


def checked(model, schedule="1f1b", **kwargs):
    plan = quick_plan(model, (X,), ranks=2, microbatches=4, schedule=schedule)
    return penstock.check(model, plan, (X,), loss_fn=functional.mse_loss, target=Y, **kwargs)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_an_ordinary_model_equals_the_loop_and_the_whole_batch(schedule):
    report = checked(chain(), schedule)
    assert report.ok
    assert report.loop.is_identical
    assert report.whole.ok
    assert str(report).startswith("the pipeline matches the unsplit model")


def test_batch_norm_is_compared_with_the_loop_only_and_named():
    report = checked(chain(lambda: nn.BatchNorm1d(8)))
    assert report.ok
    assert report.whole is None
    assert "batch norm takes its statistics from each microbatch" in str(report)
    assert any(one.name == "buffer 0.1.running_mean" for one in report.loop.differences)


class CheckpointedNorm(nn.Module):
    """Runs a linear layer and batch norm again in backward, which updates the running statistics twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def test_buffers_that_the_backward_updates_are_not_compared():
    report = checked(nn.Sequential(*(CheckpointedNorm() for _ in range(4))))
    assert report.ok
    assert "the backward updates 12 buffers (0.layers.1.num_batches_tracked)" in str(report)
    assert not any("running_mean" in one.name for one in report.loop.differences)


class Logarithm(nn.Module):
    """Replaces a buffer by its logarithm: by a finite number in forward, and by NaN when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x):
        self.level.log_()
        return x


class CheckpointedLogarithm(nn.Module):
    """Runs the logarithm and a linear layer again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Logarithm(), nn.Linear(8, 8)).double()

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:the forward uses buffers")
def test_a_buffer_that_becomes_nan_in_the_backward_is_not_compared():
    report = checked(nn.Sequential(*(CheckpointedLogarithm() for _ in range(4))))
    assert "the backward updates 4 buffers (0.layers.0.level)" in str(report)


class Checkpointed(nn.Module):
    """Blocks with dropout, each of which a checkpoint runs again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.use_reentrant = nn.ModuleList(chain(lambda: nn.Dropout(0.3))), use_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_block_that_a_checkpoint_runs_again_draws_the_same_numbers(use_reentrant, depth):
    model, batch = Checkpointed(use_reentrant), (X.clone().requires_grad_(),)
    plan = quick_plan(model, batch, ranks=2, microbatches=2, schedule="1f1b", depth=depth)
    report = penstock.check(model, plan, batch, loss_fn=functional.mse_loss, target=Y)
    assert report.loop.is_identical
    assert "draws random numbers" in str(report)


class Differentiating(nn.Module):
    def forward(self, x):
        return torch.func.grad(lambda y: y.sin().sum())(x)


def test_a_block_with_dropout_that_takes_gradients_in_its_forward_is_compared():
    report = checked(chain(lambda: nn.Dropout(0.5), Differentiating))
    assert report.ok
    assert "draws random numbers" in str(report)


def test_dropout_is_compared_block_by_block():
    report = checked(chain(lambda: nn.Dropout(0.5)))
    assert report.ok
    assert "draws random numbers" in str(report)


def test_a_loss_that_is_weighted_otherwise_is_not_ok_and_the_way_out_is_named():
    report = checked(chain(), reduction="sum")
    assert report.loop.ok
    assert not report.ok
    assert "try reduction=" in str(report)


def test_the_model_is_left_as_it_was():
    model = chain(lambda: nn.BatchNorm1d(8), lambda: nn.Dropout(0.1))
    model[0][0].weight.grad = torch.ones(8, 8, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    checked(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0][0].weight.grad, torch.ones(8, 8, dtype=torch.float64))
    assert model[1][0].weight.grad is None


LATER: list[str] = []
"""what goes wrong by now"""


class Turning(nn.Module):
    """A layer whose buffer or whose result is another one later."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """A layer."""
        self.calls += 2.0 if "buffer" in LATER else 1.0
        return torch.tanh(self.linear(x) * (1.5 if "gradient" in LATER else 1.0))


@pytest.mark.parametrize(
    ("what", "name"), [("buffer", "buffer 2.calls in stage 1"), ("gradient", "gradient of 0.0.weight in stage 0")]
)
def test_the_first_difference_is_named_by_stage_and_by_parameter_or_buffer(what, name, monkeypatch):
    """The layer turns once the pipeline has run."""
    model = chain()
    model[2] = Turning().double()
    original = penstock.Pipeline.step

    def step(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        LATER.append(what)
        return result

    monkeypatch.setattr(penstock.Pipeline, "step", step)
    report = checked(model)
    LATER.clear()
    assert not report.ok
    assert str(report).startswith("the pipeline is WRONG")
    assert f"first difference: {name}" in str(report.loop)


class Halved(nn.Module):
    """A layer that computes in half precision."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        """A layer."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + torch.tanh(self.linear(x))


def test_half_precision_inside_blocks_is_tolerated_and_reported():
    model = nn.Sequential(*[Halved() for _ in range(4)])
    plan = quick_plan(model, (X.float(),), ranks=2, microbatches=4, schedule="1f1b")
    report = penstock.check(model, plan, (X.float(),), loss_fn=functional.mse_loss, target=Y.float())
    assert report.ok
    assert report.loop.is_identical
    assert "the whole batch: equal up to the rounding of bfloat16, in which parts compute" in str(report)
    wrong = penstock.check(model, plan, (X.float(),), loss_fn=functional.mse_loss, target=Y.float(), reduction="sum")
    assert not wrong.ok


def test_a_buffer_that_counts_calls_is_compared_with_the_loop_only():
    model = chain()
    model[2] = Turning().double()
    report = checked(model)
    assert report.ok
    assert any(one.name == "buffer 2.calls" for one in report.loop.differences)
    assert not any(one.name == "buffer 2.calls" for one in report.whole.differences)


class CachingMask(nn.Module):
    """Makes a mask in its first forward, and keeps it as a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = chain()

    def forward(self, x):
        if "mask" not in self._buffers:
            self.register_buffer("mask", torch.ones(x.shape[1], dtype=x.dtype) / 2, persistent=False)
        return self.layers(x * self.mask)


def test_a_mask_that_the_first_forward_registers_as_a_buffer_is_not_compared():
    model = CachingMask()
    report = checked(model)
    assert report.ok
    assert report.whole.ok
    assert not any(one.name == "buffer mask" for one in report.loop.differences)
    assert not dict(model.named_buffers())


def test_a_loss_that_couples_samples_is_named_and_not_shown_as_a_warning():
    model = chain()
    plan = quick_plan(model, (X,), ranks=2, microbatches=4, schedule="1f1b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = penstock.check(model, plan, (X,), loss_fn=lambda y, t: (y - y.mean(0)).square().mean(), target=Y)
    assert report.ok
    assert report.whole is None
    assert "not a weighted sum of the losses of its microbatches" in report.notes[0]


def test_hooks_on_parameters_are_named_and_the_whole_batch_is_compared_all_the_same():
    model = chain()
    model[0][0].weight.register_hook(lambda gradient: gradient * 0.5)
    report = checked(model)
    assert report.ok
    assert report.whole.ok
    assert "hooks on parameters" in report.notes[0]
    model[0][0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    report = checked(model)
    assert report.loop.ok
    assert not report.ok


class TimeFirst(nn.Module):
    """A model whose batch is the second dimension."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        """Layers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_arguments_are_cut_along_the_dimension_that_is_given():
    x = torch.randn(3, 10, 8, dtype=torch.float64)
    model, split = TimeFirst().double(), {"x": 1, "target": 1}
    plan = quick_plan(model, (x,), ranks=2, microbatches=4, schedule="1f1b", split={"x": 1})
    assert plan.graph.inputs[0].spec.shape == (3, 3, 8)
    report = penstock.check(model, plan, (x,), loss_fn=functional.mse_loss, target=x, split=split)
    assert report.ok
    assert report.whole.ok


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": len}, "model must be a torch.nn.Module"),
        ({"plan": "plan.json"}, "plan must be a Plan"),
        ({"args": X}, r"args must be a tuple(.|\n)*try: \(x,\)"),
        ({"kwargs": [1]}, "kwargs must be a dict"),
        ({"loss_fn": "mse"}, "loss_fn must be a function"),
        ({"reduction": "average"}, "reduction must be"),
        ({"split": {"z": 0}}, "split must name arguments"),
    ],
)
def test_wrong_arguments_are_named(changed, words):
    model = chain()
    plan = quick_plan(model, (X,), ranks=2, microbatches=4, schedule="1f1b")
    given = {"model": model, "plan": plan, "args": (X,), "kwargs": None, "loss_fn": functional.mse_loss, "target": Y}
    with pytest.raises(penstock.PenstockError, match=words):
        penstock.check(**{**given, **changed})


class Penalised(nn.Module):
    """A layer that adds to the loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        """A layer."""
        x = torch.tanh(self.linear(x))
        penstock.add_loss(0.1 * x.square().mean())
        return x


def test_added_losses_are_added_in_the_unsplit_model_too():
    assert checked(nn.Sequential(*[Penalised() for _ in range(4)]).double()).ok


class RoundsBySize(nn.Linear):
    """Rounds differently for larger batches, as kernels do."""

    def forward(self, x):
        if len(x) <= 4:
            return super().forward(x)
        return functional.linear(x.double(), self.weight.double()).float()


class Coupled(RoundsBySize):
    """Adds a hundredth of the mean over the samples."""

    def forward(self, x):
        return super().forward(x) + 1e-2 * x.mean(0)


def mean_square(output, target):
    return output.square().mean()


@pytest.mark.parametrize(("kind", "is_ok"), [(RoundsBySize, True), (Coupled, False)])
def test_rounding_errors_of_terms_that_cancel_are_told_from_samples_that_interact(kind, is_ok):
    torch.manual_seed(0)
    # The mean square behind a layer norm is always 1, so the gradients before it consist of rounding errors.
    model = nn.Sequential(nn.Linear(16, 16, bias=False), kind(16, 16, bias=False), nn.LayerNorm(16, eps=1e-12))
    x = torch.randn(8, 16)
    plan = quick_plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b")
    report = penstock.check(model, plan, (x,), loss_fn=mean_square)
    assert report.loop.ok
    assert report.whole.ok is is_ok
    assert report.whole.largest.relative > 1e-5


class RoundsLater(nn.Linear):
    """Rounds in another way, or computes another result, once the pipeline has run."""

    def forward(self, x):
        if "rounding" in LATER:
            return functional.linear(x.double(), self.weight.double()).float()
        return super().forward(x) * (1.001 if "result" in LATER else 1.0)


@pytest.mark.parametrize(("what", "is_ok"), [("rounding", True), ("result", False)])
def test_rounding_errors_of_terms_that_cancel_are_told_from_wrong_stages(what, is_ok, monkeypatch):
    torch.manual_seed(0)
    norm = nn.Sequential(RoundsLater(16, 16, bias=False), nn.LayerNorm(16, eps=1e-12))
    # For "rounding" the gradients before the norm are rounding errors only; for "result" the last layer has others.
    last = (RoundsLater(16, 16, bias=False),) if what == "result" else ()
    model = nn.Sequential(nn.Linear(16, 16, bias=False), norm, *last)
    x = torch.randn(8, 16)
    plan = quick_plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b")
    original = penstock.Pipeline.step

    def step(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        LATER.append(what)
        return result

    monkeypatch.setattr(penstock.Pipeline, "step", step)
    report = penstock.check(model, plan, (x,), loss_fn=mean_square)
    LATER.clear()
    assert report.loop.ok is is_ok
    assert report.loop.largest.relative > 1e-5


class ComplexRoundsBySize(nn.Linear):
    """A complex layer that rounds differently for more than four samples."""

    def forward(self, x):
        if len(x) <= 4:
            return super().forward(x)
        return functional.linear(x.to(torch.complex128), self.weight.to(torch.complex128)).to(torch.complex64)


class UnitNorm(nn.Module):
    """Divides every sample by its norm."""

    def forward(self, x):
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def test_rounding_errors_of_complex_weights_are_told_from_samples_that_interact():
    torch.manual_seed(0)
    options = {"bias": False, "dtype": torch.complex64}
    # The norm of the output is always 1, so all gradients consist of rounding errors.
    model = nn.Sequential(nn.Linear(16, 16, **options), ComplexRoundsBySize(16, 16, **options), UnitNorm())
    x = torch.randn(8, 16, dtype=torch.complex64)
    plan = quick_plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b")
    report = penstock.check(model, plan, (x,), loss_fn=lambda output, target: output.abs().square().mean())
    assert report.whole.largest.relative > 1e-5
    assert report.ok
