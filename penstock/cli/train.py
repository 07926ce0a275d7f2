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
from penstock.cli.lasting import Lasting, check_lasting, held
from penstock.cli.options import AsJson, Example
from penstock.cli.plan import Machine, Wishes
from penstock.cli.planning import Planning
from penstock.cli.run_files import BOARD, Diary, check_directory, write_run
from penstock.cli.running import is_rank
from penstock.cli.screen import note
from penstock.cli.supervised import Supervisor
from penstock.cli.training_job import How, Job, check_job, work

if TYPE_CHECKING:
    from penstock.ir import Run

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class Files:
    """What is read, written and printed."""

    plan: Annotated[Path | None, Option(metavar="FILE", help="Train by this plan; else one is searched for.")] = None
    out: Annotated[Path | None, Option(metavar="DIRECTORY", help="Keep plan, run, trace and report there.")] = None
    as_json: AsJson = False


def train(
    *,
    model: Model,
    how: How,
    wishes: Wishes,
    example: Example,
    files: Files,
    lasting: Lasting,
) -> None:
    """Train a model by a plan.

    Every rank is a process of this machine; under torchrun this process is one of them. A line per step tells the loss,
    the norm of all gradients, the time against the prediction, and what is left. The first ctrl-c stops all ranks after
    their step, and with --checkpoint saves it; a second one stops at once. With --checkpoint a training whose ranks
    break is taken up again from its last good checkpoint, and has the numbers of one that nothing happened to.
    """
    if files.out is not None:
        check_directory(files.out)
    life = int(os.environ.get(_RESTARTS, 0)) if is_rank() else 0
    ranks = None if files.plan or is_rank() else wishes.ranks
    check_lasting(lasting, ranks, life)
    job = Job(model, example, how, wishes, lasting, files.out, files.as_json, life)
    check_job(job)
    planning = Planning(job, files.plan)
    is_second = is_rank() and os.environ["RANK"] != "0"
    with held(None if is_second else lasting.checkpoint):
        check_lasting(lasting, ranks, life)  # once more, as another training may have saved there by now
        run = _under_torchrun(job, planning) if is_rank() else _launched(job, planning)
    if run is None:
        return
    if files.out is not None:
        run = Diary(files.out).completed(run)
    if not files.as_json:
        typer.echo(_summary(run))
    if files.out is not None:
        for path in write_run(run, files.out):
            note(f"wrote {path}")


def _launched(job: Job, planning: Planning) -> "Run | None":
    from penstock.launch import forward_stop_signals

    plan = planning.first()
    if plan.cluster.cores is None and (cores := Machine.here(plan.num_ranks).cores) is not None:
        note(f"{plan.num_ranks} ranks share {cores} cores: steps take longer than predicted")
    told = "stopping after this step; ctrl-c again stops at once"
    with _board(job.out) as board, forward_stop_signals(board, lambda: note(told)) as wish:
        supervisor = Supervisor(job, board, wish)
        return supervisor.run(plan, lambda ranks: planning.for_fewer(plan, ranks))


@contextmanager
def _board(out: Path | None) -> Iterator[Path]:
    """Where the ranks note what they do; beside the run it stays if a rank breaks, or if this process is killed."""
    from penstock.launch import scratch_directory

    if out is None:
        with scratch_directory() as directory:
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


def _under_torchrun(job: Job, planning: Planning) -> "Run | None":
    import torch.distributed as dist

    from penstock.ir import Run, from_json

    dist.init_process_group("gloo")
    try:
        _share_board(job.out)
        text = work(job, planning.together(dist.get_world_size()))
        if job.out is not None and dist.get_rank() == 0:
            rmtree(job.out / BOARD, ignore_errors=True)
        return from_json(text, Run) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _share_board(out: Path | None) -> None:
    """Let all ranks note what they do beside the run, where it stays if one breaks."""
    import torch.distributed as dist

    from penstock.launch import STATUS_DIR_VARIABLE, StatusFile

    if out is None:
        return
    if dist.get_rank() == 0:
        (out / BOARD).mkdir(mode=0o700, exist_ok=True)
        StatusFile.clear(out / BOARD)
    dist.barrier()
    os.environ[STATUS_DIR_VARIABLE] = os.fspath(out / BOARD)


def _summary(run: "Run") -> str:
    from penstock.cli.step_line import number_text
    from penstock.ir import counted, seconds_text

    if not run.steps:
        return "nothing was left to do"
    losses = " to ".join(number_text(figures.loss) for figures in (run.steps[0], run.steps[-1]))
    return (
        f"{counted(len(run.steps), 'step')}: loss {losses}, "
        f"{seconds_text(run.step_seconds or 0.0)} per step, {seconds_text(run.plan.predicted.makespan)} predicted"
    )
