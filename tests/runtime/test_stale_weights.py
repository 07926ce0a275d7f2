"""After training, the user's model has stale weights of other ranks' stages: it is not used silently."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)


def trained(model: nn.Module, local: bool = False, steps: int = 1) -> penstock.Pipeline:
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.step(X, target=TARGET)
        optimizer.step()
    return pipe


def refusal(model: nn.Module) -> str:
    with pytest.raises(penstock.RunError) as caught:
        model(X)
    return str(caught.value)


def forwards() -> dict[str, Any]:
    """Whether the model can be called, before and after a step, after loading, and after another step."""
    model = chain(4)
    pipe = trained(model, steps=0)
    before, early = model(X).detach(), copy.deepcopy(model)
    pipe.step(X, target=TARGET)
    torch.optim.SGD(pipe.parameters(), lr=0.5).step()
    refused = [refusal(model), refusal(copy.deepcopy(model))]
    early(X)  # a copy from before the step is what it was
    outputs = pipe.evaluate(X, return_outputs=True).outputs
    state = pipe.full_state_dict(everywhere=True)
    other = chain(4)
    other.load_state_dict(state)
    model.load_state_dict(state)
    after = model.eval()(X).detach()
    pipe.train()
    pipe.step(X, target=TARGET)
    refused.append(refusal(model))
    return {"before": before, "refused": refused, "outputs": outputs, "after": after, "other": other.eval()(X)}


@pytest.mark.gloo
def test_a_forward_of_the_model_is_refused_until_the_whole_state_is_loaded(pools: Pools) -> None:
    for found in pools[2].run(forwards):
        assert torch.equal(found["before"], chain(4)(X))
        torch.testing.assert_close(found["after"], found["outputs"])
        assert torch.equal(found["after"], found["other"])
        assert len(found["refused"]) == 3
        for text in found["refused"]:
            assert text.startswith("the model itself has stale weights")
            assert "try: model.load_state_dict(pipe.full_state_dict(everywhere=True))" in text


def state_dicts() -> tuple[list[str], int]:
    """The warnings about the model's state dict, and the number of those in a whole checkpoint round."""
    model = chain(4)
    pipe = trained(model)
    with warnings.catch_warnings(record=True) as internal:
        warnings.simplefilter("always")
        pipe.load_state_dict(pipe.state_dict())
        pipe.load_state_dict(pipe.full_state_dict(everywhere=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.state_dict()
        model.state_dict()
    return [str(each.message) for each in caught], len(internal)


@pytest.mark.gloo
def test_the_state_dict_of_the_model_gets_one_warning(pools: Pools) -> None:
    for found, internal in pools[2].run(state_dicts):
        assert internal == 0
        assert len(found) == 1
        assert "stale weights" in found[0]
        assert "pipe.full_state_dict()" in found[0]


def replanned() -> float:
    """A second plan, another Pipeline, new shapes and `check` use a model that is stale."""
    model = chain(4)
    pipe = trained(model)
    pipe.step(X[:3], target=TARGET[:3])
    state = pipe.full_state_dict(everywhere=True)
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="gpipe")
    penstock.check(model, plan, (X,), loss_fn=mse_loss, target=TARGET)
    other = penstock.Pipeline(model, plan, loss_fn=mse_loss)
    other.load_state_dict(state)
    assert len(model._forward_pre_hooks) == 1
    return float(other.evaluate(X, target=TARGET).loss) - float(pipe.evaluate(X, target=TARGET).loss)


@pytest.mark.gloo
def test_planning_checking_and_recording_are_not_refused(pools: Pools) -> None:
    assert pools[2].run(replanned) == pytest.approx([0.0, 0.0], abs=1e-15)


def test_a_local_pipeline_trains_the_model_itself() -> None:
    model = chain(4)
    pipe = trained(model, local=True)
    expected: Tensor = pipe.evaluate(X, return_outputs=True).outputs
    torch.testing.assert_close(model.eval()(X), expected)
    assert not model._forward_pre_hooks
