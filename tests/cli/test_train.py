"""train: a model of the user's trained on processes, a line per step, and the mistakes that users make."""

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.api.train_options import TrainOptions
from penstock.cli.options import Example
from penstock.cli.plan import PlanFlags
from penstock.cli.train import PlanChoice
from penstock.cli.train_log import missing_steps
from penstock.cli.training_job import CheckpointFlags, Job, TrainFlags
from penstock.errors import FitError
from penstock.ir import Run
from tests.cli.checkpoint_runs import in_a_copy
from tests.leftovers import wait_until

FILE = """\
import os

import torch
from torch import nn
from torch.nn import functional

def build():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.ones(8, 4)

def without_weights():
    with torch.device("meta"):
        return build()

def unequal():
    while True:
        yield torch.full((8, 4), float(os.getpid())), torch.zeros(8, dtype=torch.long)

def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        yield torch.randn(8, 4, generator=generator), torch.randint(0, 4, (8,), generator=generator)

def forever():
    while True:
        yield torch.ones(8, 4), torch.zeros(8, dtype=torch.long)

def inputs_alone():
    yield torch.ones(8, 4)

def none():
    return iter(())

def number():
    return 7

def broken():
    yield torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
    raise KeyError("page 3")

class Unreadable:
    def __iter__(self):
        raise KeyError("page 1")

def unreadable():
    return Unreadable()

def spoilt():
    while True:
        yield torch.full((8, 4), float("inf")), torch.zeros(8, dtype=torch.long)

def loss(output, target):
    return functional.cross_entropy(output, target)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def no_optimizer(parameters):
    return list(parameters)

def broken_optimizer(parameters):
    raise KeyError("groups")
"""
SLOW_LOSS = """
def slow_loss(output, target):
    return functional.cross_entropy(output, target) + 0 * (output.sum() + torch.zeros(1_000_000)).exp().mean()
"""
TRAIN = ("train", "model.py:build", "--ranks", "2", "--microbatches", "4", "--schedule", "1f1b", "--budget", "0")
WITHOUT_RATE = (*TRAIN, "--data", "model.py:batches", "--loss", "cross_entropy")
GOOD = (*WITHOUT_RATE, "--optimizer", "sgd", "--lr", "0.1")
MISTAKES = {
    "no such data function": ((*TRAIN, "--data", "model.py:batchs"), 2, "did you mean batches?"),
    "no such loss": ((*GOOD, "--loss", "cross"), 2, "try: cross_entropy"),
    "no such optimizer": ((*GOOD, "--optimizer", "adamm"), 2, "try: adamw"),
    "an optimizer that is none": (
        (*WITHOUT_RATE, "--optimizer", "model.py:no_optimizer"),
        5,
        "the function must return an optimizer (function: no_optimizer, got: list)",
    ),
    "an optimizer that breaks": ((*WITHOUT_RATE, "--optimizer", "model.py:broken_optimizer"), 5, "KeyError: 'groups'"),
    "an optimizer that refuses": ((*GOOD, "--optimizer", "sparseadam", "--lr", "0"), 5, "cannot construct SparseAdam"),
    "a rate that is no number": ((*GOOD, "--lr", "nan"), 2, "try: --lr 1e-3"),
    "a norm below zero": ((*GOOD, "--clip", "-1"), 2, "try: --clip 1.0"),
    "no steps": ((*GOOD, "--steps", "0"), 2, "--steps"),
    "a plan that is no file": ((*GOOD, "--plan", "plan.json"), 2, "no such file or directory)"),
    "a plan that is another record": ((*GOOD, "--plan", "order.csv"), 2, "must be the file of a plan"),
    "a rate beside a function": ((*GOOD, "--optimizer", "model.py:no_optimizer"), 2, "--lr has no effect"),
    "a loss and no target": ((*GOOD, "--data", "model.py:inputs_alone"), 5, "try: yield inputs, target"),
    "no loss at all": ((*TRAIN, "--data", "model.py:inputs_alone"), 5, "--loss"),
    "a target and no loss": (
        (*TRAIN, "--data", "model.py:batches"),
        5,
        "--loss NAME, if a batch is a pair of inputs and target",
    ),
    "a model without weights": (
        ("train", "model.py:without_weights", *GOOD[2:]),
        5,
        "try: --weights, for random weights of an hf: model; for others FILE.py:FUNCTION",
    ),
    "other batches on other ranks": (
        (*GOOD, "--data", "model.py:unequal"),
        5,
        "try: the same batch on every rank (with the same seed of the data loader)\n",
    ),
    "no batches": ((*GOOD, "--data", "model.py:none"), 5, "the data has no batches"),
    "data that is none": ((*GOOD, "--data", "model.py:number"), 2, "the data function must return batches"),
    "data that breaks": ((*GOOD, "--data", "model.py:broken"), 5, "KeyError: 'page 3'"),
    "data that cannot be read": ((*GOOD, "--data", "model.py:unreadable"), 2, "KeyError: 'page 1'"),
    "numbers that are none": ((*GOOD, "--data", "model.py:spoilt"), 5, "3 steps in a row: "),
    "a file in the place of the directory": ((*GOOD, "--out", "model.py"), 2, "must be a directory, got a file"),
}


