"""Every loss of the table has the gradients of the whole batch in uneven microbatches, or is said not to have them."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.loss.table import CLASSES, PLACES, SAMPLES, TABLE, Row, numbers
from tests.runtime.plans import quick_plan, recorded_once

X = numbers(SAMPLES, PLACES, 4, seed=0)
TOLERANCES = {"in float32": 1e-6, "in half": 3e-2}
# Recording a model takes longer than recording a loss function: what is exact in the same way is tried once.
ALONE = [name for name in TABLE if name.startswith(("entropy", "distribution"))]
RETURNED = [name for name, row in TABLE.items() if name.startswith("entropy") or row.expected == "warned"]
RETURNED.remove("regression: by numpy")


class Scores(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, CLASSES)])
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of all classes at every place."""
        first, second = self.blocks
        return second(torch.tanh(first(x)))


class Scored(nn.Module):
    """The scores, and the loss of them."""

    def __init__(self, loss_fn: Any) -> None:
        super().__init__()
        self.scores, self.loss_fn = Scores(), loss_fn

    def forward(self, x: Tensor, labels: Any) -> Tensor:
        """The loss alone."""
        return self.loss_fn(self.scores(x), labels)


MODEL = Scores()
PLANS = {count: quick_plan(MODEL, (X,), ranks=2, microbatches=count, schedule="1f1b") for count in (3, SAMPLES)}


@pytest.fixture(autouse=True)
def _once() -> Iterator[None]:
    """One model is recorded once for the whole table."""
    with recorded_once():
        yield


def gradients(model: nn.Module, loss_fn: Any = None) -> list[Tensor]:
    own = [*model.parameters(), *(loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ())]
    found = [parameter.grad.clone() for parameter in own if parameter.grad is not None]
    for parameter in own:
        parameter.grad = None
    return found


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    scale = max(float(number.abs().max()) for number in expected) or 1.0
    return max(float((one - other).abs().max()) / scale for one, other in zip(found, expected, strict=True))


def assert_exact_or_said(name: str, row: Row, step: Any, whole: Any, model: nn.Module) -> None:
    """What is expected of the row is what happens."""
    loss = whole()
    loss.reshape(()).backward()
    expected = [*gradients(model, row.loss_fn), loss.detach().reshape(())]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = step()
    words = [str(one.message) for one in said if "loop over the microbatches" in str(one.message)]
    found = [*gradients(model, row.loss_fn), result.loss]
    if row.expected == "warned":
        assert words
        return
    tolerance = next((value for key, value in TOLERANCES.items() if key in name), 1e-12)
    assert not words
    assert apart(found, expected) <= tolerance


def assert_function(name: str, microbatches: int) -> None:
    row = TABLE[name]
    options = penstock.RunOptions(nonfinite="ignore")
    pipe = penstock.Pipeline(MODEL, PLANS[microbatches], loss_fn=row.loss_fn, local=True, options=options)
    assert_exact_or_said(
        name, row, lambda: pipe.step(X, target=row.target), lambda: row.loss_fn(MODEL(X), row.target), MODEL
    )


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", TABLE)
def test_a_loss_function_is_exact_or_said_not_to_be(name: str) -> None:
    assert_function(name, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALONE)
def test_a_loss_function_is_so_on_single_samples_too(name: str) -> None:
    assert_function(name, SAMPLES)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", RETURNED)
def test_a_model_that_returns_its_loss_is_exact_or_said_not_to_be(name: str) -> None:
    row = TABLE[name]
    model = Scored(copy.deepcopy(row.loss_fn))
    batch = {"x": X, "labels": row.target}
    plan = quick_plan(model, kwargs=batch, ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, local=True, options=penstock.RunOptions(nonfinite="ignore"))
    assert_exact_or_said(name, row, lambda: pipe.step(**batch), lambda: model(**batch), model)


def test_the_table_is_long() -> None:
    expected = [row.expected for row in TABLE.values()]
    assert len(expected) >= 140
    assert expected.count("exact") >= 90
