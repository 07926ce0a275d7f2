"""A loss function that uses parameters of the model is right where they are, and refused where they are not."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.runtime.models import WIDTH, chain, noise
from tests.runtime.oracle import Numbers, assert_equal, numbers
from tests.runtime.plans import quick_plan
from tests.runtime.workers import Pools

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)


def decaying(model: nn.Module) -> Any:
    """All parameters are kept small."""
    return lambda y, t: mse_loss(y, t) + 0.1 * sum(p.square().sum() for p in model.parameters())


def last_layer(model: nn.Module) -> Any:
    """Only the last layer is."""
    return lambda y, t: mse_loss(y, t) + 0.1 * model[3].linear.weight.square().sum()  # type: ignore[index]


def detached(model: nn.Module) -> Any:
    """The first layer is only looked at."""
    return lambda y, t: mse_loss(y * model[0].linear.weight.detach().mean(), t)  # type: ignore[index]


def plain(make: Any) -> Numbers:
    model = chain(4)
    loss = make(model)(model(X), TARGET)
    loss.backward()
    return gradients(model, [loss.detach()])


def gradients(model: Any, losses: list[Tensor]) -> Numbers:
    return {name: value for name, value in numbers(model, losses).items() if not name.startswith("state")}


def pipeline(make: Any, local: bool = False) -> Numbers:
    model = chain(4)
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=make(model), local=local)
    return gradients(pipe, [pipe.step(X, target=TARGET).loss])


@pytest.mark.parametrize("make", [decaying, last_layer, detached])
@pytest.mark.filterwarnings("error")
def test_inside_one_process_all_parameters_are_there(make: Any) -> None:
    assert_equal(pipeline(make, local=True), plain(make))


@pytest.mark.gloo
def test_parameters_of_the_last_rank_may_be_used(pools: Pools) -> None:
    first, second = pools[2].run(pipeline, last_layer)
    assert_equal(first | second, plain(last_layer))


@pytest.mark.gloo
@pytest.mark.parametrize(("make", "names"), [(decaying, "0.linear.bias, 0.linear.weight"), (detached, "0.linear.w")])
def test_parameters_of_another_rank_are_refused_with_the_way_out(make: Any, names: str) -> None:
    with pytest.raises(penstock.RunError, match="parameters of the model that are on another rank") as caught:
        penstock.launch(pipeline, 2, make)
    assert names in str(caught.value)
    assert "try: penstock.add_loss" in str(caught.value)