@pytest.fixture(autouse=True)
def _file(written: Callable[[str, str], Path]) -> None:
    written("model.py", FILE)
    written("order.csv", "0F0,0B0\n")


def plain_losses() -> list[float]:
    """Of the same training in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(6):
        x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_trains_like_one_process_and_keeps_the_run(call, tmp_path: Path) -> None:
    result = call(*GOOD, "--clip", "0.5", "--out", "run")
    assert result.exit_code == 0, result.output
    run = Run.load(tmp_path / "run" / "run.json")
    assert run.losses == pytest.approx(plain_losses(), rel=1e-6)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "plan.json",
        "run.json",
        "trace.json.gz",
        "report.html",
        "steps.jsonl",
    }


def test_loss_and_optimizer_may_be_functions_of_the_user(call, tmp_path: Path) -> None:
    own = ("--loss", "model.py:loss", "--optimizer", "model.py:optimizer", "--clip", "0.5", "--steps", "2")
    assert call(*TRAIN, "--data", "model.py:batches", *own, "--out", "run").exit_code == 0
    assert Run.load(tmp_path / "run" / "run.json").losses == pytest.approx(plain_losses()[:2], rel=1e-6)


def test_a_split_output_layer_is_planned_with_the_loss_and_the_first_batch(call, tmp_path: Path) -> None:
    result = call(*GOOD, "--vocabulary-shards", "2", "--clip", "0.5", "--steps", "2", "--out", "run")
    assert result.exit_code == 0, result.output
    run = Run.load(tmp_path / "run" / "run.json")
    assert {node.name for node in run.plan.graph.nodes} >= {"3.shards.0", "3.shards.1", "3.combine"}
    assert run.losses == pytest.approx(plain_losses()[:2], rel=1e-6)


def test_the_time_of_the_loss_counts_in_the_plan(written) -> None:
    model = f"{written('model.py', FILE + SLOW_LOSS)}:"
    flags = TrainFlags(data=f"{model}batches", loss=f"{model}slow_loss")
    options = PlanFlags(ranks=2, microbatches="2", schedule="1f1b", budget=0.0)
    plan = PlanChoice(Job(f"{model}build", Example(), flags, TrainOptions(), options, CheckpointFlags()), None).first()
    assert plan.costs.forward[1] > 5 * plan.costs.forward[0]


def test_the_plan_for_fewer_ranks_has_the_options_given_beside_a_plan(written, tmp_path: Path) -> None:
    model = f"{written('model.py', FILE)}:"
    flags, options = TrainFlags(data=f"{model}batches", loss="cross_entropy"), PlanFlags(ranks=2, budget=0.0)
    job = Job(f"{model}build", Example(), flags, TrainOptions(), options, CheckpointFlags())
    plan = PlanChoice(job, None).first()
    plan.save(tmp_path / "plan.json")
    tight = replace(job, plan_options=PlanFlags(memory="100B", budget=0.0))
    with pytest.raises(FitError):
        PlanChoice(tight, tmp_path / "plan.json").for_fewer(plan, 1)


OF_LENGTHS = """\
import torch
from torch import nn
from torch.nn import functional

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(16, 4), nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 16)

    def forward(self, input_ids, labels):
        logits = self.head(self.blocks(self.words(input_ids)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def batch(seed):
    words = torch.randint(1, 16, (8, 32), generator=torch.Generator().manual_seed(seed))
    is_padding = torch.arange(32) >= torch.tensor([32, 2, 3, 16, 5, 7, 9, 4])[:, None]
    return {"input_ids": words.masked_fill(is_padding, 0), "labels": words.masked_fill(is_padding, -100)}

def build():
    return Words(), batch(0)

def batches():
    return [batch(seed) for seed in range(3)]
"""


def test_a_budget_of_tokens_trains_like_one_process(call, written, tmp_path: Path) -> None:
    source = runpy.run_path(os.fspath(written("lengths.py", OF_LENGTHS)))
    command = ("train", "lengths.py:build", *TRAIN[2:], "--data", "lengths.py:batches", "--optimizer", "sgd")
    result = call(*command, "--lr", "0.1", "--microbatches", "2", "--budget-tokens", "32", "--out", "run")
    assert result.exit_code == 0, result.output
    torch.manual_seed(0)
    model, losses = source["build"]()[0], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in source["batches"]():
        optimizer.zero_grad()
        losses.append(model(**batch))
        losses[-1].backward()
        optimizer.step()
    run = Run.load(tmp_path / "run" / "run.json")
    assert run.losses == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    # 32 tokens are one sample, or two of up to 16, or four of up to 8.
    assert run.trace.program.num_microbatches >= 4


@pytest.mark.parametrize(("arguments", "code", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message(call, arguments: tuple[str, ...], code: int, text: str) -> None:
    result = call(*arguments)
    assert text in result.output
    assert "Traceback" not in result.output
    assert result.exit_code == code


OF_TORCHRUN = ("--clip", "0.5", "--steps", "2", "--out", "run", "--json")


def steps_in(text: str) -> list[int]:
    return [json.loads(line)["step"] for line in text.splitlines() if line.startswith("{")]


def ended(pid: int) -> int:
    """The exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_with_the_variables_of_torchrun_every_process_is_a_rank_and_the_first_one_plans(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    outputs = [tmp_path / f"output{rank}.txt" for rank in range(2)]
    pids = [
        in_a_copy(tmp_path, output, *OF_TORCHRUN, command=GOOD, RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank, output in enumerate(outputs)
    ]
    assert [ended(pid) for pid in pids] == [0, 0], "\n".join(output.read_text() for output in outputs)
    assert [steps_in(output.read_text()) for output in outputs] == [[0, 1], []]
    assert Run.load(tmp_path / "run" / "run.json").losses == pytest.approx(plain_losses()[:2], rel=1e-6)


@pytest.mark.whole
def test_under_torchrun_every_process_is_a_rank_and_the_first_one_plans(tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    torchrun = [sys.executable, "-m", *launcher, "-m", "penstock"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [*torchrun, *GOOD, *OF_TORCHRUN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert steps_in(done.stdout) == [0, 1]
    assert Run.load(tmp_path / "run" / "run.json").losses == pytest.approx(plain_losses()[:2], rel=1e-6)


@pytest.mark.whole  # as above, on four processes
def test_replicas_under_torchrun_share_every_batch(tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    torchrun = [sys.executable, "-m", *launcher, "-m", "penstock"]
    options = ("--replicas", "2", "--device", "cpu", "--clip", "0.5", "--steps", "2", "--out", "run", "--json")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*torchrun, *GOOD, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = Run.load(tmp_path / "run" / "run.json")
    assert run.losses == pytest.approx(plain_losses()[:2], rel=1e-6)
    assert run.plan.num_ranks == 2


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The pid and the output of a training without end that has taken three steps."""
    output = tmp_path / "output.txt"
    options = ("--data", "model.py:forever", "--out", "run", "--json")
    pid = in_a_copy(tmp_path, output, *options, command=GOOD)
    wait_until(lambda: output.exists() and len(steps_in(output.read_text())) >= 3)
    yield pid, output
    with contextlib.suppress(ChildProcessError):  # the test has waited for its end
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_ctrl_c_stops_all_ranks_after_the_same_step_and_keeps_what_was_done(
    endless: tuple[int, Path], tmp_path: Path
) -> None:
    pid, output = endless
    os.kill(pid, signal.SIGINT)
    assert ended(pid) == 0, output.read_text()
    assert "stopping after this step" in output.read_text()
    run = Run.load(tmp_path / "run" / "run.json")
    assert [figures.step for figures in run.steps] == steps_in(output.read_text())


def test_a_second_ctrl_c_stops_at_once_and_leaves_nothing_half_written(
    endless: tuple[int, Path], tmp_path: Path
) -> None:
    pid, output = endless
    os.kill(pid, signal.SIGSTOP)  # both signals are there when it goes on
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGCONT)
    assert ended(pid) == 130, output.read_text()
    assert [path.name for path in (tmp_path / "run").iterdir()] in (["steps.jsonl"], [])


def test_steps_that_could_not_be_written_are_named() -> None:
    steps = tuple(SimpleNamespace(step=step) for step in (0, 1, 5, 6, 9))
    assert missing_steps(SimpleNamespace(steps=steps)) == [(2, 4), (7, 8)]
