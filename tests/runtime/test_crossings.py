"""Values of every dtype and layout cross a cut unchanged."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.parity import EXECUTIONS, Execution, Values, WholeModel, accumulate, assert_identical, split
from tests.plans import quick_plan
from tests.small_models import WIDTH, Block, noise, seeded

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(dtype): lambda x, dtype=dtype: (x * 3).to(dtype) for dtype in (torch.uint8, torch.int16, torch.int64)},
    **{str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)},
    "bool": lambda x: x > 0,
    "complex": lambda x: torch.complex(x, -x),
    "conjugate": lambda x: torch.complex(x, -x).conj(),
    "negated view": lambda x: torch.complex(x, -x).conj().imag,
    "negated number": lambda x: torch.complex(x, -x).sum().conj().imag,
    "empty": lambda x: x[:, :0].sum(1, keepdim=True),
    "one number": lambda x: x.sum(),
    "one column, repeated": lambda x: x[:, :1].expand(-1, WIDTH),
    "every second column": lambda x: x[:, ::2].repeat_interleave(2, 1),
    "turned": lambda x: x.T.contiguous().T,
    "without gradient": lambda x: x.detach(),
}


class Crossing(nn.Module):
    """Values made in the middle of a chain are used at its end."""

    def __init__(self, forms: list[str]) -> None:
        super().__init__()
        self.forms = forms
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The cut is between the second block and the third."""
        x = self.blocks[1](self.blocks[0](x))
        made = [FORMS[form](x) for form in self.forms]
        x = self.blocks[3](self.blocks[2](x))
        return sum(x * (value.real if value.is_complex() else value).double() for value in made)


def split_values(groups: list[list[str]], execution: str) -> list[Values]:
    """The values after one step of a model of each group."""
    found = []
    for forms in groups:
        model = seeded(Crossing(forms))
        stages = [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]]
        plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b", partitioner=stages)
        found.append(accumulate(split(execution, model, plan, mse_loss), X, target=TARGET))
    return found


def whole_values(forms: list[str], microbatches: int | None) -> Values:
    return accumulate(WholeModel(seeded(Crossing(forms)), mse_loss, microbatches), X, target=TARGET)


@pytest.mark.parametrize("execution", EXECUTIONS, indirect=True)
def test_values_of_every_type_and_layout_cross_a_cut(execution: Execution, is_whole: bool) -> None:
    microbatches = None if execution.name == "stages" else 2
    groups = [[form] for form in FORMS] if is_whole else [list(FORMS)[start::3] for start in range(3)]
    for forms, found in zip(groups, execution.run(split_values, 2, groups), strict=True):
        assert_identical(found, whole_values(forms, microbatches))
