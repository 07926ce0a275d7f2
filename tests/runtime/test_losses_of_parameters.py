"""A loss function may use the parameters of its rank; those of other ranks are refused."""

from typing import Any

import pytest
from torch import nn
from torch.nn.functional import mse_loss

import penstock
from tests.parity import Execution, Values, WholeModel, accumulate, assert_close, split
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)


def decaying(model: nn.Module) -> Any:
    """A penalty on all parameters."""
    return lambda y, t: mse_loss(y, t) + 0.1 * sum(p.square().sum() for p in model.parameters())


def last_layer(model: nn.Module) -> Any:
    """A penalty on the last layer."""
    return lambda y, t: mse_loss(y, t) + 0.1 * model[3].linear.weight.square().sum()  # type: ignore[index]


def detached(model: nn.Module) -> Any:
    """A factor from the first layer, without a gradient."""
    return lambda y, t: mse_loss(y * model[0].linear.weight.detach().mean(), t)  # type: ignore[index]


def whole_values(make: Any) -> Values:
    model = chain(4)
    return accumulate(WholeModel(model, make(model)), X, target=TARGET)


def split_values(make: Any, execution: str) -> list[Values]:
    model = chain(4)
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    return [accumulate(split(execution, model, plan, make(model)), X, target=TARGET)]


@pytest.mark.parametrize("make", [decaying, last_layer, detached])
@pytest.mark.filterwarnings("error")
def test_a_local_pipeline_may_use_all_parameters(make: Any) -> None:
    (found,) = split_values(make, "local")
    assert_close(found, whole_values(make))


@pytest.mark.gloo
def test_parameters_of_the_last_rank_may_be_used(pools: Pools) -> None:
    (found,) = Execution("processes", pools).run(split_values, 2, last_layer)
    assert_close(found, whole_values(last_layer))


@pytest.mark.gloo
@pytest.mark.parametrize(("make", "names"), [(decaying, "0.linear.bias, 0.linear.weight"), (detached, "0.linear.w")])
def test_parameters_of_another_rank_are_refused_with_a_hint(make: Any, names: str) -> None:
    with pytest.raises(penstock.RunError, match="parameters of the model that are on another rank") as caught:
        penstock.launch(split_values, 2, make, "processes")
    assert names in str(caught.value)
    assert "try: penstock.add_loss" in str(caught.value)
