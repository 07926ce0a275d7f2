"""Batches may change from step to step and between training and evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.parity import Values, WholeModel, assert_close, assert_identical, assert_parts_close, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, noise, seeded, tied, token_loss, tokens

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v")
FORMS = (
    (8, 6, torch.int64),
    (3, 6, torch.int64),
    (8, 2, torch.int64),
    (1, 1, torch.int64),
    (8, 6, torch.int32),
    (9, 6, torch.int64),
)
BATCHES = [(tokens(rows, length).to(dtype), tokens(rows, length, seed=1)) for rows, length, dtype in FORMS]


def tied_pipe(ranks: int = 2, schedule: str = "1f1b", local: bool = True) -> tuple[nn.Module, Any]:
    """A small language model and its pipeline."""
    model = tied()
    plan = quick_plan(model, BATCHES[0][:1], ranks=ranks, microbatches=4, schedule=schedule)
    return model, penstock.Pipeline(model, plan, loss_fn=token_loss, local=local)


def plain_eval(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The loss in eval mode, without gradients."""
    with torch.no_grad():
        loss = token_loss(model.eval()(x), target)
    model.train()
    return loss


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_samples_shapes_and_dtypes_change_from_step_to_step(schedule: str) -> None:
    plain, (model, pipe) = tied(), tied_pipe(schedule=schedule)
    for x, target in BATCHES:
        expected = WholeModel(plain, token_loss).step(x, target=target).loss
        assert_close(values(model, [pipe.step(x, target=target).loss]), values(plain, [expected]))


def test_an_evaluation_takes_any_batch() -> None:
    plain, (_, pipe) = tied(), tied_pipe()
    for x, target in BATCHES:
        pipe.step(*BATCHES[0][:1], target=BATCHES[0][1])
        assert_close({"loss": pipe.eval(x, target=target).loss}, {"loss": plain_eval(plain, x, target)})


def changing_batches() -> tuple[list[Tensor], list[Tensor], Values]:
    """Losses of training and evaluation, and what this rank holds in the end."""
    _, pipe = tied_pipe(local=False)
    losses, evaluated = [], []
    for x, target in BATCHES:
        losses.append(pipe.step(x, target=target).loss)
        evaluated.append(pipe.eval(x[:, :1], target=target[:, :1]).loss)
    return losses, evaluated, values(pipe)


@pytest.mark.gloo
def test_processes_follow_changes_too(pools: Pools) -> None:
    plain = tied()
    trained = [WholeModel(plain, token_loss).step(x, target=target).loss for x, target in BATCHES]
    evaluated = [plain_eval(plain, x[:, :1], target[:, :1]) for x, target in BATCHES]
    first, second = pools[2].run(changing_batches)
    assert first[:2] == second[:2]
    assert_close(dict(enumerate(first[0] + first[1])), dict(enumerate(trained + evaluated)))
    assert_parts_close((first[2], second[2]), plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_without_zeroing_accumulate(schedule: str) -> None:
    (x, target), (other, wanted) = BATCHES[0], BATCHES[1]
    plain, (model, pipe) = tied(), tied_pipe(schedule=schedule)
    for batch, labels in ((x, target), (other, wanted), (x, target)):
        WholeModel(plain, token_loss).step(batch, target=labels)
        pipe.step(batch, target=labels)
    assert_close(values(model), values(plain))


def accumulated(zeroes: bool) -> Values:
    """Two steps with an evaluation in between."""
    _, pipe = tied_pipe(local=False)
    for x, target in BATCHES[:2]:
        if zeroes:
            for parameter in pipe.parameters():
                parameter.grad = None
        pipe.step(x, target=target)
        pipe.eval(x, target=target)
    return values(pipe)


@pytest.mark.gloo
@pytest.mark.parametrize("zeroes", [False, True])
def test_processes_accumulate_unless_gradients_are_zeroed(pools: Pools, zeroes: bool) -> None:
    plain = tied()
    for x, target in BATCHES[:2]:
        if zeroes:
            plain.zero_grad()
        WholeModel(plain, token_loss).step(x, target=target)
    assert_parts_close(pools[2].run(accumulated, zeroes), plain)


def test_an_evaluation_changes_nothing() -> None:
    model, pipe = tied_pipe()
    x, target = BATCHES[0]
    pipe.step(x, target=target)
    model.blocks[1].eval()
    modes, draws, before = [m.training for m in model.modules()], torch.get_rng_state(), _copied(values(model))
    pipe.eval(x[:5], target=target[:5], return_outputs=True)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), draws)
    assert_identical(values(model), before)


