"""A parameter that several ranks use has one gradient, counts once, and stays the same everywhere."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from tests.parity import Values, WholeModel, assert_identical, assert_parts_close, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import some
from tests.small_models import tied, token_loss, tokens
from tests.zoo import ZOO

X, TARGET = tokens(7, 6), tokens(7, 6, seed=1)
SHARED = {"embed.weight": "head.weight", "mix": "mix"}
SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zbv")


def tied_pipe(schedule: str = "1f1b", ranks: int = 2, model: nn.Module | None = None) -> Any:
    """A pipeline whose first and last rank share a table and a matrix."""
    model = tied(6) if model is None else model
    plan = quick_plan(model, (X,), ranks=ranks, microbatches=3, schedule=schedule)
    return penstock.Pipeline(model, plan, loss_fn=token_loss)


def gradients_of(schedules: list[str], ranks: int) -> list[Values]:
    """What a rank holds after two accumulated steps."""
    found = []
    for schedule in schedules:
        pipe = tied_pipe(schedule, ranks)
        for _ in range(2):
            pipe.step(X, target=TARGET)
        found.append(values(pipe))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_summed_over_the_owners(pools: Pools, ranks: int, is_whole: bool) -> None:
    plain = tied(6)
    schedules = list(SCHEDULES if is_whole else SCHEDULES[ranks % 2 :: 2])
    for _ in range(2):
        WholeModel(plain, token_loss).step(X, target=TARGET)
    for parts in zip(*pools[ranks].run(gradients_of, schedules, ranks), strict=True):
        assert_parts_close(parts, plain)
        assert_owners_agree(parts)


def assert_owners_agree(parts: tuple[Values, ...]) -> None:
    """Every rank that has a shared parameter has the same bits for it."""
    for one, other in SHARED.items():
        held = [part[f"gradient {name}"] for part in parts for name in {one, other} if f"gradient {name}" in part]
        states = [part[f"state {name}"] for part in parts for name in {one, other} if f"state {name}" in part]
        assert all(torch.equal(tensor, held[0]) for tensor in held)
        assert all(torch.equal(tensor, states[0]) for tensor in states)


class Rotated(nn.Module):
    """A linear layer after a multiplication by a complex vector, or by its conjugate."""

    def __init__(self, factor: nn.Parameter, is_conjugated: bool) -> None:
        super().__init__()
        self.factor, self.is_conjugated = factor, is_conjugated
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        product = (self.factor.conj() if self.is_conjugated else self.factor) * x
        return self.linear(product.real + product.imag).tanh()


def complex_tied() -> nn.Module:
    torch.manual_seed(0)
    factor = nn.Parameter(torch.randn(4, dtype=torch.complex128))
    return nn.Sequential(Rotated(factor, False), Rotated(factor, True))


def conjugated_batch() -> Tensor:
    return torch.randn(6, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)).conj()


def complex_gradients() -> Values:
    """What a rank holds after a step whose batch, a conjugated view, is given to the first rank only."""
    x, model = conjugated_batch(), complex_tied()
    plan = quick_plan(model, (x,), ranks=2, microbatches=2)
    pipe = penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss, inputs="first")
    pipe.step(*((x,) if dist.get_rank() == 0 else ()), target=x.abs() if dist.get_rank() == 0 else None)
    return values(pipe)


@pytest.mark.gloo
def test_conjugated_batches_and_gradients_are_sent_by_their_values(pools: Pools) -> None:
    plain, x = complex_tied(), conjugated_batch()
    WholeModel(plain, nn.functional.mse_loss).step(x, target=x.abs())
    assert_parts_close(pools[2].run(complex_gradients), plain)


def trained_by_adam(ranks: int) -> tuple[list[Tensor], Values, dict[str, Tensor]]:
    """Five steps with clipping: the norms, what this rank holds, and the whole model."""
    pipe = tied_pipe(ranks=ranks)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    norms = []
    for _ in range(5):
        optimizer.zero_grad()
        pipe.step(X, target=TARGET)
        norms.append(pipe.clip_grad_norm_(0.5))
        optimizer.step()
    return norms, values(pipe), pipe.full_state_dict(everywhere=True)


def plainly_trained_by_adam() -> tuple[list[Tensor], nn.Module]:
    model = tied(6)
    optimizer, norms = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(5):
        optimizer.zero_grad()
        WholeModel(model, token_loss).step(X, target=TARGET)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return norms, model


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", some([3], [2, 3]))
def test_owners_do_not_drift_apart_and_count_once_in_the_norm(pools: Pools, ranks: int) -> None:
    norms, plain = plainly_trained_by_adam()
    results = pools[ranks].run(trained_by_adam, ranks)
    assert_parts_close([part for _, part, _ in results], plain, 1e-9)
    assert_owners_agree([part for _, part, _ in results])
    for found, _, full in results:
        assert torch.allclose(torch.stack(found), torch.stack(norms), rtol=1e-10)
        assert found == results[0][0]
        assert_identical(full, results[0][2])
        assert full.keys() == plain.state_dict().keys()


def states_of() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """The whole state on this rank, that of the rank, and the losses before and after another pipeline took it over."""
    pipe, other = tied_pipe(), tied_pipe(model=copy.deepcopy(tied(6)).apply(_zeroed))
    full = pipe.full_state_dict(everywhere=True)
    other.load_state_dict(full)
    before, after = pipe.eval(X, target=TARGET).loss, other.eval(X, target=TARGET).loss
    other.load_state_dict(pipe.state_dict())
    return pipe.full_state_dict(), pipe.state_dict(), before, after


def _zeroed(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


@pytest.mark.gloo
def test_states_are_gathered_and_loaded_under_the_original_names(pools: Pools) -> None:
    plain = tied(6)
    (full, first, before, after), (empty, second, _, _) = pools[2].run(states_of)
    assert_identical(full, plain.state_dict())
    assert empty == {}
    assert first.keys() | second.keys() == plain.state_dict().keys()
    assert {"head.weight", "mix"} <= second.keys()
    assert before == after


def language_model_gradients() -> Values:
    """GPT-2 without dropout, as it comes, its table tied to its head."""
    pipe, kwargs = language_pipe(*language_model())
    pipe.step(**kwargs)
    return values(pipe)


def language_model() -> tuple[nn.Module, dict[str, Any]]:
    model, _, kwargs = ZOO["gpt2"]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double(), kwargs


def language_pipe(model: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    plan = quick_plan(model, kwargs=kwargs, ranks=2, microbatches=2, schedule="1f1b")
    return penstock.Pipeline(model, plan), kwargs


@pytest.mark.gloo
def test_a_language_model_with_a_tied_head(pools: Pools) -> None:
    model, kwargs = language_model()
    model(**kwargs, use_cache=False).loss.backward()
    parts = pools[2].run(language_model_gradients)
    assert_parts_close(parts, model, 1e-5)
    assert torch.equal(parts[0]["gradient transformer.wte.weight"], parts[1]["gradient lm_head.weight"])


def sparsely_tied() -> nn.Module:
    """A table of which one end wants some rows, the other all of it."""
    model = tied(6)
    model.embed.sparse = True
    return model


def sparse_gradients() -> Values:
    pipe = tied_pipe(model=sparsely_tied())
    pipe.step(X, target=TARGET)
    return values(pipe)


@pytest.mark.gloo
def test_a_sparse_gradient_is_summed_with_a_dense_one(pools: Pools) -> None:
    plain = sparsely_tied()
    WholeModel(plain, token_loss).step(X, target=TARGET)
    assert_parts_close(pools[2].run(sparse_gradients), plain)


def error_if_frozen_on(rank: int, inputs: str) -> list[str]:
    """The errors of a step if one rank has frozen the shared matrix, then the loss once all ranks have."""
    model, found = tied(6), []
    plan = quick_plan(model, (X,), ranks=2, microbatches=3)
    options = penstock.RunOptions(deadline_seconds=10.0)
    pipe = penstock.Pipeline(model, plan, loss_fn=token_loss, options=options, inputs=inputs)
    is_given = dist.get_rank() == 0 or inputs == "all"
    batch, target = ((X,), TARGET) if is_given else ((), None)
    pipe.step(*batch, target=target)
    if dist.get_rank() == rank:
        model.mix.requires_grad_(False)
    with pytest.raises(penstock.RunError, match="must be the same on all of their ranks") as refused:
        pipe.step(*batch, target=target)
    found.append(str(refused.value))
    model.mix.requires_grad_(False)
    return [*found, str(float(pipe.step(*batch, target=target).loss))]


@pytest.mark.gloo
def test_a_tied_parameter_that_one_rank_freezes_is_refused_on_all(pools: Pools) -> None:
    for rank, inputs in ((0, "all"), (1, "all"), (1, "first")):
        first, second = pools[2].run(error_if_frozen_on, rank, inputs)
        assert first == second
        assert f"frozen on: [{rank}]" in first[0]
