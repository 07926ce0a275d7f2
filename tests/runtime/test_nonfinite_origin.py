"""The error of a step with NaN or Inf names the first block, parameter or input that has it; the step is undone."""

import warnings
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import penstock
from tests.parity import Values, assert_identical, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import some
from tests.small_models import WIDTH, Block, noise, seeded

NAN = float("nan")
X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
WORDS = {
    "output": "stage: 1, during: forward, first not finite: the output of blocks.3, microbatch: 0",
    "inside": "stage: 1, during: forward, first not finite: the output of blocks.2.linear, microbatch: 0",
    "late": "stage: 1, during: forward, first not finite: the output of blocks.3, microbatch: 2",
    "parameter": "stage: 2, during: forward, first not finite: the parameter blocks.4.linear.weight, microbatch: 0",
    "buffer": "stage: 1, during: forward, first not finite: the buffer blocks.2.offset, microbatch: 0",
    "input": "stage: 0, during: forward, first not finite: the input x, microbatch: 1",
    "target": "stage: 2, during: forward, first not finite: the target, microbatch: 1",
    "gradient": "stage: 1, during: backward, first not finite: the gradient returned by blocks.3, microbatch: 0",
    "border": "stage: 1, during: backward, first not finite: the gradient returned by blocks.2, microbatch: 0",
}


class Factor(torch.autograd.Function):
    """Hands on its input, times one number on the way there and another on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        """As it is, or broken."""
        ctx.back = back
        return x * there

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """As it is, or broken."""
        return grad * ctx.back, None, None


def hidden(x: Tensor) -> Tensor:
    """Scores of which all but one are hidden by negative infinity, which is no fault."""
    return x.masked_fill(x > x.amin(-1, keepdim=True), -torch.inf).softmax(-1)


class Breakable(Block):
    """A block that can be broken before and behind its layer, or let large numbers overflow; it counts."""

    before, behind, power = (1.0, 1.0), (1.0, 1.0), 1

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        self.total = self.total + 1.0
        x = Factor.apply(x, *self.before)
        x = super().forward(x) + self.offset + hidden(x)
        return Factor.apply(x**self.power, *self.behind)


class Row(nn.Module):
    """Six blocks, of which each of three stages has two, with a mask between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Breakable() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """Blocks in a row."""
        for block in self.blocks:
            x = block(x + hidden(x))
        return x


@cache
def plan_of(schedule: str = "1f1b", recompute: str = "none") -> penstock.Plan:
    """Two blocks per stage."""
    cuts = [[f"blocks.{index}" for index in pair] for pair in ((0, 1), (2, 3), (4, 5))]
    options = {"schedule": schedule, "recompute": recompute, "partitioner": cuts}
    return quick_plan(seeded(Row()), (X,), ranks=3, microbatches=3, **options)


def made(plan: penstock.Plan, local: bool = True) -> tuple[nn.Module, penstock.Pipeline]:
    """The model and its pipeline, which goes on without a broken step."""
    model, options = seeded(Row()), penstock.RunOptions(nonfinite="skip")
    return model, penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local, options=options)


def broken(model: nn.Module, how: str) -> tuple[Tensor, Tensor]:
    """Break the model, or the batch, which is returned."""
    x, target = X.clone(), TARGET.clone()
    blocks = model.blocks
    with torch.no_grad():
        match how:
            case "output":
                blocks[3].behind = (NAN, 1.0)
            case "inside":
                blocks[2].before = (NAN, 1.0)
            case "late":
                blocks[3].power, x[5] = 2, 1e200
            case "parameter":
                blocks[4].linear.weight[1, 2] = NAN
            case "buffer":
                blocks[2].offset.fill_(torch.inf)
            case "input":
                x[2, 1] = NAN
            case "target":
                target[3, 0] = torch.inf
            case "gradient":
                blocks[3].behind = (1.0, NAN)
            case "border":
                blocks[2].before = (1.0, torch.inf)
    return x, target


