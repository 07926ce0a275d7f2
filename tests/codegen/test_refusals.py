"""Objects that cannot be written as code are named in the error, and no file is touched."""

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

import penstock
from penstock.errors import CodeError, FormatError
from penstock.partitioners import uniform
from tests.codegen.generated import generated, imported

BATCH = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SMALL, LARGE = torch.tensor([1.5, -2.0, float(1 / 3), 1e-30]), torch.randn(9, 4)
CONJUGATED = torch.polar(torch.ones(4), torch.arange(4.0)).conj()


class Layered(nn.Module):
    """Layers with a function between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.between = (between,)

    def forward(self, x: Tensor) -> Tensor:
        """Each layer, then the function."""
        for layer in self.layers:
            x = self.between[0](torch.tanh(layer(x)))
        return x


def local_function() -> Any:
    class Twice(torch.autograd.Function):
        """Not importable."""

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
def test_an_object_without_an_importable_name_is_refused_before_anything_is_written(between, name, tmp_path):
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
        generated(penstock.capture(Chain(), (BATCH,)), 2, tmp_path)


class Registered:
    """A class that only its own functions can take apart."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


register_pytree_node(Registered, lambda found: ([found.x], None), lambda items, _: Registered(*items))


class Wrapping(nn.Linear):
    """A block that returns such an object."""

    def forward(self, x: Tensor) -> Registered:
        return Registered(super().forward(x))


class Unwrapping(nn.Module):
    """Blocks that return objects of a registered class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """All blocks in a row."""
        for block in self.blocks:
            x = block(x).x
        return x


def test_a_result_that_only_functions_of_its_class_take_apart_is_refused(tmp_path):
    with pytest.raises(CodeError, match=r"test_refusals\.Registered"):
        generated(penstock.capture(Unwrapping(), (BATCH,)), 2, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_named_in_the_error(tmp_path):
    captured = penstock.capture(Layered(torch.relu), (BATCH,))
    with pytest.raises(FormatError, match="nowhere"):
        penstock.generate_code(captured, uniform(captured.graph, 2), tmp_path / "nowhere" / "stages.py")


class Direction(enum.Enum):
    """An argument of a block."""

    UP = "up"


class Block(nn.Linear):
    """A block with arguments that are not tensors."""

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        assert more == (
            Direction.UP,
            np.float32(0.1),
            1 + 2j,
            b"\0'",
            range(3),
            {2, 1},
            torch.int8,
            np.float64,
            Direction,
        )
        assert repr(named) == "{'n': nan, 'i': -inf, 'class': (1,), 'k': {(1, 'x'): [True]}}"
        return super().forward(x), None, Direction.UP, 3, "text"


class Chain(nn.Module):
    """Blocks with plain arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """All blocks in a row."""
        more = (Direction.UP, np.float32(0.1), 1 + 2j, b"\0'", range(3), {2, 1}, torch.int8, np.float64, Direction)
        named = {"n": float("nan"), "i": -float("inf"), "class": (1,), "k": {(1, "x"): [True]}}
        for block in self.blocks:
            x, *_ = block(x, *more, **named)
        return x


def test_plain_arguments_of_every_kind_keep_their_values(tmp_path):
    model = Chain()
    file = generated(penstock.capture(model, (BATCH,)), 2, tmp_path)
    assert torch.equal(file.run(model, BATCH), model(BATCH))


def constant(x: Tensor) -> Tensor:
    return (x * SMALL) @ LARGE.T @ LARGE


def test_small_constants_are_in_the_code_and_large_ones_beside_it(tmp_path):
    model = Layered(constant)
    file = generated(penstock.capture(model, (BATCH,)), 2, tmp_path)
    assert torch.equal(file.run(model, BATCH), model(BATCH))
    assert {path.name for path in tmp_path.glob("*.*")} == {"stages2.py", "stages2_constants.safetensors"}
    assert list(file.CONSTANTS) == ["constant0"]


def conjugated(x: Tensor) -> Tensor:
    return (x * CONJUGATED).imag + x


def test_conjugated_constants_are_written_by_their_values(tmp_path):
    model = Layered(conjugated)
    file = generated(penstock.capture(model, (BATCH,)), 2, tmp_path)
    assert torch.equal(file.run(model, BATCH), model(BATCH))


def test_a_changed_file_of_constants_is_refused(tmp_path):
    generated(penstock.capture(Layered(constant), (BATCH,)), 2, tmp_path)
    beside = tmp_path / "stages2_constants.safetensors"
    beside.write_bytes(beside.read_bytes()[:-1] + b"\1")
    with pytest.raises(ValueError, match="the content of stages2_constants"):
        imported(tmp_path / "stages2.py")
