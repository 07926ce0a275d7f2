"""Calls, containers and guards of every form are written as idiomatic Python with the same result."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.codegen.generated import generated, step_of_file
from tests.parity import Batch, WholeModel, assert_identical, one_step

BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
CONSTANT = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Layered(nn.Module):
    """Layers with a function between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("flag", torch.tensor(True))
        self.between = (between,)

    def forward(self, x: Tensor) -> Tensor:
        """Each layer, then the function."""
        for layer in self.layers:
            x = self.between[0](layer(x).tanh()) if self.flag else x
        return x


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y += 1
    y[:, ::2] = 0
    y[0, -1] = 2
    y[y > 1] *= 3
    y.view(16)[2:5].neg_()
    return y


# fmt: off
FORMS = {
    "1 - tanh": lambda x: 1 - x,
    "2 ** tanh": lambda x: 2**x,
    "(-2.5) ** round_": lambda x: (-2.5) ** x.detach().round() + x,
    "3 / tanh": lambda x: 3 / x,
    "2 % detach": lambda x: 2 % x.detach() + x,
    "tanh ** 2": lambda x: x**2,
    "-tanh": lambda x: -x,
    "~gt": lambda x: x * ~(x > 0),
    "tanh @ T": lambda x: x @ x.T,
    "tanh % 3": lambda x: x % 3,
    "tanh * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float32)": lambda x: x * CONSTANT,
    "tanh.add(1, alpha=3)": lambda x: x.add(1, alpha=3),
    "torch.add(tanh, tanh, alpha=2)": lambda x: torch.add(x, x, alpha=2),
    "tanh[..., None, :]": lambda x: x[..., None, :][:, 0],
    "tanh[1:, :-1]": lambda x: x + x[1:, :-1].sum(),
    "tanh[[3, 2, 1, 0]]": lambda x: x[[3, 2, 1, 0]],
    "tanh[:,]": lambda x: x[(slice(None),)],
    "tanh[arange]": lambda x: x[torch.arange(4)],
    "clone[:, ::2] = 0": in_place,
    "split_0, split_1 = tanh.split([1, 3], dim=1)": lambda x: torch.cat(x.split([1, 3], 1)[::-1], 1),
    "_, max_1 = tanh.max(1)": lambda x: x + x.max(1).indices[:, None],
    "torch.linalg.norm(tanh)": lambda x: x / torch.linalg.norm(x),
    "torch.ops.aten.mul.Tensor(tanh, tanh)": lambda x: torch.ops.aten.mul.Tensor(x, x),
    "torch.einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "tanh.masked_fill(eq, float(\"-inf\"))": lambda x: x.masked_fill(x == 2, float("-inf")),
    "complex(\"(1+infj)\")": lambda x: x + torch.isinf(x * complex(1, float("inf"))),
    "expect(bool(gt), False,": lambda x: x / 2 if x.abs().max() > 100 else x,
    "expect(argmax.tolist(),": lambda x: x + sum(x.detach().argmax(1).tolist()),
    "expect(int(sum_), 4,": lambda x: x * int(torch.ones(4).sum()),
    "expect(ones_2.numpy().tolist(), CONSTANTS": lambda x: x * float(np.sum(torch.ones(65).numpy())),
    "expect(ones_2.numpy().tolist(), [1.0, 1.0],": lambda x: x * float(np.sum(torch.ones(2).numpy())),
}
# fmt: on


@pytest.mark.parametrize("code", FORMS)
def test_a_call_is_written_as_idiomatic_python_with_the_same_result(code, tmp_path):
    torch.manual_seed(0)
    model, batch = Layered(FORMS[code]), Batch((BATCH,), {}, False)
    captured = penstock.capture(model, batch.args)
    expected = one_step(WholeModel(model, batch.loss_fn), batch)
    file = generated(captured, 2, tmp_path)
    assert code in (tmp_path / "stages2.py").read_text(encoding="utf-8")
    assert_identical(step_of_file(file, model, batch), expected)


def test_a_decision_by_a_buffer_is_checked(tmp_path):
    model = Layered(torch.relu)
    file = generated(penstock.capture(model, (BATCH,)), 2, tmp_path)
    model.flag.fill_(False)
    with pytest.raises(ValueError, match="bool must be True as recorded, got False"):
        file.run(model, BATCH)


@dataclass
class Box:
    """A container of the user's."""

    inner: dict[Any, Any]


@dataclass(init=False)
class Filled:
    """A container whose constructor does not take its fields."""

    x: Any

    def fill(self, x: Any) -> "Filled":
        """This container with its field set."""
        self.x = x
        return self


class Boxing(nn.Linear):
    """A block that is given nested containers and returns others."""

    def forward(self, box: Box, *, where: slice) -> Any:
        x = super().forward(box.inner["x"][0])[where]
        found = OrderedDict(x=[x, []], empty={}, rest=(None, 2, {"deep": (x * 2,)}))
        box = Box(defaultdict(None, found))
        return {"box": box, (1, "key"): "text", None: torch.Size([2]), "filled": Filled().fill([x])}


class Boxed(nn.Module):
    """Blocks that pass nested containers to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxing(4, 4) for _ in range(3))

    def forward(self, x: Tensor, settings: dict[str, Any], device: Any = None) -> Any:
        """All blocks in a row; returns the result of the last one."""
        box = Box({"x": (x * settings["scale"],)})
        for block in self.blocks:
            found = block(box, where=slice(None, None, 1))
            box = found["box"]
        return found


def test_nested_containers_are_arguments_cross_stages_and_are_returned(tmp_path):
    model = Boxed()
    batch = Batch((BATCH, {"scale": 2.0, "more": [BATCH, (None, Box({}))]}), {"device": torch.device("cpu")}, False)
    captured = penstock.capture(model, batch.args, batch.kwargs)
    expected = one_step(WholeModel(model, batch.loss_fn), batch)
    file = generated(captured, 3, tmp_path)
    assert_identical(step_of_file(file, model, batch), expected)
    found, wanted = (run(*batch.args, **batch.kwargs) for run in (lambda *a, **k: file.run(model, *a, **k), model))
    assert str(found) == str(wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 3.0}, "settings.scale must be 2.0 as recorded, got 3.0"),
        ({"scale": 2.0, "more": 1}, "the keys of settings must be ['scale'] as recorded, got ['scale', 'more']"),
    ],
)
def test_plain_arguments_inside_containers_are_checked(settings, message, tmp_path):
    model = Boxed()
    file = generated(penstock.capture(model, (BATCH, {"scale": 2.0})), 2, tmp_path)
    with pytest.raises(ValueError) as error:
        file.run(model, BATCH, settings)
    assert message in str(error.value)
