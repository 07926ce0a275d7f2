"""What a step brings home: losses, weights and outputs, the same on every rank."""

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.parity import assert_close
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, noise, seeded
from tests.zoo import ZOO

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)
SIZES = (2, 2, 2, 1)


@dataclass
class Answer:
    """An output that only its model knows."""

    first: Tensor
    rest: dict[str, Any]


class Answering(nn.Module):
    """Returns its result in one of several containers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        """The results of the last two blocks."""
        for block in self.blocks:
            before, x = x, block(x)
        forms = {
            "tensor": lambda: x,
            "tuple": lambda: (x, [before, None, 3]),
            "dict": lambda: {"x": x, "parts": {"before": before, "note": "text"}},
            "dataclass": lambda: Answer(x, {"before": before}),
        }
        return forms[self.form]()


def first_of(output: Any) -> Tensor:
    """The tensor that the loss is about."""
    if isinstance(output, dict):
        return output.get("x", output.get("first"))
    return output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else output.first


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return mse_loss(first_of(output), target)


def answering(form: str, local: bool = True) -> Any:
    model = seeded(Answering(form))
    plan = quick_plan(model, (X,), ranks=2, microbatches=4, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=loss_fn, local=local)


def test_there_is_a_loss_and_a_weight_for_every_microbatch() -> None:
    result, plain = answering("tensor").step(X, target=TARGET), seeded(Answering("tensor"))
    parts = [mse_loss(plain(x), t).detach() for x, t in zip(X.split(SIZES), TARGET.split(SIZES), strict=True)]
    assert_close(dict(enumerate(result.losses)), dict(enumerate(parts)))
    assert result.weights == tuple(size / 7 for size in SIZES)
    assert sum(w * part for w, part in zip(result.weights, parts, strict=True)) == pytest.approx(float(result.loss))


def test_outputs_and_trace_are_left_out_unless_asked_for() -> None:
    result = answering("tensor").step(X, target=TARGET)
    assert result.outputs is None
    assert result.trace is None


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "dataclass"])
def test_outputs_of_the_microbatches_are_merged(form: str) -> None:
    pipe, plain = answering(form), seeded(Answering(form))(X)
    for result in (pipe.step(X, target=TARGET, return_outputs=True), pipe.eval(X, return_outputs=True)):
        assert type(result.outputs) is type(plain)
        assert_close({"x": first_of(result.outputs)}, {"x": first_of(plain).detach()})
        assert not first_of(result.outputs).requires_grad


def test_a_step_that_is_over_holds_on_to_no_batch() -> None:
    pipe, batch = answering("tensor"), X.clone()
    pipe.step(batch, target=TARGET, return_outputs=True)
    held = weakref.ref(batch)
    del batch
    gc.collect()
    assert held() is None


def test_an_evaluation_without_a_target_has_no_loss() -> None:
    result = answering("tensor").eval(X, return_outputs=True)
    assert result.loss is None
    assert result.losses == ()


def outputs_on_a_rank(forms: list[str]) -> list[Any]:
    found = []
    for form in forms:
        pipe = answering(form, local=False)
        result, evaluated = pipe.step(X, target=TARGET, return_outputs=True), pipe.eval(X, return_outputs=True)
        found.append((result.losses, result.weights, first_of(result.outputs), first_of(evaluated.outputs)))
    return found


@pytest.mark.gloo
def test_every_process_has_the_outputs_and_losses(pools: Pools) -> None:
    forms = ["tensor", "tuple", "dict", "dataclass"]
    expected = first_of(seeded(Answering("tensor"))(X)).detach()
    for ranks in zip(*pools[2].run(outputs_on_a_rank, forms), strict=True):
        assert ranks[0][:2] == ranks[1][:2]
        for _, _, trained, evaluated in ranks:
            assert_close({"step": trained, "eval": evaluated}, {"step": expected, "eval": expected})


def language_outputs() -> tuple[Tensor, Tensor, Tensor]:
    model, _, kwargs = ZOO["llama"]()
    plan = quick_plan(model, kwargs=kwargs, ranks=2, microbatches=2, schedule="1f1b")
    result = penstock.Pipeline(model, plan).step(**kwargs, return_outputs=True)
    return result.loss, result.outputs["loss"], result.outputs["logits"]


@pytest.mark.gloo
def test_every_process_has_the_output_of_a_language_model(pools: Pools) -> None:
    model, _, kwargs = ZOO["llama"]()
    with torch.no_grad():
        expected = model(**kwargs, use_cache=False)
    for loss, inner, logits in pools[2].run(language_outputs):
        assert torch.allclose(logits, expected.logits, atol=1e-5)
        assert float(loss) == pytest.approx(float(expected.loss), rel=1e-5)
        assert float(inner) == pytest.approx(float(expected.loss), rel=1e-5)
