"""Common mistakes: each is answered by what is wrong, where, and what to try; never by a traceback."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import penstock
from penstock.ir import to_json

MODELS = """\
import torch
from torch import nn

def build(): return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.ones(8, 4)
def deeper(): return nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]), torch.ones(8, 4)
def wider(): return nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)]), torch.ones(8, 5)
def alone(): return nn.Linear(4, 4)
def number(): return 3
def crash(): return missing
def interrupted(): raise KeyboardInterrupt

class Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls

def clock(): return Clock(), torch.ones(8, 4)
three = 3
"""
FILES = {
    "model.py": MODELS,
    "broken.py": "x = 1\ndef build(:\n",
    "importing.py": "import broken\ndef build(): ...\n",
    "notes.txt": "hello",
    "cell.csv": "0F0,0F1,0B0,0B1\n1F0,1F1,1X0,1B1\n",
    "three.csv": "0F0,0B0\n1F0,1B0\n2F0,2B0\n",
    "stuck.csv": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
    "empty.csv": "",
    "twice.csv": "0F0,0B0\n0F1,0B1\n",
    "newer.json": '{"penstock": 2, "type": "Plan", "value": {}}',
    "cut.json": '{"penstock": 1, "type": "Plan", "value": {"graph": {"nodes": [',
    "other.json": '{"name": "x"}',
    "plane.json": '{"penstock": 1, "type": "Plane", "value": {}}',
    "keyless.json": '{"penstock": 1, "type": "Placement", "value": {}}',
    "place.json": '{"penstock": 1, "type": "Placement", "value": {"ranks": [0, 1]}}',
    "hub/config.json": '{"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}',
    "typo/config.json": '{"model_type": "lama"}',
    "plain/config.json": '{"hidden_size": 8}',
    "none/README.md": "",
}


class Mistake(NamedTuple):
    """What is typed, and what comes of it."""

    typed: str
    code: int
    message_part: str
    tries: str = ""


PLAN = "plan model.py:build --ranks 2 --budget 0.1"
MISTAKES = {
    "a command that does not exist": Mistake("simulat", 2, "simulat"),
    "an option that does not exist": Mistake("simulate --rank 4", 2, "--ranks"),
    "no file to check": Mistake("check", 2, "FILE"),
    # the user's file
    "a file that is not there": Mistake("plan modle.py:build", 2, "no such file (file: modle.py)", "model.py:build"),
    "a file that is not Python": Mistake("plan notes.txt:build", 2, "not a Python file", "ends in .py"),
    "an error of syntax": Mistake("plan broken.py:build", 2, "(file: broken.py:2, error: SyntaxError", "python broken"),
    "an error of syntax in an imported file": Mistake(
        "plan importing.py:build", 2, "(file: importing.py:1, error: SyntaxError", "python importing"
    ),
    "no function": Mistake("plan model.py", 2, "expected FILE.py:FUNCTION", "model.py:FUNCTION"),
    "a function that is misspelled": Mistake("plan model.py:biuld", 2, "no such function", "did you mean build?"),
    "a number that is no function": Mistake("plan model.py:three", 2, "not a function (name: 'three'", "def three(): "),
    "no model returned": Mistake("plan model.py:number", 2, "(function: number, got: int)", "return model, args"),
    "a function that fails": Mistake("plan model.py:crash", 2, "model.py:9, error: NameError", "['crash']()"),
    "a model without its batch": Mistake("plan model.py:alone", 3, "missing a required argument", "return model, args"),
    "a directory instead of a file": Mistake(
        "plan none:build", 2, "expected a file, got a directory", "none/FILE.py:build"
    ),
    "a model that changes": Mistake("plan model.py:clock --ranks 2", 3, "runs differently each time", "turn it"),
    "a file of too long a name": Mistake(f"plan {'a' * 300}.py:build", 2, "file name too long"),
    # numbers and names
    "too few samples": Mistake(f"{PLAN} --microbatches 9", 2, "(samples: 8, microbatches: 9)", "--microbatches 8"),
    "no microbatches": Mistake(f"{PLAN} --microbatches 0", 2, "must be a whole number, 1 or more", "--microbatches 4"),
    "microbatches in words": Mistake(f"{PLAN} --microbatches four", 2, "a whole number or auto", "--microbatches 8"),
    "no ranks": Mistake("plan model.py:build --ranks 0", 2, "ranks must be 1 or more (got: 0)", "--ranks 4"),
    "fewer ranks than none": Mistake(
        "plan model.py:build --ranks -2", 2, "ranks must be 1 or more (got: -2)", "--ranks 4"
    ),
    "ranks in words": Mistake("plan model.py:build --ranks two", 2, "--ranks"),
    "more stages than nodes": Mistake("plan model.py:build --ranks 64", 3, "at most 4 stages", "at most 4 ranks"),
    "a misspelled schedule": Mistake(f"{PLAN} --schedule 1fb1", 2, "unknown schedule", "did you mean 1f1b?"),
    "a misspelled partitioner": Mistake(
        f"{PLAN} --partitioner metiss", 2, "unknown partitioner", "did you mean metis?"
    ),
    "a wrong word for recompute": Mistake(
        f"{PLAN} --recompute some", 2, 'recompute must be "none", "full" or "auto"', "--recompute auto"
    ),
    "time before now": Mistake(f"{PLAN} --budget -1", 2, "must be 0 or more", "--budget 10.0"),
    "memory in parrots": Mistake(f"{PLAN} --memory 24parrots", 2, "not a size in bytes", '"24GiB"'),
    "too little memory": Mistake(
        f"{PLAN} --memory 100B --microbatches 4 --schedule 1f1b", 4, "no plan fits", "smaller"
    ),
    "half a device": Mistake(
        f"{PLAN} --flops 3e14", 2, "--flops and --memory-speed must be given together", "--memory-speed"
    ),
    "tensor parallelism without devices": Mistake(
        f"{PLAN} --tensor-parallel 2", 2, "must be given with --devices", "--devices 64"
    ),
    "sequence parallelism of one rank": Mistake(
        f"{PLAN} --sequence-parallel", 2, "must be given with --tensor-parallel", "--tensor-parallel 8"
    ),
    "a sharded optimizer without replicas": Mistake(
        f"{PLAN} --shard-optimizer", 2, "must be given with --devices", "--devices 64"
    ),
    "tensor parallelism over a part of a device": Mistake(
        "plan model.py:build --devices 8 --tensor-parallel 3",
        2,
        "tensor_parallel must divide the devices",
        "--tensor-parallel 8",
    ),
    "links of other devices": Mistake(
        "plan model.py:build --devices 8 --per-node 4", 2, "must not be given with --devices", "leave them out"
    ),
    "a tool that is misspelled": Mistake(f"{PLAN} --emit torchtian", 2, "unknown tool", "did you mean torchtitan?"),
    "a batch for one's own model": Mistake(f"{PLAN} --batch 4", 2, "are for hf: models", "make the batch in model.py"),
    "options for a finished plan": Mistake(
        "explain plan.json --ranks 8", 2, "no effect on a saved plan", "explain without them"
    ),
    "a default for a finished plan": Mistake("explain plan.json --ranks 4", 2, "(file: plan.json, options: --ranks)"),
    "seconds for a plan": Mistake(
        "trace plan.json out.json --forward 2", 2, "the plan has them (file: plan.json, options: --forward)", "plan"
    ),
    "other ranks than those of the plan": Mistake(
        "train model.py:build --data model.py:build --plan plan.json --ranks 4 --memory 1GiB",
        2,
        "no effect on the plan of --plan (options: --ranks, --memory, plan: plan.json, ranks: 2, microbatches: 4)",
        "leave them out",
    ),
    "a batch without a model": Mistake("check plan.json --batch 4", 2, "need --model", "--model hf:NAME"),
    "parity of a CSV": Mistake(
        "check three.csv --model model.py:build", 2, "--model needs a plan", "--schedule FILE.csv"
    ),
    "a model in the place of a plan": Mistake(
        "check model.py:build", 2, "cannot read the file", "--model model.py:build"
    ),
    "a plan in the place of a model": Mistake("plan plan.json", 2, "expected FILE.py:FUNCTION", "explain plan.json"),
    # orders
    "a schedule unheard of": Mistake("simulate frobnicate", 2, "unknown schedule", "one of gpipe, 1f1b"),
    "too many ranks": Mistake("simulate gpipe --ranks 9999", 2, "limits: (8192, 65536"),
    "stages it cannot hold": Mistake(
        "simulate zbv --stages-per-rank 3", 2, "stages_per_rank must be 2 for this schedule", "--stages-per-rank 2"
    ),
    "a sweep that is no list": Mistake("simulate --sweep 4;8", 2, "must be a list of numbers", "--sweep 4,8,16"),
    "a negative time": Mistake("simulate gpipe --forward -1", 2, "forward must be a finite number, 0 or more"),
    "an enormous time": Mistake("simulate zbv --forward 1e308", 2, "forward must be at most 1e+100"),
    "an enormous latency": Mistake("simulate gpipe --latency 1e308", 2, "latency must be at most 1e+100"),
    "hardly any bandwidth": Mistake(f"{PLAN} --bandwidth 1e-305", 2, "bandwidth must be at least 1e-100"),
    "a time that is no number": Mistake("simulate gpipe --latency nan", 2, "latency must be finite seconds"),
    "more overlap than there is": Mistake("simulate gpipe --overlap 2", 2, "overlap must be a share between 0 and 1"),
    "a size of no known unit": Mistake("simulate --activation-bytes 3XB", 2, "not a size in bytes", '"24GiB"'),
    "one CSV for all": Mistake("simulate --csv a.csv", 2, "needs a single schedule", "simulate gpipe --csv a.csv"),
    "one bad cell": Mistake("check cell.csv", 2, "(file: cell.csv, row: 2, column: 3, cell: '1X0')", "such as 2F0"),
    "a CSV that is not there": Mistake(
        f"{PLAN} --schedule missing.csv", 2, "(file: missing.csv, reason: no such file or directory)"
    ),
    "a CSV for other ranks": Mistake(f"{PLAN} --schedule three.csv", 2, "must have the requested sizes", "--ranks 3"),
    "orders that block": Mistake("check stuck.csv", 2, "rank 1 is blocked at 1F1 (position 1), which needs 0F1"),
    "an empty CSV": Mistake("check empty.csv", 2, "a schedule must have at least one row"),
    "a stage on two ranks": Mistake("check twice.csv", 2, "a stage must be on one rank (file: twice.csv"),
    # plans and other documents
    "a deeper model": Mistake(
        "check plan.json --model model.py:deeper", 2, "(name: 4.weight, planned: no parameter", "plan"
    ),
    "a wider model": Mistake(
        "check plan.json --model model.py:wider", 2, "planned: float32[4, 4], model: float32[5, 5]"
    ),
    "a newer format": Mistake("explain newer.json", 2, "version: 2, supported: 1", "a newer penstock"),
    "a file that was cut off": Mistake("show cut.json", 2, "not JSON (file: cut.json", "complete, unchanged file"),
    "JSON of something else": Mistake("show other.json", 2, "not a penstock document", "that penstock wrote"),
    "a record that does not exist": Mistake("show plane.json", 2, "unknown record type", "that penstock wrote"),
    "a key that is missing": Mistake("show keyless.json", 2, "path: value.ranks", "that penstock wrote"),
    "nothing to prove": Mistake("check place.json", 2, "nothing to prove (got: Placement)", "a schedule, program"),
    "nothing to trace": Mistake("trace place.json out.json", 2, "no order to trace", "a schedule, program"),
    "no plan to explain": Mistake(
        "explain three.csv", 2, "only a plan can be explained (got: Schedule)", "penstock plan"
    ),
    "a file with another name": Mistake("show plann.json", 2, "no such file", "did you mean plan.json?"),
    "a file of too long a name to show": Mistake(f"show {'a' * 300}", 2, "file name too long"),
    "a directory to show": Mistake("show none", 2, "(file: none, reason: is a directory)", "a file in it"),
    "a view as JSON": Mistake(
        "show three.csv --view table --json", 2, "--json prints the record", "--view chrome without --json"
    ),
    "a table as a picture": Mistake(
        "show three.csv --view table --out table.png",
        2,
        "cannot be drawn as PNG (view: table, file: table.png)",
        "--view timeline or memory",
    ),
    "a picture of another format": Mistake(
        "show three.csv --view timeline --out a.gif", 2, "must end in .svg or .png, got .gif (file: a.gif)", "a.svg"
    ),
    "a model as PNG": Mistake("capture model.py:build --svg a.png", 2, "must end in .svg, got .png", "a.svg"),
    "an SVG as PNG": Mistake("simulate gpipe --png a.SVG", 2, "must end in .png, got .SVG", "a.png"),
    "a PNG as SVG": Mistake("simulate gpipe --memory-svg a.png", 2, "must end in .svg, got .png", "a.svg"),
    # what is written
    "a missing directory": Mistake("simulate --svg no/a.svg", 2, "does not exist", "mkdir -p no"),
    "a directory in the way": Mistake(
        "plan model.py:build --out none", 2, "expected a file, got a directory", "none/NAME"
    ),
    "one file for two": Mistake(
        "simulate --svg a --trace ./a", 2, "two outputs must not be the same file", "a name for each"
    ),
    "its own source": Mistake("capture model.py:build --svg model.py", 2, "would overwrite its input", "another name"),
    "ctrl-c": Mistake("plan model.py:interrupted --out new.json", 130, "interrupted"),
    # Hugging Face
    "no configuration": Mistake("plan hf:none", 2, "no config.json in the directory", "save_pretrained"),
    "no such directory": Mistake("plan hf:./nowhere", 2, "no such file or directory", "hf:DIRECTORY"),
    "no name": Mistake("plan hf:", 2, "needs a model name", "hf:llama"),
    "a type that is misspelled": Mistake("plan hf:lama", 2, "unknown model type (name: 'lama')", "did you mean llama?"),
    "a misspelled type in a file": Mistake("plan hf:typo", 2, "(model type: 'lama', file: typo", "did you mean llama?"),
    "code that comes along": Mistake("plan hf:hub", 2, "(model type: 'mine'", "is not run"),
    "a configuration of no type": Mistake("plan hf:plain", 2, "has no model_type", "written by save_pretrained"),
    "a name of the hub": Mistake("plan hf:some/model", 2, "penstock downloads nothing", "hf download some/model"),
    "more than memory": Mistake("capture hf:llama --weights --batch 1", 4, "do not fit in the memory", "fewer layers"),
    "a long sequence": Mistake("capture hf:gpt2 --sequence 9999", 2, "positions: 1024", "--sequence 1024"),
}


@cache
def plan_text() -> str:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    found = penstock.plan(model, (torch.ones(8, 4),), ranks=2, microbatches=4, schedule="1f1b", partitioner="uniform")
    return to_json(found)


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {**FILES, "plan.json": plan_text()}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    # Whatever the machine has: what does not fit must be refused before it is tried.
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 2**30}))


def files_in(directory: Path) -> list[Path]:
    """All files but compiled modules, which Python writes on import."""
    return sorted(path for path in directory.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained_with_its_code_and_what_to_try(mistake: str, call, tmp_path: Path) -> None:
    typed, code, message_part, tries = MISTAKES[mistake]
    before = files_in(tmp_path)
    result = call(*typed.split())
    message, _, hint = result.output.partition("\ntry: ")
    assert result.exit_code == code, result.output
    assert message_part in message
    assert tries in hint
    assert "Traceback" not in result.output
    assert files_in(tmp_path) == before


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(
    ("library", "typed", "hint"),
    [("matplotlib", "simulate gpipe --png a.png", "[plot]"), ("transformers", "plan hf:llama", "penstock[hf]")],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    library: str, typed: str, hint: str, call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {library, *(name for name in sys.modules if name.startswith(f"{library}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    result = call(*typed.split())
    assert f"{library}, which is not installed" in result.output
    assert hint in result.output.partition("\ntry: ")[2]
    assert result.exit_code == 2


@pytest.mark.usefixtures("_files")
def test_a_plan_for_more_ranks_than_cores_is_warned_of(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    result = call(*f"{PLAN} --schedule 1f1b --partitioner uniform --microbatches 2".split())
    assert "for 2 ranks with one core each; for this machine: --cores 1" in result.stderr
    assert result.exit_code == 0


def test_a_file_that_is_no_text_is_refused(call, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(128, 256)))
    result = call("show", "noise")
    assert "expected JSON or an order" in result.output
    assert result.exit_code == 2


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("file", ["cut.json", "newer.json", "cell.csv", "stuck.csv", "empty.csv"])
def test_a_failed_proof_is_also_reported_as_json(file: str, call) -> None:
    result = call("check", "--json", file)
    answer = json.loads(result.stdout)
    assert not answer["proven"]
    assert answer["problem"]
    assert result.exit_code == 2


@pytest.mark.parametrize("target", ["s.csv", "./s.csv", "link.csv"])
def test_a_file_is_not_written_over_what_it_is_made_from(
    target: str, call, written: Callable[[str, str], Path], tmp_path: Path
) -> None:
    file = written("s.csv", "0F0,0B0\n")
    (tmp_path / "link.csv").symlink_to(file)
    result = call("trace", file, target)
    assert "the output would overwrite its input" in result.output
    assert result.exit_code == 2
    assert file.read_text() == "0F0,0B0\n"


def test_devices_may_be_named_twice(call) -> None:
    assert call("simulate", "gpipe", "--svg", "/dev/null", "--trace", "/dev/null").exit_code == 0
