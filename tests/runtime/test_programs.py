"""Orders that the user gives are run as they are: programs with their messages, and orders without any backward."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.ir import ComputeAction, Message, Overlap, Plan
from tests.parity import Values, WholeModel, assert_close, assert_parts_close, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, noise, seeded

X, Y = noise(8, WIDTH), noise(8, WIDTH, seed=1)
PASSES = ("add_transfers",)


class Skipping(nn.Module):
    """The output of the first block is also read by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """A skip connection around the blocks in the middle."""
        first = x = self.blocks[0](x)
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.blocks[-1](x + first)


def chain() -> nn.Module:
    return seeded(nn.Sequential(*(Block() for _ in range(4))))


def program_text(name: str, microbatches: int = 4) -> str:
    """A program whose receives are posted where they are needed, unlike those that a Pipeline makes of a schedule."""
    return penstock.lower(penstock.schedule(name, 2, microbatches), passes=PASSES).to_csv()


def pipe_of(model: nn.Module, schedule: Any, local: bool = True) -> tuple[Any, Plan]:
    plan = quick_plan(model, (X,), ranks=2, microbatches=4, schedule=schedule)
    return penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local), plan


def messages(program: penstock.Program) -> list[list[str]]:
    """Everything but reductions and frees, which are added."""
    kinds = ComputeAction | Overlap | Message
    return [[str(action) for action in order if isinstance(action, kinds)] for order in program.orders]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved", "dualpipe_v"])
def test_a_program_is_run_in_its_own_order_with_the_gradients_of_the_model(name: str, tmp_path: Path) -> None:
    path, model, plain = tmp_path / "own.csv", chain(), chain()
    path.write_text(program_text(name))
    pipe, plan = pipe_of(model, path)
    result = pipe.step(X, target=Y, record=True)
    assert messages(result.trace.program) == messages(penstock.Program.from_csv(path))
    whole = WholeModel(plain, mse_loss).step(X, target=Y)
    assert_close({"loss": result.loss}, {"loss": whole.loss})
    assert_parts_close([values(pipe)], plain)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "with its messages" in str(plan)
    assert penstock.simulate(plan).makespan == pytest.approx(plan.predicted.makespan)


def on_processes(text: str) -> tuple[list[Tensor], Values]:
    """The losses of steps on whole and small batches, of an evaluation, and what this rank has."""
    pipe, _ = pipe_of(chain(), penstock.Program.from_csv(text), local=False)
    losses = [call(X[:rows], target=Y[:rows]).loss for rows in (8, 3) for call in (pipe.step, pipe.eval)]
    return losses, values(pipe)


@pytest.mark.gloo
def test_a_program_runs_on_processes_also_for_fewer_samples_and_evaluation(pools: Pools) -> None:
    plain, expected = chain(), []
    for rows in (8, 3):
        expected += [WholeModel(plain, mse_loss).step(X[:rows], target=Y[:rows]).loss] * 2
    results = pools[2].run(on_processes, program_text("dualpipe_v"))
    assert_parts_close([part for _, part in results], plain)
    for losses, _ in results:
        assert_close(dict(enumerate(losses)), dict(enumerate(expected)))


def test_a_program_without_a_message_that_the_model_needs_is_refused_by_plan() -> None:
    program = penstock.lower(penstock.schedule("1f1b", 4, 2))
    with pytest.raises(penstock.ScheduleError, match="an action needs a value that has no Send"):
        quick_plan(seeded(Skipping()), (X,), ranks=4, microbatches=2, schedule=program)


def test_messages_that_the_model_does_not_need_are_left_out() -> None:
    model, plain = chain(), chain()
    for each in (model, plain):
        # Nothing returns to the first rank.
        each[0].requires_grad_(False)
        each[1].requires_grad_(False)
    pipe, _ = pipe_of(model, penstock.Program.from_csv(program_text("1f1b")))
    result = pipe.step(X, target=Y, record=True)
    assert not [text for order in messages(result.trace.program) for text in order if "SEND_B" in text]
    WholeModel(plain, mse_loss).step(X, target=Y)
    assert_parts_close([values(pipe)], plain)


@pytest.mark.parametrize("has_messages", [False, True])
def test_an_order_without_any_backward_is_proven_simulated_and_evaluated(has_messages: bool) -> None:
    schedule = penstock.schedule("gpipe", 2, 4).forwards()
    orders: Any = penstock.lower(schedule, passes=PASSES) if has_messages else schedule
    penstock.verify(orders)
    assert penstock.simulate(orders).makespan == 5.0
    model = chain()
    pipe, plan = pipe_of(model, orders)
    assert "forward only" in str(plan)
    found = pipe.eval(X, target=Y, return_outputs=True)
    assert_close({"outputs": found.outputs}, {"outputs": model(X).detach()})
    with pytest.raises(penstock.RunError, match="has no backward, so it cannot train"):
        pipe.step(X, target=Y)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "missing: 0B1"),
        ("0F0,0B0,0B1\n1F0,1B0,1F1,1B1", "missing: 0F1"),
        ("0F0,0F1,0I0,0W0,0I1\n1F0,1B0,1F1,1B1", "missing: 0W1"),
    ],
)
def test_plan_refuses_an_incomplete_order_and_names_the_missing_actions(text: str, words: str) -> None:
    with pytest.raises(penstock.ScheduleError, match=words):
        quick_plan(chain(), (X,), ranks=2, microbatches=2, schedule=text)


def test_a_program_can_be_run_for_fewer_microbatches_but_not_for_more() -> None:
    model, plain = chain(), chain()
    pipe, _ = pipe_of(model, penstock.Program.from_csv(program_text("zb_h1")))
    pipe.microbatches = 2
    pipe.step(X, target=Y)
    WholeModel(plain, mse_loss).step(X, target=Y)
    assert_parts_close([values(pipe)], plain)
    with pytest.raises(penstock.PlanError, match="cannot have more microbatches"):
        pipe.microbatches = 5
