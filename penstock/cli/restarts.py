"""Restarts a training run from its checkpoints, and guards the directory of the checkpoints."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli.output import BAD_CHECKPOINT, RUN_FAILED, failed, note, with_flags
from penstock.cli.training_job import AUTO, PLAN_OPTIONS, CheckpointFlags, Job, run_rank
from penstock.errors import CheckpointError, DamagedError, PenstockError, RunError

if TYPE_CHECKING:
    from penstock.ir import Plan, Run
    from penstock.launch import RankFailure, RestartDecision, StopRequest

# The ranks of a command that was just killed need some time to exit and to release the lock.
_LOCK_SECONDS = 10.0
_POLL_SECONDS = 0.1


def check_checkpoints(flags: CheckpointFlags, ranks: int | None, attempt: int) -> None:
    """Refuse wrong combinations before work is spent, and create the directory of the checkpoints."""
    from penstock.launch import parse_faults

    if flags.checkpoint is None:
        # Faults are injected in runs without checkpoints too.
        needing = [each for each in fields(flags) if each.name not in ("checkpoint", "fault")]
        given = [each.name for each in needing if getattr(flags, each.name) != each.default]
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            raise PenstockError(f"{flag} needs --checkpoint", hint=f"--checkpoint DIRECTORY {flag} ...")
    else:
        _check_directory(flags.checkpoint, AUTO if attempt else flags.resume)
    if ranks is not None:
        check_min_ranks(flags, ranks)
    parse_faults(flags.fault or ())


def check_min_ranks(flags: CheckpointFlags, ranks: int) -> None:
    """Refuse a --min-ranks above the number of ranks."""
    if flags.min_ranks is not None and flags.min_ranks > ranks:
        hint = f"--min-ranks {ranks} or less"
        raise PenstockError("--min-ranks must not exceed the ranks", min_ranks=flags.min_ranks, ranks=ranks, hint=hint)


def _check_directory(directory: Path, resume: str | None) -> None:
    """Create the directory of the checkpoints; refuses one with checkpoints that the run would mix with its own."""
    from penstock.checkpoint import CheckpointDir, find_checkpoints, is_checkpoint, step_of

    if directory.exists() and not directory.is_dir():
        raise PenstockError("--checkpoint must be a directory, got a file", checkpoint=directory, hint="another name")
    if is_checkpoint(directory):
        hint = f"--checkpoint {directory.parent} --resume {directory}"
        raise PenstockError("--checkpoint must be a directory of checkpoints, got one", checkpoint=directory, hint=hint)
    CheckpointDir(directory).create()
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PenstockError("no permission to write there", checkpoint=directory, hint="another directory")
    checkpoints = CheckpointDir(directory).checkpoints
    if resume is None and checkpoints:
        newest = checkpoints[0].name
        hint = "--resume auto to resume it, or another directory"
        problem = "the directory already has checkpoints of a run"
        raise PenstockError(problem, checkpoint=directory, newest=newest, hint=hint)
    if resume not in (None, AUTO):
        if not Path(resume).exists():
            hint = "--resume auto, or the path of a checkpoint"
            raise PenstockError("no such checkpoint to resume from", resume=resume, hint=hint)
        # After a failure the newest checkpoint of the directory counts: two runs must not be mixed.
        source, newest_path = find_checkpoints(resume)[0], next(iter(checkpoints), None)
        if newest_path is not None and step_of(newest_path) > (step_of(source) or 0):
            hint = "--resume auto, or another directory for the checkpoints"
            raise PenstockError("the directory has newer checkpoints", newest=newest_path, resume=source, hint=hint)


@contextmanager
def locked(directory: Path | None) -> Iterator[None]:
    """Lock the directory of the checkpoints, so that no other run saves there."""
    if directory is None:
        yield
        return
    from penstock.checkpoint import lock_exclusively

    end = time.monotonic() + _LOCK_SECONDS
    while (lock := lock_exclusively(directory.resolve())) is None:
        if time.monotonic() > end:
            hint = "another directory, or stop the other run"
            raise PenstockError("another run is saving to this directory", checkpoint=directory, hint=hint)
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


class SavedPlan(NamedTuple):
    """The plan that a run was saved with, and the options it was made with."""

    plan: "Plan"
    options: Any


def saved_plan(source: Path | None) -> SavedPlan | None:
    """The plan of the newest readable checkpoint."""
    from penstock.checkpoint import with_checkpoints

    return None if source is None else with_checkpoints(source, _first_plan)


def _first_plan(checkpoints: list[Path]) -> SavedPlan | None:
    """The plan of the first checkpoint that is not damaged."""
    from penstock.checkpoint import PLAN, RUN, CheckpointReader, VanishedError, check_digests
    from penstock.ir import Plan, from_json

    for directory in checkpoints:
        try:
            with CheckpointReader(directory) as reader, reader.documents():
                files = [name for name in reader.manifest.files if name.startswith((PLAN, f"{RUN}."))]
                check_digests(directory, reader.manifest, files)
                extra = reader.run.extra
                plan = from_json(reader.content(PLAN).decode(), Plan)
        except VanishedError:
            raise
        except PenstockError:
            continue  # the ranks report the damage, and skip it too
        return SavedPlan(plan, extra.get(PLAN_OPTIONS) if isinstance(extra, dict) else None)
    return None


class Supervisor:
    """Launches the ranks of a run, and restarts them after a failure as the policy allows."""

    def __init__(self, job: Job, status_directory: Path, stop: "StopRequest") -> None:
        self._job, self._flags, self._status_directory, self._stop = job, job.checkpoints, status_directory, stop

    def run(self, plan: "Plan", replan: "Callable[[int], Plan]") -> "Run | None":
        """Run to the end; None if a stop was requested between two attempts. `replan` plans for fewer ranks."""
        # Ranks are forked from this process and need not import again what it has imported. Creating any optimizer
        # imports torch._dynamo, which takes a second on each rank.
        import torch._dynamo  # noqa: F401

        import penstock.api.train_loop  # noqa: F401
        from penstock.ir import Run, from_json
        from penstock.launch import RankFailure, RestartController, launch

        controller = RestartController(self._flags.restart_policy, plan.num_ranks)
        while True:
            job = replace(self._job, attempt=controller.restarts)
            try:
                processes = plan.num_ranks * job.flags.replicas
                results = launch(run_rank, processes, job, plan, status_dir=self._status_directory)
                return from_json(results[0], Run)
            except RunError as error:
                failure = RankFailure.of(error)
                decision = controller.decide(failure, self._newest)
                if decision.end or self._stop or not self._flags.restart_policy.restarts:
                    # An error raised on purpose explains itself; its traceback is not shown.
                    text, tries, hint = (error.rank_message or str(error)).partition("\ntry: ")
                    text += tries + with_flags(hint)
                    reason = f"\nnot restarted: {decision.end}" if decision.end else ""
                    is_checkpoint = error.rank_error_type in (CheckpointError.__name__, DamagedError.__name__)
                    raise failed(text + reason, BAD_CHECKPOINT if is_checkpoint else RUN_FAILED) from None
                note(self._restart_message(failure, decision, controller.restarts, plan.num_ranks))
            end = time.monotonic() + decision.pause_seconds
            while time.monotonic() < end and not self._stop:
                time.sleep(_POLL_SECONDS)
            if self._stop:
                note(f"stopped before the restart from {self._source}")
                return None
            if decision.ranks < plan.num_ranks:
                plan = replan(decision.ranks)

    def _restart_message(self, failure: "RankFailure", decision: "RestartDecision", restart: int, ranks: int) -> str:
        from penstock.ir import counted

        location = f" after {failure.step} steps" if failure.step else ""
        location += f", in {failure.action}" if failure.action else ""
        source = self._source
        if decision.ranks < ranks:
            source += f" with {counted(decision.ranks, 'rank')}, because rank {failure.rank} failed permanently"
        return (
            f"rank {failure.rank} failed{location}: {failure.summary}\n"
            f"restart {restart} of {self._flags.restarts} in {decision.pause_seconds:g} s from {source}"
        )

    @property
    def _newest(self) -> int | None:
        """The step of the newest checkpoint with a readable manifest."""
        from penstock.checkpoint import CheckpointDir

        directory = self._flags.checkpoint
        return None if directory is None else CheckpointDir(directory).newest_step

    @property
    def _source(self) -> str:
        """Where the next attempt begins, as text."""
        if self._newest is not None:
            return f"step {self._newest}"
        return "the beginning" if self._flags.resume in (None, AUTO) else str(self._flags.resume)