def skipped(pipe: penstock.Pipeline, batch: tuple[Tensor, Tensor]) -> str:
    """Why a step was left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "loss or gradient is NaN or Inf")
        return pipe.step(batch[0], target=batch[1]).skipped


class Taken(NamedTuple):
    """A step that was skipped after a good one: its reason, and all values before and after."""

    words: str
    before: Values
    after: Values


def taken(how: str, local: bool = True) -> Taken:
    """Break a step."""
    model, pipe = made(plan_of(), local)
    pipe.step(X, target=TARGET)
    batch = broken(model, how)
    before = snapshot(pipe)
    return Taken(skipped(pipe, batch), before, snapshot(pipe))


def snapshot(held: Any) -> Values:
    """Copies of all numbers; those that are none count as equal to themselves."""
    return {name: None if value is None else value.clone().nan_to_num(7.0) for name, value in values(held).items()}


taken_here = cache(taken)


@pytest.mark.parametrize("how", WORDS)
def test_the_error_names_the_origin_of_nonfinite_values(how: str) -> None:
    assert WORDS[how] in taken_here(how).words


@pytest.mark.parametrize("how", WORDS)
def test_a_skipped_step_leaves_everything_as_it_was(how: str) -> None:
    assert_identical(taken_here(how).after, taken_here(how).before)


def test_a_buffer_that_the_model_replaces_is_put_back_itself() -> None:
    model, pipe = made(plan_of())
    batch, total = broken(model, "output"), model.blocks[0].total
    assert skipped(pipe, batch)
    assert model.blocks[0].total is total


@pytest.mark.parametrize("choices", [("zb_h1", "none"), ("1f1b", "full")])
def test_the_origin_is_found_with_split_backwards_and_recomputed_blocks(choices: tuple[str, str]) -> None:
    for how in ("inside", "border"):
        model, pipe = made(plan_of(*choices))
        assert WORDS[how] in skipped(pipe, broken(model, how))


def test_an_overflow_in_a_weight_gradient_names_the_parameter() -> None:
    model, pipe = made(plan_of("zb_h1"))
    model.blocks[3].linear.weight.register_hook(lambda gradient: gradient * NAN)
    assert "stage: 1, during: backward, first not finite: the gradient of blocks.3.linear.weight)" in skipped(
        pipe, (X, TARGET)
    )


def test_an_origin_that_cannot_be_reproduced_names_the_stage() -> None:
    model, pipe = made(plan_of())
    once = iter([NAN])
    model.blocks[2].register_forward_hook(lambda module, given, result: result * next(once, 1.0))
    assert "stage: 1, during: forward, nodes: blocks.2 to /add@5)" in skipped(pipe, (X, TARGET))


@pytest.mark.gloo
@pytest.mark.parametrize("how", some(["parameter", "border"], ["late", "parameter", "input", "border"]))
def test_every_process_reports_the_same_origin_and_undoes_the_step(pools: Pools, how: str) -> None:
    found = pools[3].run(taken, how, False)
    assert len({rank.words for rank in found}) == 1
    assert WORDS[how] in found[0].words
    for rank in found:
        assert_identical(rank.after, rank.before)


def broken_in_a_replica() -> str:
    """The error of this rank when the batch of the second replica has a NaN."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, options = seeded(Row()), penstock.RunOptions(nonfinite="skip")
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, mesh=mesh, options=options)
    return skipped(pipe, broken(model, "input" if mesh.get_local_rank("dp") else ""))


@pytest.mark.gloo
def test_all_replicas_report_nonfinite_values_of_one(pools: Pools) -> None:
    first, *others = pools[4].run(broken_in_a_replica)
    assert others == [first] * 3
    assert "first not finite: the input x, microbatch: 1" in first


def test_three_broken_steps_in_a_row_end_training_in_the_words_of_the_last() -> None:
    model, pipe = made(plan_of())
    broken(model, "output")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before, reports = snapshot(model), []
    with pytest.raises(penstock.RunError, match=r"3 steps in a row: .*the output of blocks\.3"):
        penstock.fit(pipe, [(X, TARGET)] * 5, optimizer, on_step=reports.append)
    assert [WORDS["output"] in report.skipped for report in reports] == [True] * 3
    assert_identical(snapshot(model), before)
