"""Names of modules, arguments and keys are data in a generated file: never code."""

import ast
import tokenize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.codegen.expressions import literal
from penstock.codegen.formatting import docstring_lines, statement_lines
from tests.codegen.generated import generated, step_of_file
from tests.parity import Batch, WholeModel, assert_identical, one_step

MARK = "mischief"
# fmt: off
HOSTILE = (
    "__import__('os')·system('touch mischief')", "x'); open('mischief', 'w'); ('", 'a"""; open("mischief", "w"); """',
    "line\nopen('mischief', 'w')", "return\ropen('mischief', 'w')", "back\\slash\\", "{mischief}", "#mischief",
    "\u2028", "\ud800", "nul\0", "größe", "ﬁ", "fi", "class", "None", "self", "model", "torch", "RECEIVES", "PARTS",
    "device", "take", "check", "__mangled", "a b", "a-b", "a_b", "match", "print", "007", "Stage0", " ", "𝐱",
)
# fmt: on
BATCH = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Named(nn.Module):
    """Linear layers with parameters between them, under given names."""

    def __init__(self, names: tuple[str, ...], kind: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, kind(4, 4))
            self._parameters[f"{name} weight"] = nn.Parameter(torch.full((4,), 1.5))
            self._buffers[f"{name} count"] = torch.zeros(())

    def forward(self, x: Tensor, **more: Any) -> dict[str, Any]:
        """All layers in a row; further arguments have names given by the caller."""
        for name, layer in self.named_children():
            self._buffers[f"{name} count"].add_(1)
            x = torch.tanh(layer(x)) * self._parameters[f"{name} weight"] + self._buffers[f"{name} count"]
        return {name: value + x for name, value in more.items()} or {"x": x}


def tokens_outside_strings(path: Path) -> str:
    with path.open("rb") as file:
        found = [token.string for token in tokenize.tokenize(file.readline) if token.type != tokenize.STRING]
    return " ".join(found)


@pytest.mark.parametrize("names", [HOSTILE, *[(name, "b", "c") for name in HOSTILE[:12]]], ids=range(13))
def test_names_of_modules_parameters_and_buffers_are_data(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, batch = Named(names), Batch((BATCH,), {}, False)
    captured = penstock.capture(model, batch.args)
    expected = one_step(WholeModel(model, batch.loss_fn), batch)
    file = generated(captured, 3, tmp_path)
    assert_identical(step_of_file(file, model, batch), expected)
    assert {name for stage in file.STAGES for name in stage(model).state_dict()} == set(model.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir() if not path.is_dir()) == ["stages3.py"]
    assert MARK not in tokens_outside_strings(tmp_path / "stages3.py")


def test_names_of_arguments_and_keys_are_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {name: torch.full((3, 4), float(place)) for place, name in enumerate(HOSTILE) if name != "self"}
    model, batch = Named(("a", "b", "c")), Batch((BATCH,), arguments, False)
    expected = one_step(WholeModel(model, batch.loss_fn), batch)
    file = generated(penstock.capture(model, batch.args, arguments), 2, tmp_path)
    assert_identical(step_of_file(file, model, batch), expected)
    assert list(file.run(model, BATCH, **arguments)) == list(arguments)
    assert MARK not in tokens_outside_strings(tmp_path / "stages2.py")


def test_a_hostile_class_name_does_not_appear(tmp_path):
    hostile = type("Linear(4, 4); open('mischief', 'w'); (", (nn.Linear,), {})
    hostile.__module__ = "os; mischief"
    model = type("a\nmischief", (Named,), {})(("a", "b", "c"), hostile)
    file = generated(penstock.capture(model, (BATCH,)), 2, tmp_path)
    assert file.__doc__.startswith("A model in 2 stages, one class each")
    assert MARK not in (tmp_path / "stages2.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_literal_evaluates_to_its_text(name):
    (text,) = statement_lines(literal(name))
    assert ast.literal_eval(text) == name
    assert text.isprintable()


@pytest.mark.parametrize("text", ['ends with "', '"""', "back\\", '\\"""', "plain"])
def test_a_docstring_cannot_be_left(text):
    for block in ([text], [text, text]):
        (statement,) = ast.parse("\n".join(docstring_lines(block))).body
        assert ast.literal_eval(statement.value).split() == " ".join(block).split()
