"""capture: a model from a file of the user's as a graph, and what crosses when it is cut."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock import Graph
from penstock.ir import from_json

FILE = """\
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(layers))

    def forward(self, x, scale=None):
        for layer in self.layers:
            x = layer(x)
        return x if scale is None else x * scale

class Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls

def build():
    print("a word from the builder")
    return Stack(), (torch.ones(2, 4),), {"scale": torch.ones(4)}

def pair(): return Stack(), (torch.ones(2, 4),)
def example(): return Stack(), torch.ones(2, 4)
def named(): return Stack(), {"x": torch.ones(2, 4)}
def bare(): return Stack()
def misfit(): return Stack(), torch.ones(2, 5)
def clock(): return Clock(), torch.ones(2, 4)
def number(): return 3
def swapped(): return Stack(), {}, ()
def crash(): return missing
def leave(): raise SystemExit(1)
def needy(model): return model
"""
MISTAKES = {
    "no function": ("model.py", "try: model.py:FUNCTION, which returns the model and a batch"),
    "a file that is not there": ("none.py:build", "no such file (file: none.py)"),
    "a file that is not Python": ("model.txt:build", "not a Python file (file: model.txt)"),
    "a file with an error of syntax": ("broken.py:build", "cannot be loaded (file: broken.py:2, error: SyntaxError"),
    "a function that is misspelled": ("model.py:biuld", "try: did you mean build?"),
    "a function that is not there": ("empty.py:build", "try: def build(): ... return model, args, kwargs"),
    "a function that fails": ("model.py:crash", "the function crash failed (file: model.py:36, error: NameError: name"),
    "a function that ends the program": ("model.py:leave", "leave failed (file: model.py:37, error: SystemExit"),
    "a function with arguments": ("model.py:needy", "needy() missing 1 required positional argument: 'model'"),
    "something other than a model": ("model.py:number", "a model and its batch (function: number, got: int)"),
    "args and kwargs exchanged": ("model.py:swapped", "kwargs a dict (function: swapped, got: dict and tuple)"),
}
REFUSALS = {
    "a model without its batch": (("model.py:bare",), "missing a required argument: 'x'"),
    "a batch that does not fit": (("model.py:misfit",), "cannot be run on this batch (module: layers.0.0"),
    "state that changes between two calls": (("model.py:clock",), "try:"),
    "more stages than places to cut": (("model.py:pair", "--stages", "99"), "fewer places to cut than asked for"),
    "a block that does not exist": (
        ("model.py:pair", "--block", "Layer"),
        "a basic block must be the name or the class",
    ),
}


@pytest.fixture(autouse=True)
def _files(written: Callable[[str, str], Path]) -> None:
    written("model.py", FILE)
    written("model.txt", FILE)
    written("broken.py", "x = 1\ndef build(:\n")
    written("empty.py", "")


@pytest.mark.parametrize("function", ["build", "pair", "example", "named"])
def test_the_graph_is_printed_whatever_way_the_batch_is_given(function: str, call) -> None:
    result = call("capture", f"model.py:{function}")
    assert result.stdout.splitlines()[0].endswith("nodes, 120 parameters, 480 B")
    assert "| layers.0" in result.stdout
    assert " × Sequential " in result.stdout
    assert result.exit_code == 0


def test_what_the_builder_prints_does_not_mix_with_the_result(call) -> None:
    result = call("capture", "model.py:build", "--json")
    assert json.loads(result.stdout)
    assert "a word from the builder" in result.stderr


def test_with_stages_what_crosses_is_listed(call) -> None:
    output = call("capture", "model.py:pair", "--stages", "2").stdout
    assert "2 stages, 1 message of 1 tensor per microbatch: 32 B forward, 32 B backward" in output
    assert "| 0 -> 1 | layers.2 | Sequential | float32[2, 4] |    32 B |     32 B |" in output


def test_without_stages_no_cuts_are_shown(call) -> None:
    assert "crosses" not in call("capture", "model.py:pair").stdout


def test_depth_opens_modules(call) -> None:
    assert "layers.0.0" in call("capture", "model.py:pair", "--depth", "3").stdout


def test_a_block_stays_whole(call) -> None:
    output = call("capture", "model.py:pair", "--depth", "3", "--block", "Sequential", "--block", "layers.0").stdout
    assert "layers.0.0" not in output
    assert "Sequential" in output


def test_other_verbs_keep_blocks_whole_and_open_modules_too(call) -> None:
    size = ("--ranks", "2", "--microbatches", "1", "--budget", "0", "--schedule", "1f1b")
    call("plan", "model.py:pair", *size, "--depth", "2", "--out", "plan.json")
    assert "layers.0.0" in call("show", "plan.json", "--json").stdout
    result = call("check", "plan.json", "--model", "model.py:pair", "--block", "layers.0")
    assert "the pipeline matches the unsplit model" in result.stdout
    result = call("plan", "model.py:pair", *size, "--block", "layers")
    assert "must be a module that is called" in result.stderr
    assert "try: --block NAME with layers.0, or with their class" in result.stderr
    assert result.exit_code == 3


def test_a_picture_is_written(call, tmp_path: Path) -> None:
    result = call("capture", "model.py:pair", "--stages", "2", "--svg", "model.svg")
    texts = [text.text for text in ElementTree.parse(tmp_path / "model.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "Stack"
    assert any(text.startswith("stage 1: ") for text in texts)
    assert "wrote model.svg" in result.stderr


def test_a_picture_that_cannot_be_written_is_refused_before_the_model_is_built(call) -> None:
    result = call("capture", "model.py:build", "--svg", "missing/model.svg")
    assert "try: mkdir -p missing" in result.output
    assert "a word from the builder" not in result.output
    assert result.exit_code == 2


def test_programs_get_the_graph_the_partition_and_what_crosses(call) -> None:
    answer = json.loads(call("capture", "model.py:pair", "--stages", "2", "--json").stdout)
    assert isinstance(from_json(json.dumps(answer["graph"])), Graph)
    assert from_json(json.dumps(answer["partition"])).num_stages == 2
    value = {"name": "layers.2", "tensor": "float32[2, 4]", "bytes": 32, "needs_gradient": True}
    assert answer["crossings"] == [
        {"producer": 0, "consumer": 1, "forward_bytes": 32, "backward_bytes": 32, "values": [value]}
    ]


def test_the_file_can_import_its_neighbours_and_leaves_no_trace(call, written, monkeypatch) -> None:
    # Another test may have imported a file of the same name.
    monkeypatch.delitem(sys.modules, "model", raising=False)
    written("neighbour_of_the_model.py", "import model\nbuild = model.pair\n")
    written("main.py", "from neighbour_of_the_model import build\n")
    before = list(sys.path)
    assert call("capture", "main.py:build").exit_code == 0
    assert sys.path == before
    assert not any(name.startswith("penstock_build_") for name in sys.modules)
    for name in ("model", "neighbour_of_the_model"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_or_function_is_explained_and_ends_with_2(mistake: str, call) -> None:
    target, explanation = MISTAKES[mistake]
    result = call("capture", target)
    assert explanation in result.output
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_model_that_cannot_be_captured_or_cut_is_explained_and_ends_with_3(refusal: str, call) -> None:
    arguments, explanation = REFUSALS[refusal]
    result = call("capture", *arguments)
    assert explanation in result.output
    assert result.exit_code == 3
    assert "Traceback" not in result.output


@pytest.mark.parametrize("option", ["--depth", "--stages"])
def test_a_number_below_1_is_wrong_usage(option: str, call) -> None:
    assert call("capture", "model.py:pair", option, "0").exit_code == 2
