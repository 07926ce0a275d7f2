"""What cannot be written as plain code is named, and no file is touched."""

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CodeError, FormatError
from penstock.partitioners import uniform
from tests.codegen.written import imported, written

BATCH = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SMALL, LARGE = torch.tensor([1.5, -2.0, float(1 / 3), 1e-30]), torch.randn(9, 4)


class Layered(nn.Module):
    """Layers with something between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.between = (between,)

    def forward(self, x: Tensor) -> Tensor:
        """Each layer, then what is between."""
        for layer in self.layers:
            x = self.between[0](torch.tanh(layer(x)))
        return x


def local_function() -> Any:
    class Twice(torch.autograd.Function):
        """Known to nobody outside."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    return lambda x: Twice.apply(x)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x


GENERATOR = torch.Generator().manual_seed(0)


def drawn(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=GENERATOR)


@pytest.mark.parametrize(
    ("between", "name"),
    [(local_function(), "local_function.<locals>.Twice"), (hooked, "<lambda>"), (drawn, "torch._C.Generator")],
    ids=["local function", "lambda", "generator"],
)
def test_what_has_no_name_is_refused_by_name_before_anything_is_written(between, name, tmp_path):
    (tmp_path / "stages.py").write_text("as it was")
    captured = penstock.capture(Layered(between), (BATCH,))
    with pytest.raises(CodeError, match="cannot be written as Python code") as error:
        penstock.generate_code(captured, uniform(captured.graph, 2), tmp_path / "stages.py")
    assert name in str(error.value)
    assert (tmp_path / "stages.py").read_text() == "as it was"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_local_class_between_stages_is_refused(tmp_path):
    @dataclass
    class Hidden:
        x: Tensor

    class Block(nn.Linear):
        def forward(self, hidden: Hidden) -> Hidden:
            return Hidden(super().forward(hidden.x))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](Hidden(x))).x

    with pytest.raises(CodeError, match=r"<locals>\.Hidden, where: blocks\.0"):
        written(penstock.capture(Chain(), (BATCH,)), 2, tmp_path)


def test_an_unwritable_place_is_an_error_that_names_it(tmp_path):
    captured = penstock.capture(Layered(torch.relu), (BATCH,))
    with pytest.raises(FormatError, match="nowhere"):
        penstock.generate_code(captured, uniform(captured.graph, 2), tmp_path / "nowhere" / "stages.py")


class Way(enum.Enum):
    """Handed to a block."""

    UP = "up"


class Going(nn.Linear):
    """A block that is handed things that are no tensors."""

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        assert more == (Way.UP, np.float32(0.1), 1 + 2j, b"\0'", range(3), {2, 1}, torch.int8, np.float64, Way)
        assert repr(named) == "{'n': nan, 'i': -inf, 'class': (1,), 'k': {(1, 'x'): [True]}}"
        return super().forward(x), None, Way.UP, 3, "text"


class Handing(nn.Module):
    """Blocks that are handed all kinds of plain things."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Going(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Each block in its turn."""
        more = (Way.UP, np.float32(0.1), 1 + 2j, b"\0'", range(3), {2, 1}, torch.int8, np.float64, Way)
        named = {"n": float("nan"), "i": -float("inf"), "class": (1,), "k": {(1, "x"): [True]}}
        for block in self.blocks:
            x, *_ = block(x, *more, **named)
        return x


def test_plain_things_of_every_kind_arrive_as_they_were(tmp_path):
    model = Handing()
    file = written(penstock.capture(model, (BATCH,)), 2, tmp_path)
    assert torch.equal(file.run(model, BATCH), model(BATCH))


def constant(x: Tensor) -> Tensor:
    return (x * SMALL) @ LARGE.T @ LARGE


def test_small_constants_are_in_the_code_and_large_ones_beside_it(tmp_path):
    model = Layered(constant)
    file = written(penstock.capture(model, (BATCH,)), 2, tmp_path)
    assert torch.equal(file.run(model, BATCH), model(BATCH))
    assert {path.name for path in tmp_path.glob("*.*")} == {"stages2.py", "stages2_constants.safetensors"}
    assert list(file.CONSTANTS) == ["constant0"]


def test_constants_of_another_file_are_noticed(tmp_path):
    written(penstock.capture(Layered(constant), (BATCH,)), 2, tmp_path)
    beside = tmp_path / "stages2_constants.safetensors"
    beside.write_bytes(beside.read_bytes()[:-1] + b"\1")
    with pytest.raises(ValueError, match="the content of stages2_constants"):
        imported(tmp_path / "stages2.py")