def test_a_step_leaves_the_random_numbers_of_the_user_alone() -> None:
    _, pipe = tied_pipe()
    draws = torch.get_rng_state()
    pipe.step(BATCHES[0][0], target=BATCHES[0][1])
    assert torch.equal(torch.get_rng_state(), draws)


def _copied(found: Values) -> Values:
    return {name: None if value is None else value.clone() for name, value in found.items()}


def embedded(trained: Any, model: nn.Module, num_steps: int = 2) -> list[Tensor]:
    """Losses of steps whose input and target are results of layers outside of the pipeline, and their gradients."""
    torch.manual_seed(2)
    embedding, teacher = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    x, found = noise(6, WIDTH), []
    for _ in range(num_steps):
        found.append(trained.step(embedding(x).tanh(), target=teacher(x).tanh()).loss.detach())
    return [*found, *(p.grad for part in (embedding, teacher, model) for p in part.parameters())]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_reach_what_computed_the_batch(schedule: str) -> None:
    plain, model = (seeded(nn.Sequential(*(Block() for _ in range(4)))) for _ in range(2))
    plan = quick_plan(model, (noise(6, WIDTH),), ranks=2, microbatches=3, schedule=schedule)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    for found, expected in zip(embedded(pipe, model), embedded(WholeModel(plain, mse_loss), plain), strict=True):
        assert torch.allclose(found, expected, rtol=0.0, atol=1e-12)


def refused_embedding(plan: penstock.Plan, inputs: str) -> tuple[str, bool]:
    model = seeded(nn.Sequential(*(Block() for _ in range(4))))
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, inputs=inputs)
    x, target = seeded(nn.Linear(WIDTH, WIDTH).double())(noise(6, WIDTH)), noise(6, WIDTH, seed=1)
    is_given = inputs == "all" or torch.distributed.get_rank() == 0
    with pytest.raises(penstock.RunError) as error:
        pipe.step(*((x,) if is_given else ()), target=target if is_given else None)
    loss = pipe.step(*((x.detach(),) if is_given else ()), target=target if is_given else None).loss
    return str(error.value), loss is not None


@pytest.mark.gloo
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_a_batch_that_was_computed_with_gradients_is_refused_over_processes(inputs: str, pools: Pools) -> None:
    model = seeded(nn.Sequential(*(Block() for _ in range(4))))
    plan = quick_plan(model, (noise(6, WIDTH),), ranks=2, microbatches=3, schedule="1f1b")
    for text, is_usable in pools[2].run(refused_embedding, plan, inputs):
        assert text.startswith("a batch must not be the result of a computation that needs gradients")
        assert "try: x.detach(), the computation as a part of the model, or local=True" in text
        assert is_usable


def test_a_failing_backward_of_what_computed_the_batch_undoes_the_step() -> None:
    model = seeded(nn.Sequential(*(Block() for _ in range(4))))
    plan = quick_plan(model, (noise(6, WIDTH),), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    x = nn.Linear(WIDTH, WIDTH).double()(noise(6, WIDTH)).tanh()
    pipe.step(x, target=noise(6, WIDTH, seed=1))
    before = _copied(values(model))
    with pytest.raises(RuntimeError, match="second time"):
        pipe.step(x, target=noise(6, WIDTH, seed=1))
    assert_identical(values(model), before)
