"""Wrong arguments of a Pipeline are refused: the message has the problem, the value, and what to try."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.plans import quick_plan
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
MODEL = chain(4)
PLAN = quick_plan(MODEL, (X,), ranks=2, microbatches=2, schedule="1f1b")


def pipe_of(**given: Any) -> penstock.Pipeline:
    return penstock.Pipeline(**{"model": MODEL, "plan": PLAN, "loss_fn": mse_loss, "local": True, **given})


def refusal(call: Any) -> str:
    with pytest.raises(penstock.PenstockError) as caught:
        call()
    return str(caught.value)


GIVEN = [
    ({"model": "gpt2"}, "model must be a torch.nn.Module (got: 'gpt2' (str))"),
    ({"model": None}, "model must be a torch.nn.Module (got: None (NoneType))"),
    ({"model": nn.Linear}, "model must be a torch.nn.Module (got: <class 'torch.nn.modules.linear.Linear'>"),
    ({"plan": None}, "plan must be a Plan (got: None (NoneType))"),
    ({"plan": "plan.json"}, "plan must be a Plan (got: 'plan.json' (str))"),
    ({"plan": PLAN.schedule}, "plan must be a Plan (got: Schedule("),
    ({"loss_fn": "mse"}, "loss_fn must be a function (got: 'mse' (str))"),
    ({"loss_fn": nn.MSELoss}, "loss_fn must be a function, got a class (got: MSELoss)"),
    ({"local": "yes"}, "local must be True or False (got: 'yes' (str))"),
    ({"mesh": object()}, "mesh must be None with local=True"),
    ({"mesh": 2, "local": False}, "mesh must be a DeviceMesh (got: 2 (int))"),
    ({"inputs": "bogus"}, 'inputs must be "all" or "first" (got: \'bogus\' (str))'),
    ({"inputs": None}, 'inputs must be "all" or "first" (got: None (NoneType))'),
    ({"inputs": ["all"]}, 'inputs must be "all" or "first" (got: [\'all\'] (list))'),
    ({"reduction": "median"}, 'reduction must be "mean", "tokens", "sum" or None (got: \'median\' (str))'),
    ({"reduction": 1}, 'reduction must be "mean", "tokens", "sum" or None (got: 1 (int))'),
    ({"split": 0}, "split must be a dict from argument names to rules (got: 0 (int))"),
    ({"split": ["x"]}, "split must be a dict from argument names to rules (got: ['x'] (list))"),
    ({"split": {"bogus": 0}}, "split must name arguments of the model (name: 'bogus')"),
    ({"split": {"input": "0"}}, "a value of split must be a rule (name: 'input', got: '0')"),
    ({"split": {0: 0}}, "split must name arguments by strings (got: 0)"),
    ({"parallelize_fn": "fsdp"}, "parallelize_fn must be a function (got: 'fsdp' (str))"),
    ({"parallelize_fn": nn.Identity()}, "parallelize_fn must be a function (got: Identity() (Identity))"),
    ({"scaler": 65536.0}, "scaler must be a GradScaler (got: 65536.0 (float))"),
    ({"options": {"seed": 1}}, "options must be RunOptions (got: {'seed': 1} (dict))"),
    ({"options": None}, "options must be RunOptions (got: None (NoneType))"),
]


@pytest.mark.parametrize(("given", "words"), GIVEN)
def test_a_wrong_argument_is_refused_with_its_value(given: dict[str, Any], words: str) -> None:
    assert refusal(lambda: pipe_of(**given)).startswith(words)


@pytest.mark.parametrize("given", [given for given, _ in GIVEN if "local" not in given])
def test_a_wrong_argument_comes_with_a_way_out(given: dict[str, Any]) -> None:
    assert "\ntry: " in refusal(lambda: pipe_of(**given))


OPTIONS = [
    ({"seed": -1}, "seed must be an integer of 0 or more (got: -1)"),
    ({"seed": "1"}, "seed must be an integer of 0 or more (got: '1')"),
    ({"seed": True}, "seed must be an integer of 0 or more (got: True)"),
    ({"nonfinite": "stop"}, 'nonfinite must be "raise", "skip" or "ignore" (got: \'stop\')'),
    ({"nonfinite": ["skip"]}, 'nonfinite must be "raise", "skip" or "ignore" (got: [\'skip\'])'),
    ({"deadline_seconds": "60"}, "deadline_seconds must be a number above 0 (got: '60')"),
    ({"deadline_seconds": 0}, "deadline_seconds must be a number above 0 (got: 0)"),
    ({"deadline_seconds": float("nan")}, "deadline_seconds must be a number above 0 (got: nan)"),
    ({"deadline_seconds": None}, "deadline_seconds must be a number above 0 (got: None)"),
    ({"check_inputs_every": 1.5}, "check_inputs_every must be an integer of 0 or more (got: 1.5)"),
    ({"restore_gradients": 1}, "restore_gradients must be True or False (got: 1)"),
]


@pytest.mark.parametrize(("given", "words"), OPTIONS)
def test_a_wrong_option_is_refused_with_its_value(given: dict[str, Any], words: str) -> None:
    assert refusal(lambda: penstock.RunOptions(**given)).startswith(words)


SCALERS = [
    ({"init_scale": "big"}, "init_scale must be a number (got: 'big')"),
    ({"init_scale": float("inf")}, "init_scale must be a number (got: inf)"),
    ({"init_scale": 0.0}, "init_scale must be above 0"),
    ({"growth_factor": None}, "growth_factor must be a number (got: None)"),
    ({"growth_factor": 0.5}, "init_scale must be above 0, growth_factor at least 1"),
    ({"backoff_factor": 1.0}, "init_scale must be above 0, growth_factor at least 1 and backoff_factor between"),
    ({"growth_interval": 0}, "growth_interval must be an integer above 0 (got: 0)"),
    ({"growth_interval": 2.5}, "growth_interval must be an integer above 0 (got: 2.5)"),
]


@pytest.mark.parametrize(("given", "words"), SCALERS)
def test_a_wrong_scaler_is_refused_with_its_value(given: dict[str, Any], words: str) -> None:
    assert refusal(lambda: penstock.GradScaler(**given)).startswith(words)


def test_a_step_without_the_target_that_its_loss_function_needs_is_refused() -> None:
    pipe = pipe_of()
    words = refusal(lambda: pipe.step(X))
    assert words.startswith("AttributeError: 'NoneType' object has no attribute 'size' (step: 0, rank: 1, stage: 1,")
    assert words.endswith("try: pipe.step(x, target=y); a loss function that needs no target is called with None")
    assert pipe.eval(X).loss is None


def test_a_loss_function_may_do_without_a_target() -> None:
    loss = pipe_of(loss_fn=lambda output, target: output.square().mean()).step(X).loss
    assert float(loss) == pytest.approx(MODEL(X).square().mean().item())


CLIPPINGS = [
    (("1",), "max_norm must be a number of 0 or more (got: '1')"),
    ((-1.0,), "max_norm must be a number of 0 or more (got: -1.0)"),
    ((float("nan"),), "max_norm must be a number of 0 or more (got: nan)"),
    ((None,), "max_norm must be a number of 0 or more (got: None)"),
    ((True,), "max_norm must be a number of 0 or more (got: True)"),
    ((1.0, 0), "norm_type must be a number above 0, or inf (got: 0)"),
    ((1.0, -2.0), "norm_type must be a number above 0, or inf (got: -2.0)"),
    ((1.0, float("nan")), "norm_type must be a number above 0, or inf (got: nan)"),
    ((1.0, "two"), "norm_type must be a number above 0, or inf (got: 'two')"),
    ((1.0, None), "norm_type must be a number above 0, or inf (got: None)"),
]


@pytest.mark.parametrize(("given", "words"), CLIPPINGS)
def test_a_wrong_limit_or_type_of_a_norm_is_refused(given: tuple[Any, ...], words: str) -> None:
    assert refusal(lambda: pipe_of().clip_grad_norm_(*given)).startswith(words)


def changed(**values: Any) -> dict[str, Any]:
    return {**MODEL.state_dict(), **{name.replace("_", "."): value for name, value in values.items()}}


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in MODEL.state_dict().items() if key != name}


def raised(value: Any) -> Any:
    return value + 1 if isinstance(value, Tensor) else value


STATES = [
    (None, "a state dict must map names to tensors (got: NoneType)"),
    ([1, 2], "a state dict must map names to tensors (got: list)"),
    ({}, "a state dict must have all parameters and buffers (missing: 12, first: 0.seen)"),
    (without("2.linear.bias"), "a state dict must have all parameters and buffers (missing: 1, first: 2.linear.bias)"),
    ({**without(""), "0.linear.wieght": X}, "must have names of the model only (name: '0.linear.wieght')"),
    ({**without(""), 0: X}, "a state dict must have names of the model only (name: 0)"),
    (changed(**{"3_linear_bias": 1.0}), "a state dict must map names to tensors (name: 3.linear.bias, got: float)"),
    (changed(**{"3_linear_bias": X}), "must have the shape that it has in the model (name: 3.linear.bias, got: [6,"),
    (changed(**{"3_linear_bias": torch.empty(WIDTH, device="meta")}), "must not be on the meta device"),
]


@pytest.mark.parametrize(("state", "words"), STATES)
def test_a_wrong_state_dict_is_refused_before_any_number_is_changed(state: Any, words: str) -> None:
    model = chain(4)
    pipe = pipe_of(model=model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = {name: raised(value) for name, value in state.items()} if isinstance(state, dict) else state
    assert words in refusal(lambda: pipe.load_state_dict(other))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_misspelt_name_of_a_state_dict_comes_with_the_right_one() -> None:
    words = refusal(lambda: pipe_of().load_state_dict({**MODEL.state_dict(), "0.linear.wieght": X}))
    assert words.endswith("try: '0.linear.weight'")
