"""`step(..., scale=1/n)` gives the gradients, norms and losses of plain accumulation with division."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import l1_loss, mse_loss

import penstock
from tests.parity import PIPELINES, Execution, Values, assert_close, assert_identical, gradients, split
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, chain, noise, seeded

BATCHES = [(noise(5, WIDTH, seed=2 * n), noise(5, WIDTH, seed=2 * n + 1)) for n in range(3)]
SCALE = 1 / len(BATCHES)


class Penalised(Block):
    """A block that adds to the loss."""

    def forward(self, x: Tensor) -> Tensor:
        """One layer, and a penalty."""
        x = super().forward(x)
        penstock.add_loss(0.1 * (x**2).mean())
        return x


def penalised() -> nn.Module:
    return seeded(nn.Sequential(*(Penalised() for _ in range(4))))


def two_losses(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"square": mse_loss(output, target), "sum": 0.1 * l1_loss(output, target, reduction="sum")}


def plain(model: nn.Module, loss_fn: Any, batches: list[tuple[Tensor, Tensor]] = BATCHES) -> list[Tensor]:
    """The losses of accumulation with division in plain PyTorch; gradients stay in the model."""
    losses = []
    for x, target in batches:
        with penstock.added_losses() as added:
            loss = loss_fn(model(x), target)
        loss = sum(loss.values()) if isinstance(loss, dict) else loss
        loss = (loss + torch.stack(added).sum() if added else loss) * SCALE
        loss.backward()
        losses.append(loss.detach())
    return losses


def scaled(pipe: Any, batches: list[tuple[Tensor, Tensor]] = BATCHES) -> list[Tensor]:
    return [pipe.step(x, target=target, scale=SCALE).loss for x, target in batches]


MODELS = {"one loss": (lambda: chain(4), mse_loss), "added losses": (penalised, mse_loss), "two": (chain, two_losses)}


def accumulate(name: str, execution: str) -> list[Values]:
    build, loss_fn = MODELS[name]
    model = chain(4) if build is chain else build()
    plan = quick_plan(model, (BATCHES[0][0],), ranks=2, microbatches=2, schedule="1f1b")
    pipe = split(execution, model, plan, loss_fn)
    found = gradients(pipe, scaled(pipe))
    return [{**found, "norm": pipe.clip_grad_norm_(1e9)}]


@pytest.mark.parametrize("execution", PIPELINES, indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_norm_and_losses_are_those_of_accumulation_with_division(name: str, execution: Execution) -> None:
    build, loss_fn = MODELS[name]
    model = chain(4) if build is chain else build()
    losses = plain(model, loss_fn)
    expected = gradients(model, losses)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    [found] = execution.run(accumulate, 2, name)
    assert_close(found, {**expected, "norm": norm})


def local_pipe(loss_fn: Any = mse_loss, **options: Any) -> penstock.Pipeline:
    model = chain(4)
    plan = quick_plan(model, (BATCHES[0][0],), ranks=2, microbatches=2, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True, **options)


def test_the_loss_is_the_weighted_sum_of_the_unscaled_losses_of_the_microbatches() -> None:
    (x, target), pipe = BATCHES[0], local_pipe()
    whole, part = pipe.step(x, target=target), pipe.step(x, target=target, scale=0.25)
    assert [float(loss) for loss in part.losses] == [float(loss) for loss in whole.losses]
    assert part.weights == tuple(0.25 * weight for weight in whole.weights)
    assert float(part.loss) == pytest.approx(0.25 * float(whole.loss), rel=1e-14)
    assert float(part.loss) == pytest.approx(sum(w * float(v) for w, v in zip(part.weights, part.losses, strict=True)))


def test_each_of_several_losses_is_scaled() -> None:
    (x, target), pipe = BATCHES[0], local_pipe(two_losses)
    whole, part = pipe.step(x, target=target), pipe.step(x, target=target, scale=0.5)
    for name, loss in whole.losses_by_name.items():
        assert float(part.losses_by_name[name]) == pytest.approx(0.5 * float(loss), rel=1e-14)
        assert part.weights_by_name[name] == tuple(0.5 * weight for weight in whole.weights_by_name[name])


def test_outputs_are_not_scaled() -> None:
    (x, target), pipe = BATCHES[0], local_pipe()
    outputs = [pipe.step(x, target=target, scale=scale, return_outputs=True).outputs for scale in (1.0, 0.25)]
    assert torch.equal(*outputs)


def test_a_scaler_multiplies_the_scale() -> None:
    scaler, model = penstock.GradScaler(1024.0), chain(4)
    losses = plain(model, mse_loss)
    pipe = local_pipe(scaler=scaler)
    assert_close(gradients(nn.Module(), scaled(pipe)), gradients(nn.Module(), losses))
    scaler.unscale_(torch.optim.SGD(pipe.parameters(), lr=0.1))
    assert_close(gradients(pipe), gradients(model))


def test_a_stream_is_scaled() -> None:
    weights = []
    for factor, rate in ((1.0, 0.1), (0.5, 0.2)):
        pipe = local_pipe(staleness="stash", optimizer=lambda params, rate=rate: torch.optim.SGD(params, lr=rate))
        results = [pipe.step(x, target=target, scale=factor) for x, target in BATCHES]
        pipe.drain()
        weights.append(({name: p.detach() for name, p in pipe.named_parameters()}, float(results[0].loss) / factor))
    assert_close(weights[0][0], weights[1][0])
    assert weights[0][1] == pytest.approx(weights[1][1], rel=1e-12)


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def replicated() -> Values:
    model, share = chain(4), slice(0, 3) if mesh().get_local_rank("dp") == 0 else slice(3, 5)
    plan = quick_plan(model, (BATCHES[0][0],), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, mesh=mesh())
    return gradients(pipe, scaled(pipe, [(x[share], target[share]) for x, target in BATCHES]))


@pytest.mark.gloo
def test_replicas_scale_alike(pools: Pools) -> None:
    model = chain(4)
    expected = gradients(model, plain(model, mse_loss))
    parts = pools[4].run(replicated)
    assert_identical(parts[0], parts[2])
    for part in parts:
        assert_close(part, {name: expected[name] for name in part})


def scaled_differently() -> str:
    model = chain(4)
    plan = quick_plan(model, (BATCHES[0][0],), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss)
    x, target = BATCHES[0]
    with pytest.raises(penstock.RunError) as caught:
        pipe.step(x, target=target, scale=0.5 if dist.get_rank() else 0.25)
    return str(caught.value)


@pytest.mark.gloo
def test_ranks_with_different_scales_are_refused(pools: Pools) -> None:
    first, second = pools[2].run(scaled_differently)
    assert "rank 1 called step(scale=0.5) while rank 0 called step(scale=0.25)" in first
    assert first == second


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "half", None, torch.ones(2)])
def test_a_scale_that_is_not_a_number_is_refused(scale: Any) -> None:
    (x, target), pipe = BATCHES[0], local_pipe()
    with pytest.raises(penstock.RunError, match=r"scale must be a finite number.*\ntry: scale=1/n"):
        pipe.step(x, target=target, scale=scale)
    pipe.step(x, target=target, scale=torch.tensor(0.5))


class Scaling(nn.Module):
    """Has an argument of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(4)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        """Scaled outputs."""
        return self.body(x) * scale


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_model_that_takes_a_scale_gets_it_by_position(scale: float) -> None:
    model, (x, target) = Scaling(), BATCHES[0]
    plan = quick_plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    with pytest.raises(penstock.RunError, match=r"scale is ambiguous.*\ntry: pass it to the model by position"):
        pipe.step(x, target=target, scale=scale)
    assert float(pipe.step(x, scale, target=target).loss) == pytest.approx(mse_loss(model(x, scale), target).item())


class ScalingByKeyword(Scaling):
    """Takes the argument by name only."""

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        """Scaled outputs."""
        return self.body(x) * scale


def test_the_hint_for_a_scale_that_has_no_position_is_another_name() -> None:
    model, (x, target) = ScalingByKeyword(), BATCHES[0]
    plan = quick_plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    with pytest.raises(penstock.RunError, match=r"scale is ambiguous.*\ntry: another name for the argument"):
        pipe.step(x, target=target, scale=0.5)


class ScalingByName(Scaling):
    """Has the argument among others."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Scaled outputs."""
        return self.body(x) * kwargs.get("scale", 2.0)


class ScalingInside(nn.Module):
    """Passes all arguments on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaling()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Scaled outputs."""
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(("model", "kwargs"), [(ScalingByName(), {}), (ScalingInside(), {"scale": torch.ones(())})])
def test_a_scale_among_other_arguments_of_the_model_is_ambiguous(model: nn.Module, kwargs: dict[str, Any]) -> None:
    x, target = BATCHES[0]
    plan = quick_plan(model, (x,), kwargs, ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    with pytest.raises(penstock.RunError, match=r"scale is ambiguous.*\*\*kwargs\ntry: another name"):
        pipe.step(x, target=target, scale=0.5)
