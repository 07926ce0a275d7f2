"""Mistakes are refused before any training starts, in words that say what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import penstock
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)


def plan_for(model: nn.Module, ranks: int = 2) -> penstock.Plan:
    return quick_plan(model, (X,), ranks=ranks, microbatches=2, schedule="1f1b")


def test_a_pipeline_needs_processes_or_to_be_local() -> None:
    model = chain(4)
    with pytest.raises(penstock.RunError, match=r"not initialised\ntry: penstock.launch.*local=True"):
        penstock.Pipeline(model, plan_for(model), loss_fn=mse_loss)


def test_a_local_pipeline_takes_no_mesh() -> None:
    model = chain(4)
    with pytest.raises(penstock.RunError, match="mesh must be None with local=True"):
        penstock.Pipeline(model, plan_for(model), loss_fn=mse_loss, local=True, mesh=object())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (chain(5), "name: 4.linear.weight, planned: no parameter of this name"),
        (chain(3), "name: 3.linear.weight, .*model: no parameter of this name"),
        (chain(4).float(), r"planned: float64\[4, 4\], model: float32\[4, 4\]"),
        (nn.Sequential(nn.Linear(WIDTH, 3)), "planned: .*model: "),
    ],
)
def test_a_plan_for_another_model_is_refused(other: nn.Module, words: str) -> None:
    with pytest.raises(penstock.PlanError, match=f"the plan is for another model.*{words}"):
        penstock.Pipeline(other, plan_for(chain(4)), loss_fn=mse_loss, local=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": "some"}, "inputs must be"),
        ({"reduction": "median"}, "reduction must be"),
        ({"split": {"y": 0}}, "split"),
    ],
)
def test_an_unknown_choice_is_refused(options: dict[str, Any], words: str) -> None:
    model = chain(4)
    with pytest.raises(penstock.RunError, match=words):
        penstock.Pipeline(model, plan_for(model), loss_fn=mse_loss, local=True, **options).step(X, target=TARGET)


class Scoring(nn.Module):
    """Takes the target itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(4)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss, or the answer."""
        return self.body(x) if target is None else mse_loss(self.body(x), target)


def test_a_loss_function_beside_a_forward_that_takes_the_target_is_refused() -> None:
    model = Scoring()
    plan = quick_plan(model, (X, TARGET), ranks=2, microbatches=2, schedule="1f1b")
    with pytest.raises(penstock.RunError, match="both a loss_fn and the model's forward take the target"):
        penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    loss = penstock.Pipeline(model, plan, local=True).step(X, target=TARGET).loss
    assert float(loss) == pytest.approx(float(model(X, TARGET).detach()), rel=1e-12)


NO_LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "many numbers": (lambda output, target: output - target, "a loss must be one number in a tensor .*got: \\(3, 4\\)"),
    "a float": (
        lambda output, target: output.mean().item(),
        "one number in a tensor .*got: float.*\\ntry: a mean or a",
    ),
    "nothing": (lambda output, target: None, "a loss must be one number in a tensor .*got: NoneType"),
    "complex": (lambda output, target: mse_loss(output, target) * 1j, "floating-point number .*complex128"),
    "8 bits": (lambda output, target: mse_loss(output, target).to(torch.float8_e5m2), "16 bits .*float8_e5m2"),
    "a count": (lambda output, target: (output > target).sum(), "floating-point number .*int64"),
}


@pytest.mark.parametrize("case", NO_LOSSES)
@pytest.mark.parametrize("call", ["step", "eval"])
def test_a_loss_that_is_not_one_number_is_refused(call: str, case: str) -> None:
    model, (loss_fn, words) = chain(4), NO_LOSSES[case]
    pipe = penstock.Pipeline(model, plan_for(model), loss_fn=loss_fn, local=True)
    with pytest.raises(penstock.RunError, match=words):
        getattr(pipe, call)(X, target=TARGET)


def test_a_step_without_gradients_is_refused() -> None:
    model = chain(4)
    pipe = penstock.Pipeline(model, plan_for(model), loss_fn=mse_loss, local=True)
    with torch.no_grad(), pytest.raises(penstock.RunError, match=r"call step outside of torch\.no_grad"):
        pipe.step(X, target=TARGET)


def test_a_model_without_a_loss_cannot_be_trained() -> None:
    model = chain(4)
    with pytest.raises(penstock.RunError, match="loss"):
        penstock.Pipeline(model, plan_for(model), local=True).step(X)


def refusals() -> list[str]:
    """The errors of plans for another number of ranks, and of meshes without the required axes."""
    model, found = chain(4), []
    meshes = [
        None,
        init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        init_device_mesh("cpu", (2,), mesh_dim_names=("stages",)),
    ]
    for ranks, mesh in ((3, meshes[0]), (4, meshes[1]), (2, meshes[2])):
        try:
            penstock.Pipeline(model, plan_for(model, ranks), loss_fn=mse_loss, mesh=mesh)
        except penstock.RunError as error:
            found.append(str(error))
    return found


@pytest.mark.gloo
def test_a_wrong_number_of_processes_or_a_wrong_mesh_is_refused(pools: Pools) -> None:
    for world, axis, name in pools[2].run(refusals):
        assert world.startswith("the number of processes must be the number of ranks of the plan (plan: 3, world: 2)")
        assert axis.startswith("the 'pp' axis of the mesh must be as long as the plan has ranks (plan: 4, mesh: 2)")
        assert name.startswith("a mesh must have an axis for the pipeline")


def later_step() -> str:
    """A rank that is a step ahead of the others."""
    model = chain(4)
    pipe = penstock.Pipeline(model, plan_for(model), loss_fn=mse_loss)
    pipe.step(X, target=TARGET)
    pipe.num_steps += dist.get_rank()
    try:
        pipe.step(X, target=TARGET)
    except penstock.RunError as error:
        return str(error)
    return "not refused"


@pytest.mark.gloo
def test_ranks_at_different_steps_are_refused(pools: Pools) -> None:
    for words in pools[2].run(later_step):
        assert words.startswith("the ranks are at different steps")
        assert "steps: [1, 2]" in words


def mixed_calls() -> str:
    """Rank 0 trains while rank 1 evaluates."""
    model = chain(4)
    pipe = penstock.Pipeline(model, plan_for(model), loss_fn=mse_loss)
    try:
        (pipe.step if dist.get_rank() == 0 else pipe.eval)(X, target=TARGET)
    except penstock.RunError as error:
        return str(error)
    return "not refused"


@pytest.mark.gloo
def test_training_on_one_rank_and_evaluating_on_another_is_refused(pools: Pools) -> None:
    first, second = pools[2].run(mixed_calls)
    assert first == second
    assert first.startswith("rank 1 called eval while rank 0 called step (step: 0)")
