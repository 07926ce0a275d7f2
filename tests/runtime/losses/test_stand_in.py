"""A model that returns its loss is tried without running any of its blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.capture import capture, split_batch, without_cache
from penstock.runtime.losses.case import Case
from penstock.runtime.losses.model_rule import ModelRule
from penstock.runtime.losses.stand_in import try_model
from penstock.runtime.losses.verdict import Verdict
from tests.zoo import ZOO

X, T = torch.randn(6, 4), torch.randn(6, 3)


class Counted(nn.Linear):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        Counted.calls += 1
        return super().forward(x)


class Scored(nn.Module):
    """Layers, and a loss of them."""

    def __init__(self, loss: Any, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counted(4, 4), nn.Dropout(0.5), Counted(4, 3)])
        self.loss, self.last = loss, last or nn.Identity()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss alone."""
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.last(x), labels)


def judged(loss: Any, microbatches: int = 2, last: nn.Module | None = None) -> Verdict:
    model = Scored(loss, last)
    pieces = split_batch(model.forward, (X, T), {}, None, microbatches)
    captured = capture(model, pieces[0].args)
    Counted.calls = 0
    found = ModelRule(captured, None).of(captured.first, Case(pieces, 0))
    assert Counted.calls == 0
    return found


@pytest.mark.parametrize("microbatches", [2, 6])
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (functional.mse_loss, "mean"),
        (nn.MSELoss(), "mean"),
        (lambda y, t: (y - t).square().sum() * (1 / len(y)), "mean"),
        (lambda y, t: (y - t.view(t.shape[0], -1)).square().sum() / 3, "sum"),
        (lambda y, t: functional.mse_loss(y, t) * len(y), "sum"),
        (lambda y, t: torch.einsum("bi,bi->", y, t), "sum"),
    ],
)
def test_numbers_tell_the_rule(loss: Any, kind: str, microbatches: int) -> None:
    found = judged(loss, microbatches)
    assert (found.rule.kind, found.doubts) == (kind, ())


@pytest.mark.parametrize("microbatches", [2, 6])
@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: (y - t).square().sum() / (y.numel() - 1),
        lambda y, t: (y - y.roll(1, 0)).square().mean(),
        lambda y, t: torch.cdist(y, t).mean(),
        lambda y, t: functional.mse_loss(y[0], t[0]),
    ],
)
def test_samples_that_act_on_each_other_are_seen(loss: Any, microbatches: int) -> None:
    assert judged(loss, microbatches).doubts


class Learned(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """Scaled squares."""
        return functional.mse_loss(y, t) * self.scale


def test_a_part_that_is_the_loss_itself_runs_as_it_is() -> None:
    assert judged(Learned()).rule.kind == "mean"


class Pair(nn.Module):
    """A block that returns two things."""

    def __init__(self, hands_on: bool) -> None:
        super().__init__()
        self.weight, self.hands_on = nn.Parameter(torch.randn(3, 3)), hands_on

    def forward(self, x: Tensor) -> dict[str, Any]:
        """A result and something else."""
        return {"result": x @ self.weight, "more": (x if self.hands_on else x.exp(), None)}


def of_pair(y: dict[str, Any], t: Tensor) -> Tensor:
    return (y["result"] - t).square().sum() * (1 / len(t)) + y["more"][0].mean()


def test_a_block_may_return_a_structure() -> None:
    found = judged(of_pair, last=Pair(hands_on=False))
    assert (found.rule.kind, found.doubts, found.is_read) == ("mean", (), False)


def test_where_a_block_hands_on_what_it_was_given_what_was_read_must_do() -> None:
    found = judged(lambda y, t: functional.mse_loss(y["result"], t), last=Pair(hands_on=True))
    assert (found.rule.kind, found.doubts, found.is_read) == ("mean", (), True)


def test_hooks_and_state_are_left_alone() -> None:
    model = Scored(functional.mse_loss)
    called: list[str] = []
    model.register_forward_hook(lambda module, args, result: called.append("model"))
    model.layers[0].register_forward_hook(lambda module, args, result: called.append("layer"))
    pieces = split_batch(model.forward, (X, T), {}, None, 2)
    captured = capture(model, pieces[0].args)
    called.clear()
    state, mode = torch.get_rng_state(), model.training
    assert try_model(captured, captured.first, Case(pieces, 0)).evidence is not None
    assert (called, mode) == ([], model.training)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


SOME = (
    "llama", "gemma3", "deepseek_v3", "opt", "bert_question_answering", "deberta_v2", "t5", "vit", "swin", "tied",
    "in_place", "non_contiguous", "model_output_between", "long_skips", "lora", "checkpointed", "hidden_states",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", SOME)
def test_models_whose_samples_do_not_act_on_each_other_raise_no_doubt(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    pieces = split_batch(model.forward, args, without_cache(model, kwargs), None, 1)
    captured = capture(model, pieces[0].args, pieces[0].kwargs)
    assert ModelRule(captured, None).of(captured.first, Case(pieces, 0)).doubts == ()
