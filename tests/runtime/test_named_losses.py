"""A dict of losses: their sum is the loss, and each is reported for the whole batch."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from tests.parity import PIPELINES, Execution, Values, assert_close, gradients
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import CLASSES, WIDTH, chain, noise, seeded, tokens

X, LABELS = noise(7, WIDTH), tokens(7, seed=1, below=CLASSES)
# Few labels count, and not the same number in every microbatch.
LABELS[[0, 1, 4]] = -100


def losses(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Losses that are averaged over labels, averaged over samples, and not averaged."""
    return {
        "labels": functional.cross_entropy(output, target),
        "samples": 0.1 * output.square().mean(),
        "sum": 0.01 * output.abs().sum(),
    }


def equal_losses(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Losses that are averaged over the same samples."""
    return {"square": output.square().mean(), "absolute": output.abs().mean()}


def with_total(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """A dict with an item `loss`, which is the loss; the other items are only reported by the user."""
    found = equal_losses(output, target)
    return {"loss": found["square"] + 3 * found["absolute"], **found}


class Scored(nn.Module):
    """A model that returns its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = chain(4), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        output = self.head(self.body(x))
        return output if labels is None else losses(output, labels)


def classifier() -> nn.Module:
    return seeded(nn.Sequential(*chain(4), nn.Linear(WIDTH, CLASSES)))


def whole_values(loss_fn: Any) -> Values:
    model = classifier()
    found = loss_fn(model(X), LABELS)
    total = found["loss"] if "loss" in found else sum(found.values())
    total.backward()
    named = {} if "loss" in found else {f"named {name}": loss.detach() for name, loss in found.items()}
    return gradients(model, [total.detach()]) | named


def split_values(loss_fn: Any, execution: str, ranks: int = 2) -> list[Values]:
    model = classifier()
    plan = quick_plan(model, (X,), ranks=ranks, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=loss_fn, local=execution == "local")
    with warnings.catch_warnings():
        warnings.simplefilter("error", penstock.PenstockWarning)
        result = pipe.step(X, target=LABELS)
    torch.testing.assert_close(sum(w * x for w, x in zip(result.weights, result.losses, strict=True)), result.loss)
    found = gradients(pipe, [result.loss])
    return [found | {f"named {name}": loss for name, loss in result.losses_by_name.items()}]


@pytest.mark.parametrize("execution", PIPELINES)
@pytest.mark.parametrize("loss_fn", [losses, equal_losses, with_total])
def test_the_sum_is_the_loss_and_each_is_that_of_the_whole_batch(loss_fn: Any, execution: str, pools: Pools) -> None:
    (found,) = Execution(execution, pools).run(split_values, 2, loss_fn)
    assert_close(found, whole_values(loss_fn))


def replica_values(loss_fn: Any) -> Values:
    from torch.distributed.device_mesh import init_device_mesh

    model = classifier()
    plan = quick_plan(model, (X[:4],), ranks=2, microbatches=2, schedule="1f1b")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = penstock.Pipeline(model, plan, loss_fn=loss_fn, mesh=mesh)
    own = slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 7)
    result = pipe.step(X[own], target=LABELS[own])
    named = {f"named {name}": loss for name, loss in result.losses_by_name.items()}
    return gradients(pipe, [result.loss]) | named


@pytest.mark.gloo
def test_replicas_of_different_sizes_have_the_losses_of_all_samples(pools: Pools) -> None:
    found = pools[4].run(replica_values, losses)
    # Replicas average their gradients, and a sum over samples is a sum over the samples of each.
    expected = whole_values(replicated)
    for part in found:
        assert_close(part, {name: expected[name] for name in part})


def replicated(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    found = losses(output, target)
    return {**found, "sum": found["sum"] / 2}


def names_of_replicas() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    model = classifier()
    plan = quick_plan(model, (X[:4],), ranks=1, microbatches=1, schedule="1f1b")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    loss_fn = losses if mesh.get_local_rank("dp") == 0 else equal_losses
    pipe = penstock.Pipeline(model, plan, loss_fn=loss_fn, mesh=mesh)
    try:
        pipe.step(X, target=LABELS)
    except penstock.RunError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_replicas_with_different_names_are_refused() -> None:
    for text in penstock.launch(names_of_replicas, 2):
        assert "losses must have the same names on all replicas" in text


def test_a_model_may_return_a_dict_of_losses() -> None:
    model = seeded(Scored())
    plan = quick_plan(model, (X, LABELS), ranks=2, microbatches=3, schedule="1f1b")
    assert penstock.check(model, plan, (X, LABELS)).ok
    expected = {name: loss.detach() for name, loss in model(X, LABELS).items()}
    pipe = penstock.Pipeline(model, plan, local=True)
    assert_close(pipe.step(X, LABELS).losses_by_name, expected)
    assert_close(pipe.eval(X, LABELS).losses_by_name, expected)
    assert pipe.eval(X).losses_by_name == {}


def test_a_check_compares_losses_that_are_averaged_over_different_numbers() -> None:
    model = classifier()
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    report = penstock.check(model, plan, (X,), loss_fn=losses, target=LABELS)
    assert report.ok
    assert report.whole is not None


def one_for_small(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"a": output.mean()} if len(output) < 3 else {"a": output.mean(), "b": output.sum()}


@pytest.mark.parametrize(
    ("loss_fn", "problem"),
    [
        (one_for_small, r"all microbatches must have losses of the same names \(.*names: a, others: a, b"),
        (lambda y, t: {"a": y.mean(), "b": y}, r"a loss must be one number in a tensor \(.*loss: b, got: \(3, 5\)"),
        (lambda y, t: {"a": y.mean(), "b": 0.5}, r"a loss must be one number in a tensor \(.*loss: b, got: float"),
        (lambda y, t: {}, r"a loss must be one number in a tensor \(.*got: dict"),
    ],
)
def test_what_is_no_dict_of_losses_is_refused(loss_fn: Any, problem: str) -> None:
    model = classifier()
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    with pytest.raises(penstock.RunError, match=problem):
        penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True).step(X, target=LABELS)
