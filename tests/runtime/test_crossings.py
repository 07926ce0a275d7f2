"""Values of every type and form cross a cut as they are: whole numbers, masks, halves, complex ones, empty ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.runtime.models import WIDTH, Block, fixed, noise
from tests.runtime.oracle import Numbers, assert_identical, loop, numbers
from tests.runtime.plans import quick_plan
from tests.runtime.workers import Pools

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(dtype): lambda x, dtype=dtype: (x * 3).to(dtype) for dtype in (torch.uint8, torch.int16, torch.int64)},
    **{str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)},
    "bool": lambda x: x > 0,
    "complex": lambda x: torch.complex(x, -x),
    "empty": lambda x: x[:, :0].sum(1, keepdim=True),
    "one number": lambda x: x.sum(),
    "one column, repeated": lambda x: x[:, :1].expand(-1, WIDTH),
    "every second column": lambda x: x[:, ::2].repeat_interleave(2, 1),
    "turned": lambda x: x.T.contiguous().T,
    "without gradient": lambda x: x.detach(),
}


class Crossing(nn.Module):
    """A value made in the middle of a chain is used at its end."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The cut is between the second block and the third."""
        x = self.blocks[1](self.blocks[0](x))
        made = FORMS[self.form](x)
        x = self.blocks[3](self.blocks[2](x))
        return x * (made.real if made.is_complex() else made).double()


def crossed(forms: list[str], local: bool = False) -> list[Numbers]:
    """After one step."""
    found = []
    for form in forms:
        model = fixed(Crossing(form))
        stages = [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]]
        plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b", partitioner=stages)
        pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
        found.append(numbers(pipe, [pipe.step(X, target=TARGET).loss]))
    return found


def looped(form: str) -> Numbers:
    model = fixed(Crossing(form))
    return numbers(model, [loop(model, mse_loss, 2)(X, TARGET)])


@pytest.mark.parametrize("form", FORMS)
def test_a_value_crosses_inside_a_process(form: str) -> None:
    (found,) = crossed([form], local=True)
    assert_identical(found, looped(form))


@pytest.mark.gloo
def test_values_cross_between_processes(pools: Pools) -> None:
    for form, first, second in zip(FORMS, *pools[2].run(crossed, list(FORMS)), strict=True):
        assert_identical(first | second, looped(form))
