"""Calls that training loops make on a module work on a Pipeline, or say what to call instead."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel

import penstock
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)


def pipe_of(model: nn.Module | None = None, **given: Any) -> penstock.Pipeline:
    model = chain(4) if model is None else model
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    return penstock.Pipeline(model, plan, **{"loss_fn": mse_loss, "local": True, **given})


def dropping() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), nn.Dropout(0.5)) for _ in range(4)))


def test_evaluate_is_eval() -> None:
    pipe = pipe_of()
    losses: list[Tensor] = []
    one = pipe.evaluate(X, target=TARGET, return_outputs=True, losses=losses)
    other = pipe.eval(X, target=TARGET, return_outputs=True)
    assert torch.equal(one.outputs, other.outputs)
    assert one.loss == other.loss
    assert losses == list(one.losses)


def test_train_and_eval_without_arguments_set_the_mode_as_those_of_a_module() -> None:
    model = dropping()
    pipe = pipe_of(model)
    assert pipe.training
    assert pipe.eval() is pipe
    assert not pipe.training
    assert not any(module.training for module in model.modules())
    calm = pipe.step(X, target=TARGET).loss
    assert float(calm) == pytest.approx(mse_loss(model(X), TARGET).item())
    assert pipe.train() is pipe
    assert all(module.training for module in model.modules())
    assert pipe.step(X, target=TARGET).loss != calm
    assert not pipe.train(False).training


def test_evaluating_keeps_the_mode() -> None:
    pipe = pipe_of(dropping())
    pipe.evaluate(X)
    assert pipe.training
    pipe.eval()
    pipe.evaluate(X)
    assert not pipe.training


@pytest.mark.parametrize("call", [lambda pipe: pipe(X), lambda pipe: pipe(), lambda pipe: pipe(X, target=TARGET)])
def test_calling_a_pipeline_says_what_to_call(call: Any) -> None:
    with pytest.raises(penstock.RunError, match=r"must not be called.*\ntry: pipe\.step\(x.*pipe\.evaluate\(x"):
        call(pipe_of())


def test_train_with_a_batch_says_what_to_call() -> None:
    with pytest.raises(penstock.RunError, match=r"mode must be True or False.*\ntry: pipe\.train\(\).*pipe\.step"):
        pipe_of().train(X)  # type: ignore[arg-type]


def test_the_repr_is_one_short_line() -> None:
    pipe = pipe_of()
    pipe.step(X, target=TARGET)
    assert repr(pipe) == "Pipeline(Sequential: 2 stages on 2 ranks, 1f1b, 2 microbatches, local, 1 step taken)"
    assert repr(pipe.plan).startswith("Plan(2 stages (uniform) on 2 ranks, schedule 1f1b, 2 microbatches")
    assert len(repr(pipe.plan)) < 160
    assert "\n" not in repr(pipe.plan)


def clipped(how: str) -> tuple[list[str], str]:
    """The warnings of three clippings on this rank, and the repr of its pipeline."""
    pipe = pipe_of(local=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            pipe.step(X, target=TARGET)
            if how == "norm":
                clip_grad_norm_(pipe.parameters(), 1.0)
            elif how == "list":
                torch.nn.utils.clip_grad_norm_([parameter for _, parameter in pipe.named_parameters()], 1.0)
            else:
                clip_grad_value_(pipe.parameters(), 1.0)
                pipe.clip_grad_norm_(1.0)
                torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    found = [each for each in caught if issubclass(each.category, penstock.PenstockWarning)]
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found], repr(pipe)


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["norm", "list"])
def test_clipping_the_parameters_of_one_rank_by_norm_gets_one_warning(how: str, pools: Pools) -> None:
    (first, text), (second, other) = pools[2].run(clipped, how)
    assert len(first) == 1
    assert first[0].endswith("\ntry: pipe.clip_grad_norm_(max_norm)")
    assert second == []
    assert "rank 0 with stages [0]" in text
    assert "rank 1 with stages [1]" in other


@pytest.mark.gloo
def test_other_uses_of_the_parameters_get_no_warning(pools: Pools) -> None:
    assert [found for found, _ in pools[2].run(clipped, "value")] == [[], []]


def refused_step() -> str:
    pipe = pipe_of(local=False)
    with pytest.raises(penstock.RunError) as error:
        torch.optim.LBFGS(pipe.parameters()).step(lambda: pipe.step(X, target=TARGET).loss)
    return str(error.value)


@pytest.mark.gloo
def test_lbfgs_is_refused_on_the_parameters_of_one_rank(pools: Pools) -> None:
    for text in pools[2].run(refused_step):
        assert text.startswith("LBFGS needs the gradients of all ranks, and has those of this rank\ntry: ")


def test_a_scaler_of_torch_is_refused_for_gradients_that_it_did_not_scale() -> None:
    pipe, scaler = pipe_of(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    scaler.scale(pipe.step(X, target=TARGET).loss)
    with pytest.raises(penstock.RunError, match=r"torch's GradScaler divides.*\ntry: scaler = penstock.GradScaler\(\)"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, pipe.parameters()))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert not any(map(torch.equal, before, pipe.parameters()))


def test_a_scaler_of_torch_may_scale_the_gradients_of_outputs() -> None:
    model, scaler = chain(4), torch.amp.GradScaler("cpu")
    whole = copy.deepcopy(model)
    pipe = pipe_of(model, loss_fn=None)
    result = pipe.forward(X)
    outputs = result.outputs.detach().requires_grad_()
    result.backward(torch.autograd.grad(scaler.scale(mse_loss(outputs, TARGET)), outputs)[0])
    scaler.step(torch.optim.SGD(pipe.parameters(), lr=0.1))
    mse_loss(whole(X), TARGET).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def averaged_parameters() -> tuple[str, bool]:
    model, initial = chain(4), chain(4)
    pipe = pipe_of(model, local=False)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)  # nothing was trained yet
    pipe.step(X, target=TARGET)
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    with pytest.raises(penstock.RunError) as error:
        averaged.update_parameters(model)
    model.load_state_dict(pipe.full_state_dict(everywhere=True))
    averaged.update_parameters(model)
    expected = [(first + second) / 2 for first, second in zip(initial.parameters(), model.parameters(), strict=True)]
    is_mean = all(torch.allclose(*pair) for pair in zip(averaged.parameters(), expected, strict=True))
    return str(error.value), is_mean


@pytest.mark.gloo
def test_averaging_a_model_with_stale_weights_is_refused(pools: Pools) -> None:
    for text, is_mean in pools[2].run(averaged_parameters):
        assert text.startswith("the model itself has stale weights")
        assert text.endswith("or average pipe.named_parameters() on every rank")
        assert is_mean


def test_clipping_all_parameters_of_a_local_pipeline_is_right() -> None:
    pipe = pipe_of()
    pipe.step(X, target=TARGET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm = clip_grad_norm_(pipe.parameters(), 1e9)
    assert float(norm) == pytest.approx(float(pipe.clip_grad_norm_(1e9)))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_reset_as_by_a_module(set_to_none: bool) -> None:
    pipe = pipe_of()
    pipe.step(X, target=TARGET)
    pipe.zero_grad(set_to_none)
    gradients = [parameter.grad for parameter in pipe.parameters()]
    assert all(gradient is None if set_to_none else not gradient.any() for gradient in gradients)


def test_an_attribute_of_modules_is_named_where_it_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'to'\ntry: model.to, of the model"):
        pipe_of().to("cpu")
    with pytest.raises(AttributeError, match=r"no attribute 'frobnicate'$"):
        pipe_of().frobnicate()


def test_a_copy_is_refused_with_the_ways_to_save() -> None:
    with pytest.raises(penstock.RunError, match=r"cannot be copied or pickled\ntry: pipe.save\(directory\)"):
        copy.deepcopy(pipe_of())


def test_gradients_of_outputs_are_given_in_their_structure_or_by_name() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = chain(2), chain(2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    def coupled(outputs: Any) -> Tensor:
        return (outputs[0] @ outputs[1].T).logsumexp(0).sum()

    model, whole = Pair(), Pair()
    whole.load_state_dict(model.state_dict())
    result = pipe_of(model, loss_fn=None).forward(X)
    outputs = [output.detach().requires_grad_() for output in result.outputs]
    gradients = torch.autograd.grad(coupled(outputs), outputs)
    result.backward(gradients)
    result.backward({"0": gradients[0], "1": gradients[1]})
    (2 * coupled(whole(X))).backward()
    for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    with pytest.raises(penstock.RunError, match=r"structure of the outputs.*got: no name: Tensor\)\ntry: 0, 1"):
        result.backward(gradients[0])


def test_backward_of_a_forward_with_earlier_weights_is_refused() -> None:
    pipe = pipe_of(loss_fn=None)
    result, later = pipe.forward(X), pipe.forward(X)
    result.backward(torch.ones_like(result.outputs))
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    with pytest.raises(penstock.RunError, match=r"weights must be those of the forward.*parameter: 0.*\ntry: backward"):
        later.backward(torch.ones_like(later.outputs))
    again = pipe.forward(X)
    again.backward(torch.ones_like(again.outputs))


def late_backward() -> str:
    pipe = pipe_of(loss_fn=None, local=False)
    result = pipe.forward(X)
    if torch.distributed.get_rank() == 0:
        nn.init.zeros_(next(pipe.parameters()))
    with pytest.raises(penstock.RunError) as error:
        result.backward(torch.ones_like(result.outputs))
    return str(error.value)


@pytest.mark.gloo
def test_weights_that_one_rank_changed_after_a_forward_are_refused_on_all_ranks(pools: Pools) -> None:
    for text in pools[2].run(late_backward):
        assert text.startswith("the weights must be those of the forward, and were changed since")
