"""Every loss of the table has the gradients of the whole batch in uneven microbatches, or causes a warning."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.batches import Batch, BatchSplitter, microbatch_sizes
from penstock.loss.detect_reduction import decide
from penstock.loss.loss_function import LossFunction
from tests.loss.table import CLASSES, PLACES, SAMPLES, TABLE, Row, numbers
from tests.plans import quick_plan, shared_recordings
from tests.selection import some

X = numbers(SAMPLES, PLACES, 4, seed=0)
TOLERANCES = {"in float32": 1e-6, "in half": 3e-2}
# Recording a model takes longer than recording a loss function: what is exact in the same way is tried once.
ALONE = [name for name in TABLE if name.startswith(("entropy", "distribution"))]
RETURNED = [name for name, row in TABLE.items() if name.startswith("entropy") or row.expected == "warned"]
# What they read from outputs is not the same in every microbatch, which a recorded model may not do.
RETURNED.remove("regression: by numpy")
RETURNED.remove("entropy: a function that prints")


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
    with shared_recordings():
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


def assert_exact_or_warned(name: str, row: Row, step: Any, whole: Any, model: nn.Module) -> None:
    """What is expected of the row is what happens."""
    loss = whole()
    loss.reshape(()).backward()
    expected = [*gradients(model, row.loss_fn), loss.detach().reshape(())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = step()
    warned = [text for each in caught if "loop over the microbatches" in (text := str(each.message))]
    found = [*gradients(model, row.loss_fn), result.loss]
    if row.expected == "warned":
        assert warned
        return
    tolerance = next((value for key, value in TOLERANCES.items() if key in name), 1e-12)
    assert not warned
    assert apart(found, expected) <= tolerance


def assert_function(name: str, microbatches: int) -> None:
    row = TABLE[name]
    options = penstock.RunOptions(nonfinite="ignore")
    pipe = penstock.Pipeline(MODEL, PLANS[microbatches], loss_fn=row.loss_fn, local=True, options=options)
    assert_exact_or_warned(
        name, row, lambda: pipe.step(X, target=row.target), lambda: row.loss_fn(MODEL(X), row.target), MODEL
    )


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", TABLE)
def test_a_loss_function_is_exact_or_causes_a_warning(name: str) -> None:
    assert_function(name, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some(ALONE[::4], ALONE))
def test_a_loss_function_is_exact_or_causes_a_warning_on_single_samples(name: str) -> None:
    assert_function(name, SAMPLES)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", some(RETURNED[::4], RETURNED))
def test_a_model_that_returns_its_loss_is_exact_or_causes_a_warning(name: str) -> None:
    row = TABLE[name]
    model = Scored(copy.deepcopy(row.loss_fn))
    batch = {"x": X, "labels": row.target}
    plan = quick_plan(model, kwargs=batch, ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, local=True, options=penstock.RunOptions(nonfinite="ignore"))
    assert_exact_or_warned(name, row, lambda: pipe.step(**batch), lambda: model(**batch), model)


# Their weights do not follow from those of pairs.
NOT_IN_PAIRS = {
    "entropy: times samples", "regression: unexplained variance", "regression: over the variance",
    "regression: degrees of freedom",
}  # fmt: skip


@pytest.mark.parametrize("microbatches", [3, pytest.param(SAMPLES, marks=pytest.mark.whole)])
def test_pairs_of_microbatches_are_enough_for_most(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loss.detect_reduction._MAX_TOGETHER", 0)
    sizes = microbatch_sizes(SAMPLES, microbatches)
    warned, wrong = set(), []
    for name, row in TABLE.items():
        y = MODEL(X).detach().requires_grad_()
        pieces = BatchSplitter(lambda x: None).split(Batch((X,), {}, row.target), microbatches)
        source = LossFunction(row.loss_fn, {})
        source.begin(pieces, y[: sizes[0]], sizes[0])
        decision, weights = decide(source, [(source.tensors(piece), piece.size) for piece in pieces], 1)
        if decision.problem:
            warned.add(name)
            continue
        (expected,) = torch.autograd.grad(row.loss_fn(y, row.target).reshape(()), y)
        parts = zip(y.split(sizes), pieces, weights, strict=True)
        total = sum(row.loss_fn(part, piece.target).reshape(()) * weight for part, piece, weight in parts if weight)
        (found,) = torch.autograd.grad(total, y)
        tolerance = next((value for key, value in TOLERANCES.items() if key in name), 1e-12)
        wrong += [name] if apart([found], [expected]) > tolerance else []
    assert wrong == []
    assert warned == NOT_IN_PAIRS | {name for name, row in TABLE.items() if row.expected == "warned"}


def test_the_table_is_long() -> None:
    expected = [row.expected for row in TABLE.values()]
    assert len(expected) >= 140
    assert expected.count("exact") >= 90
