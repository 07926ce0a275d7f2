"""The whole state of a model comes home from all ranks and goes back to them, also where parameters are sharded."""

from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import penstock
from tests.parity import Values, assert_identical
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise, seeded

pytestmark = pytest.mark.gloo

X, TARGET = noise(8, WIDTH), noise(8, WIDTH, seed=1)


class Mixed(nn.Module):
    """Parameters and buffers of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(4)
        self.register_buffer("phases", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        """The blocks, and a use of every buffer."""
        used = self.phases.real.sum() + self.flags.sum() + self.halves.double().sum() + self.nothing.sum()
        return self.blocks(x * used)


def state_of_all_types() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Mixed()
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss)
    return pipe.full_state_dict(), pipe.full_state_dict(everywhere=True)


def test_a_state_may_have_tensors_of_any_type(pools: Pools) -> None:
    expected = Mixed().state_dict()
    (first, everywhere), (empty, other) = pools[2].run(state_of_all_types)
    assert empty == {}
    for found in (first, everywhere, other):
        assert_identical(found, expected)


class SecondNames(nn.Module):
    """A parameter and a buffer with a second name that no block uses, as the bias of BERT's output layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = chain(4)
        self.bias = self.blocks[3].linear.bias
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("same_scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """The blocks, and one of the names of the buffer."""
        return self.blocks(x) * self.same_scale


def state_with_second_names() -> dict[str, Tensor]:
    model = SecondNames()
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=mse_loss).full_state_dict(everywhere=True)


def test_a_state_has_every_name_of_a_tensor(pools: Pools) -> None:
    expected = SecondNames().state_dict()
    for state in pools[2].run(state_with_second_names):
        assert_identical(state, expected)


def test_the_names_of_a_tensor_share_no_memory_in_a_state_so_that_safetensors_writes_it() -> None:
    model = SecondNames()
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    state = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).full_state_dict()
    assert_identical(load(save(state)), model.state_dict())


def shard(stage: nn.Module, mesh: Any) -> None:
    for block in list(stage.children()):
        fully_shard(block, mesh=mesh["dp"])


def sharded(model: nn.Module, **given: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=mse_loss, mesh=mesh, parallelize_fn=shard, **given)


def shared_and_back() -> tuple[Values, Values, float]:
    """The state of a sharded model, that of another after it took it over, and the largest difference in its loss."""
    pipe = sharded(chain(4))
    other = sharded(seeded(nn.Sequential(*chain(4)), seed=7))
    state = pipe.full_state_dict(everywhere=True)
    other.load_state_dict(state)
    apart = abs(float(pipe.eval(X, target=TARGET).loss) - float(other.eval(X, target=TARGET).loss))
    return state, other.full_state_dict(everywhere=True), apart


def test_a_sharded_state_is_gathered_whole_and_loaded_in_parts(pools: Pools) -> None:
    expected = chain(4).state_dict()
    for state, taken_over, apart in pools[4].run(shared_and_back):
        assert_identical(state, expected)
        assert_identical(taken_over, expected)
        assert apart == 0.0
