"""A parameter that the loss does not depend on has no gradient, as in plain PyTorch: weight decay leaves it alone."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import penstock
from tests.parity import PIPELINES, Execution, Values, WholeModel, accumulate, assert_close, gradients, split
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, noise, seeded

X, TARGET = noise(8, WIDTH), noise(8, WIDTH, seed=1)
SETTINGS = (("1f1b", "none"), ("zb_h1", "none"), ("gpipe", "full"), ("interleaved", "none"), ("zbv", "full"))


class TwoHeads(nn.Module):
    """Two outputs: the second depends on a side branch that crosses every cut, and on a block that the first uses too.

    `ties` the weights of the branch, in the first stage, to a head in the last.
    """

    def __init__(self, ties: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.side, self.head, self.unused = Block(), Block(), Block()
        if ties:
            self.head.linear.weight = self.side.linear.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The main output first."""
        x = self.blocks[0](x)
        side = self.side(x)
        for block in self.blocks[1:]:
            x = block(x)
        return {"main": x, "side": self.head(x + side)}


def main_loss(output: Any, target: Tensor) -> Tensor:
    return mse_loss(output["main"], target)


def side_loss(output: Any, target: Tensor) -> Tensor:
    return mse_loss(output["side"], target)


def planned(model: nn.Module, schedule: str, recompute: str) -> Any:
    return quick_plan(model, (X,), ranks=2, microbatches=4, schedule=schedule, recompute=recompute, loss_fn=main_loss)


def split_values(ties: bool, settings: Sequence[tuple[str, str]], execution: str) -> list[Values]:
    """The gradients after two accumulated steps, for every setting and both losses."""
    found = []
    for schedule, recompute in settings:
        for loss_fn in (main_loss, side_loss):
            model = seeded(TwoHeads(ties))
            pipe = split(execution, model, planned(model, schedule, recompute), loss_fn)
            accumulate(pipe, X, target=TARGET, steps=2)
            found.append(gradients(pipe))
    return found


@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("execution", PIPELINES, indirect=True)
def test_a_parameter_without_a_path_to_the_loss_has_no_gradient(
    execution: Execution, ties: bool, is_whole: bool
) -> None:
    settings = SETTINGS if is_whole else SETTINGS[execution.name == "local" :: 2]
    found = iter(execution.run(split_values, 2, ties, settings))
    for _ in settings:
        for loss_fn in (main_loss, side_loss):
            model = seeded(TwoHeads(ties))
            accumulate(WholeModel(model, loss_fn), X, target=TARGET, steps=2)
            names = model.named_parameters(remove_duplicate=False)
            expected = {f"gradient {name}": parameter.grad for name, parameter in names}
            step = next(found)
            assert_close(step, {name: expected[name] for name in step})
            assert (step["gradient side.linear.bias"] is None) is (loss_fn is main_loss)
            assert step["gradient unused.linear.weight"] is None


def choosing_loss(output: Any, target: Tensor) -> Tensor:
    """Uses the side branch only where the target is large."""
    return mse_loss(output["side" if target.abs().max() > 50 else "main"], target)


def replica_values() -> Values:
    """Each replica takes its half of the batch; only the second one uses the side branch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = seeded(TwoHeads())
    pipe = penstock.Pipeline(model, planned(model, "1f1b", "none"), loss_fn=choosing_loss, mesh=mesh)
    is_second = mesh.get_local_rank("dp")
    half = slice(4, 8) if is_second else slice(0, 4)
    # In the first step no replica has a gradient of the branch, in the second one of them.
    pipe.step(X[half], target=TARGET[half])
    assert gradients(pipe).get("gradient side.linear.bias") is None
    pipe.step(X[half], target=TARGET[half] + 100.0 * is_second)
    return gradients(pipe)


@pytest.mark.gloo
def test_replicas_agree_on_a_gradient_that_only_one_of_them_has(pools: Pools) -> None:
    parts = pools[4].run(replica_values)
    model = seeded(TwoHeads())
    for shift in (0.0, 100.0):
        for half in (slice(0, 4), slice(4, 8)):
            target = TARGET[half] + shift * (half.start > 0)
            (choosing_loss(model(X[half]), target) / 2).backward()
    expected = gradients(model)
    assert expected["gradient side.linear.bias"] is not None
    for part in parts:
        assert_close(part, {name: expected[name] for name in part})
