"""Bytes of gradients, optimizer state and master weights."""

import pytest

from penstock.errors import CostError
from penstock.ir import OPTIMIZERS, TensorSpec, TrainingState

MATRIX = TensorSpec((10, 100), "float32", requires_grad=True)
HALF = TensorSpec((10, 100), "bfloat16", requires_grad=True)
VECTOR = TensorSpec((1000,), "float32", requires_grad=True)


@pytest.mark.parametrize(
    ("optimizer", "precision", "spec", "per_value"),
    [
        ("adamw", None, MATRIX, 8),
        ("adamw", None, HALF, 4),
        ("adamw", "bf16", HALF, 12),
        ("adamw", "bf16", MATRIX, 8),
        ("adamw", "pure-bf16", HALF, 4),
        ("adam8bit", None, MATRIX, 2),
        ("adam8bit", "fp16", TensorSpec((10, 100), "float16", requires_grad=True), 6),
        ("sgd", None, MATRIX, 0),
        ("sgd", "bf16", HALF, 4),
        ("muon", None, MATRIX, 4),
        ("muon", None, VECTOR, 8),
        ("none", "bf16", HALF, 0),
    ],
)
def test_bytes_per_value(optimizer, precision, spec, per_value):
    assert TrainingState(optimizer, precision).optimizer_bytes(spec) == 1000 * per_value
    assert TrainingState(optimizer, precision).gradient_bytes(spec) == spec.bytes


def test_adamw_in_mixed_precision_takes_sixteen_bytes_per_parameter_in_any_form():
    state = TrainingState("adamw", "bf16")
    for spec in (HALF, MATRIX):
        assert spec.bytes + state.gradient_bytes(spec) + state.optimizer_bytes(spec) == 16 * 1000


def test_frozen_parameters_have_neither():
    frozen = TensorSpec((1000,), "float32")
    assert TrainingState("adamw").optimizer_bytes(frozen) == TrainingState("adamw").gradient_bytes(frozen) == 0


def test_names():
    assert TrainingState.named("AdamW") == TrainingState.named("adam") == TrainingState("adamw")
    assert TrainingState.named(None) == TrainingState("none")
    assert all(TrainingState.named(name).optimizer == name for name in OPTIMIZERS)


@pytest.mark.parametrize(
    ("optimizer", "precision", "text"),
    [("adamm", None, "did you mean adam"), (3, None, "must be a name"), ("sgd", "int4", "precision must be")],
)
def test_wrong_names(optimizer, precision, text):
    with pytest.raises(CostError, match=text):
        TrainingState.named(optimizer, precision)
    if precision is None:
        with pytest.raises(CostError, match="unknown optimizer"):
            TrainingState(optimizer)
