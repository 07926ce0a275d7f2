"""The parameters of a loss module belong to the last stage: trained, clipped, saved and loaded with it."""

import warnings
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import penstock
from tests.parity import PIPELINES, Execution, Values, assert_close, copied, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import CLASSES, WIDTH, chain, noise, seeded, tokens

X, LABELS = noise(7, WIDTH), tokens(7, seed=1, below=CLASSES)
STEPS = 2


class Margin(nn.Module):
    """Class centres that are trained with the model, and a temperature."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.centres = nn.Linear(WIDTH, CLASSES, bias=False)
        self.temperature = nn.Parameter(torch.ones(()))
        self.model = model

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.centres(output) * self.temperature, target)


def margin(model: nn.Module | None = None) -> Margin:
    loss = Margin()
    seeded(loss, seed=3)
    loss.model = model
    return loss


def whole_values() -> Values:
    """Plain PyTorch: one optimizer and one norm over the parameters of the model and the loss."""
    model, loss_fn = chain(4), margin()
    both = nn.ModuleDict({"model": model, "loss_fn": loss_fn})
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9)
    found: Values = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model(X), LABELS)
        loss.backward()
        found |= {f"loss {step}": loss.detach(), f"norm {step}": nn.utils.clip_grad_norm_(both.parameters(), 0.1)}
        optimizer.step()
    return found | {name.replace(" model.", " "): value for name, value in values(both).items()}


def train(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Values:
    found: Values = {}
    for step in range(steps):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error", penstock.PenstockWarning)
            found[f"loss {step}"] = pipe.step(X, target=LABELS).loss
        found[f"norm {step}"] = pipe.clip_grad_norm_(0.1)
        optimizer.step()
    return copied(found | values(pipe))


def pipeline(execution: str, ranks: int = 2, **options: Any) -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
    model = chain(4)
    plan = quick_plan(model, (X,), ranks=ranks, microbatches=3, schedule="1f1b")
    options = {"loss_fn": margin(), "local": execution == "local", **options}
    pipe = penstock.Pipeline(model, plan, **options)
    return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)


def split_values(execution: str) -> list[Values]:
    return [train(*pipeline(execution))]


def resumed_values(directory: str, execution: str) -> list[Values]:
    """Save after the first step, and take the second with a pipeline that was loaded."""
    first = pipeline(execution)
    train(*first, steps=1)
    first[0].save(directory, first[1])
    pipe, optimizer = pipeline(execution)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    pipe.load(directory, optimizer)
    return [train(pipe, optimizer, steps=1)]


@pytest.mark.parametrize("execution", PIPELINES)
def test_they_are_trained_and_clipped_with_the_model(execution: str, pools: Pools) -> None:
    (found,) = Execution(execution, pools).run(split_values, 2)
    assert "gradient loss_fn.centres.weight" in found
    assert_close(found, whole_values())


@pytest.mark.parametrize("execution", PIPELINES)
def test_they_are_saved_and_loaded(execution: str, pools: Pools, tmp_path: Path) -> None:
    (found,) = Execution(execution, pools).run(resumed_values, 2, str(tmp_path))
    expected = whole_values()
    for name in ("loss", "norm"):
        expected[f"{name} 0"] = expected.pop(f"{name} 1")
    assert_close(found, expected)


def replica_values() -> Values:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe, optimizer = pipeline("processes", mesh=mesh, reduction="mean")
    rows = slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 7)
    found: Values = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        found[f"loss {step}"] = pipe.step(X[rows], target=LABELS[rows]).loss
        found[f"norm {step}"] = pipe.clip_grad_norm_(0.1)
        optimizer.step()
    return found | {name: value for name, value in values(pipe).items() if "seen" not in name}


@pytest.mark.gloo
def test_replicas_average_their_gradients(pools: Pools) -> None:
    expected = whole_values()
    for found in pools[4].run(replica_values):
        assert_close(found, {name: expected[name] for name in found})


def wrapped(loss: nn.Module) -> Any:
    @wraps(loss)
    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return 2 * loss(output, target)

    return scaled


@pytest.mark.parametrize("wrap", [lambda loss: loss.forward, partial, wrapped])
def test_a_method_a_partial_and_a_wrapper_of_a_module_are_the_module(wrap: Any) -> None:
    pipe, _ = pipeline("local", loss_fn=wrap(margin()))
    assert {"loss_fn.centres.weight", "loss_fn.temperature"} <= dict(pipe.named_parameters()).keys()


def test_a_loss_module_that_holds_the_model_adds_only_its_own_parameters() -> None:
    model = chain(4)
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=margin(model), local=True)
    names = [*dict(model.named_parameters()), "loss_fn.temperature", "loss_fn.centres.weight"]
    assert sorted(dict(pipe.named_parameters())) == sorted(names)


def test_a_loss_without_parameters_adds_nothing() -> None:
    weighted = nn.CrossEntropyLoss(torch.ones(WIDTH, dtype=torch.float64))
    pipe, _ = pipeline("local", loss_fn=weighted)
    assert not any(name.startswith("loss_fn") for name in pipe.state_dict())


def test_the_state_of_the_model_alone_leaves_the_loss_as_it_is(tmp_path: Path) -> None:
    pipe, _ = pipeline("local")
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe.load_state_dict(seeded(chain(4), seed=5).state_dict())
    after = pipe.state_dict()
    assert torch.equal(after["loss_fn.centres.weight"], before["loss_fn.centres.weight"])
    assert not torch.equal(after["0.linear.weight"], before["0.linear.weight"])
    without, _ = pipeline("local", loss_fn=functional.mse_loss)
    without.save(tmp_path / "without")
    pipe.load(tmp_path / "without")
    assert torch.equal(pipe.state_dict()["loss_fn.centres.weight"], before["loss_fn.centres.weight"])
    pipe.save(tmp_path / "with")
    without.load(tmp_path / "with")


def test_a_model_that_has_a_part_of_the_same_name_keeps_it() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss_fn, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.loss_fn(x))

    model = seeded(Named())
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=margin(), local=True)
    assert {"loss_fn.weight", "loss_fn_.centres.weight"} <= dict(pipe.named_parameters()).keys()


def test_a_check_compares_their_gradients() -> None:
    model, loss_fn = chain(4), margin()
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    report = penstock.check(model, plan, (X,), loss_fn=loss_fn, target=LABELS)
    assert report.ok
    assert "gradient of loss_fn.centres.weight" in [one.name for one in report.loop.differences]
    assert loss_fn.centres.weight.grad is None
