"""train: a model of the user's trained by a plan, on local processes or as one rank of torchrun."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from penstock.cli.builds import Model
from penstock.cli.options import AsJson, Example
from penstock.cli.outcome import RUN_FAILED, failed
from penstock.cli.plan import Machine, Wishes, planned
from penstock.cli.run_files import BOARD, check_directory, write_run
from penstock.cli.screen import note
from penstock.cli.training_job import How, Job, check_job, work
from penstock.errors import PenstockError, RunError

if TYPE_CHECKING:
    from penstock.ir.plan import Plan
    from penstock.ir.run import Run


@dataclass(frozen=True)
class Files:
    """What is read and written."""

    plan: Annotated[Path | None, Option(metavar="FILE", help="Train by this plan; else one is searched for.")] = None
    out: Annotated[Path | None, Option(metavar="DIRECTORY", help="Keep plan, run, trace and report there.")] = None


def train(
    *,
    model: Model,
    how: How,
    wishes: Wishes,
    example: Example,
    files: Files,
    as_json: AsJson = False,
) -> None:
    """Train a model by a plan.

    Every rank is a process of this machine; under torchrun this process is one of them. A line per step tells the loss,
    the norm of all gradients, the time against the prediction, and what is left. The first ctrl-c stops all ranks after
    their step and keeps what was done; a second one stops at once.
    """
    if files.out is not None:
        check_directory(files.out)
    job = Job(model, example, how, as_json)
    check_job(job)
    plan = _plan(job, wishes, files.plan)
    run = _under_torchrun(job, plan) if _is_rank() else _launched(job, plan, files.out)
    if run is None:
        return
    if not as_json:
        typer.echo(_summary(run))
    if files.out is not None:
        for path in write_run(run, files.out):
            note(f"wrote {path}")


def _plan(job: Job, wishes: Wishes, file: Path | None) -> "Plan":
    from penstock.ir.plan import Plan

    if file is not None:
        return Plan.load(file)
    if _is_rank():
        hint = "penstock plan MODEL --out plan.json, then torchrun ... -m penstock train MODEL --plan plan.json"
        raise PenstockError("under torchrun every rank needs the same plan", hint=hint)
    return planned(job.model, wishes, Machine.here(wishes.ranks), job.example)


def _is_rank() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def _launched(job: Job, plan: "Plan", out: Path | None) -> "Run":
    from penstock.ir import codec
    from penstock.ir.run import Run
    from penstock.processes.launch import launch
    from penstock.processes.stopping import passing_on

    if plan.cluster.cores is None and (cores := Machine.here(plan.num_ranks).cores) is not None:
        note(f"{plan.num_ranks} ranks share {cores} cores: steps take longer than predicted")
    with _board(out) as board, passing_on(board, lambda: note("stopping after this step; ctrl-c again stops at once")):
        try:
            first, *_ = launch(work, plan.num_ranks, job, plan, board=board)
        except RunError as error:
            # Raised on purpose, it says what is wrong without the way that led there.
            words = error.words_of_rank or str(error)
            raise failed(words.replace("loss_fn=...", "--loss NAME"), RUN_FAILED) from None
    return codec.from_json(first, Run)


@contextmanager
def _board(out: Path | None) -> Iterator[Path]:
    """Where the ranks note what they do; beside the run it stays if a rank breaks, or if this process is killed."""
    from penstock.processes.scratch import scratch

    if out is None:
        with scratch() as directory:
            yield directory
        return
    board = out / BOARD
    board.mkdir(mode=0o700, exist_ok=True)
    try:
        yield board
    except typer.Exit:
        note(f"what every rank did last: penstock why-hung {out}")
        raise
    except BaseException:
        rmtree(board, ignore_errors=True)
        raise
    rmtree(board, ignore_errors=True)


def _under_torchrun(job: Job, plan: "Plan") -> "Run | None":
    import torch.distributed as dist

    from penstock.ir import codec
    from penstock.ir.run import Run

    dist.init_process_group("gloo")
    try:
        text = work(job, plan)
        return codec.from_json(text, Run) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _summary(run: "Run") -> str:
    from penstock.cli.step_line import number_text
    from penstock.ir.units import counted, seconds_text

    losses = " to ".join(number_text(figures.loss) for figures in (run.steps[0], run.steps[-1]))
    return (
        f"{counted(len(run.steps), 'step')}: loss {losses}, "
        f"{seconds_text(run.step_seconds or 0.0)} per step, {seconds_text(run.plan.predicted.makespan)} predicted"
    )
