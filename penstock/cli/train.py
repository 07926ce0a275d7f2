"""`penstock train`: train a model with a plan, on local processes or as one rank of torchrun.

Its options are the fields of records: TrainOptions (the training loop, in `penstock/api/train_options.py`), TrainFlags
and CheckpointFlags (`training_job.py`, where `run_rank` uses them), PlanFlags (`plan.py`), and Files here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from penstock.api.train_options import TrainOptions
from penstock.cli.files import read_record
from penstock.cli.models import Model
from penstock.cli.options import AsJson, Example, Given
from penstock.cli.output import echo, note
from penstock.cli.plan import Machine, PlanFlags, StateFlags, is_torchrun_rank, make_plan
from penstock.cli.restarts import Supervisor, check_checkpoints, check_min_ranks, locked, saved_plan
from penstock.cli.train_log import (
    RUN,
    STATUS,
    make_directory,
    missing_steps,
    number_text,
    with_earlier_steps,
    write_run,
)
from penstock.cli.training_job import (
    CheckpointFlags,
    Job,
    TrainFlags,
    autocast,
    check_job,
    job_mesh,
    loss_example,
    run_rank,
)
from penstock.errors import FormatError, PenstockError, PlanError

if TYPE_CHECKING:
    from penstock.cli.restarts import SavedPlan
    from penstock.ir import Cluster, Plan, Run


@dataclass(frozen=True)
class Files:
    """Input, output and format."""

    plan: Annotated[Path | None, Option(metavar="FILE", help="Use this plan; default: search for one.")] = None
    out: Annotated[Path | None, Option(metavar="DIRECTORY", help="Write plan, run, trace and report there.")] = None
    as_json: AsJson = False


def train(
    *,
    model: Model,
    flags: TrainFlags,
    options: TrainOptions,
    plan_options: PlanFlags,
    example: Example,
    files: Files,
    checkpoints: CheckpointFlags,
    given: Given,
) -> None:
    """Train a model with a plan.

    Every rank is a process of this machine; under torchrun, this process is one rank. Prints a line per step: loss,
    gradient norm, time against the prediction, time left. The first ctrl-c stops all ranks after their step, and saves
    with --checkpoint; the second stops at once. With --checkpoint, a run whose ranks fail restarts from its last good
    checkpoint and has the same losses as an uninterrupted run.
    """
    from penstock.ir import counted, seconds_text

    if files.out is not None:
        make_directory(files.out)
    # torchrun restarts the ranks itself and counts how often.
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if is_torchrun_rank() else 0
    ranks = None if files.plan or is_torchrun_rank() else plan_options.ranks
    check_checkpoints(checkpoints, ranks, attempt)
    job = Job(model, example, flags, options, plan_options, checkpoints, files.out, files.as_json, attempt)
    check_job(job)
    if "lr" in given and ":" in flags.optimizer:
        hint = "leave --lr out, and set the learning rate in the function"
        raise PenstockError("--lr has no effect on an optimizer of a function", optimizer=flags.optimizer, hint=hint)
    choice = PlanChoice(job, files.plan)
    if files.plan is not None:
        choice.check_options(given)
    is_first = not is_torchrun_rank() or os.environ["RANK"] == "0"
    if is_torchrun_rank():
        from penstock.launch import exit_with_agent, kill_children_at_exit

        # If torchrun is killed, this rank ends, and its data-loader workers with it: they inherit the lock.
        exit_with_agent()
        kill_children_at_exit()
    with locked(checkpoints.checkpoint if is_first else None):
        check_checkpoints(checkpoints, ranks, attempt)  # again: another run may have saved there until now
        run = _train_under_torchrun(job, choice) if is_torchrun_rank() else _train_local(job, choice)
    if run is None:
        return
    is_done, steps = not run.steps, options.steps
    # Without a step, the run ends where it resumed, at the newest checkpoint.
    last = checkpoints.newest_step if is_done else run.steps[-1].step + 1
    is_short = steps is not None and last is not None and last < steps
    if files.out is not None:
        run = with_earlier_steps(run, files.out)
        for gap_start, gap_end in missing_steps(run):
            numbers = f"steps {gap_start + 1} to {gap_end + 1}"
            note(f"{numbers} are missing in {files.out / RUN}: they could not be written there")
    if not files.as_json:
        if is_done:
            has_all = steps is not None and not is_short
            reason = f"{counted(steps, 'step')} were asked for, and are done" if has_all else "the data has ended"
            echo(f"nothing left to train: {reason}")
        else:
            losses = " to ".join(number_text(metrics.loss) for metrics in (run.steps[0], run.steps[-1]))
            measured, predicted = seconds_text(run.step_seconds or 0.0), seconds_text(run.predicted_seconds)
            # Without --out, the losses of the steps before a restart or a resume are not known here.
            first = run.steps[0].step + 1
            numbers = f"steps {first} to {last}" if first < last else f"step {first}"
            taken = counted(len(run.steps), "step") if first == 1 else numbers
            evaluated = run.steps[-1].eval_loss
            losses += "" if evaluated is None else f", eval loss {number_text(evaluated)}"
            echo(f"{taken}: loss {losses}, {measured} per step, {predicted} predicted")
    if is_short:
        note(f"ended after step {last} of {steps}: the data has ended{'' if is_done else ', or a stop was requested'}")
    if files.out is not None:
        for path in write_run(run, files.out):
            note(f"wrote {path}")


def _train_local(job: Job, choice: "PlanChoice") -> "Run | None":
    """Train on processes of this machine; None if a stop was requested before a restart."""
    from penstock.launch import check_devices, forward_stop_signals

    plan = choice.first()
    processes = plan.num_ranks * job.flags.replicas
    if job.flags.device is not None:
        check_devices(job.flags.device, processes)
    if plan.cluster.cores is None and (cores := Machine.here(processes).cores) is not None:
        note(f"{processes} ranks share {cores} cores: steps take longer than predicted")
    message = "stopping after this step; ctrl-c again stops at once"
    with _status_directory(job.out) as directory, forward_stop_signals(directory, lambda: note(message)) as stop:
        return Supervisor(job, directory, stop).run(plan, lambda ranks: choice.for_fewer(plan, ranks))


@contextmanager
def _status_directory(out: Path | None) -> Iterator[Path]:
    """The directory of the ranks' status files; inside --out it is kept if a rank fails, for `why-hung`."""
    from penstock.launch import scratch_directory

    if out is None:
        with scratch_directory() as directory:
            yield directory
        return
    directory = out / STATUS
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        yield directory
    except typer.Exit:
        note(f"last actions of every rank: penstock why-hung {out}")
        raise
    except BaseException:
        rmtree(directory, ignore_errors=True)
        raise
    rmtree(directory, ignore_errors=True)


def _train_under_torchrun(job: Job, choice: "PlanChoice") -> "Run | None":
    """Train as one rank; the Run on rank 0, None on others."""
    import torch.distributed as dist

    from penstock.ir import Run, from_json
    from penstock.launch import STATUS_DIR_VARIABLE, StatusFile

    dist.init_process_group("gloo")
    try:
        if job.out is not None:
            # Status files of all ranks go into --out, where they stay if a rank fails.
            if dist.get_rank() == 0:
                (job.out / STATUS).mkdir(mode=0o700, exist_ok=True)
                StatusFile.clear(job.out / STATUS)
            dist.barrier()
            os.environ[STATUS_DIR_VARIABLE] = os.fspath(job.out / STATUS)
        text = run_rank(job, choice.for_running(dist.get_world_size()))
        if job.out is not None and dist.get_rank() == 0:
            rmtree(job.out / STATUS, ignore_errors=True)
        return from_json(text, Run) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


class PlanChoice:
    """Chooses the plan of a training run: the given plan, that of its checkpoint, or the best found by a search."""

    def __init__(self, job: Job, file: Path | None) -> None:
        self._job, self._options, self._file = job, job.plan_options, file

    def check_options(self, given: Given) -> None:
        """Refuse options of the search for a plan beside --plan, unless they are those of the plan.

        With --min-ranks the other options are for the plan for fewer ranks.
        """
        own = {"--ranks": self._loaded.num_ranks, "--microbatches": str(self._loaded.num_microbatches)}
        asked = {"--ranks": self._options.ranks, "--microbatches": self._options.microbatches}
        # Modules can be opened to another depth than that of the plan.
        typed = [name for name in given.of(PlanFlags) if name not in ("--depth", "--block")]
        if self._job.checkpoints.min_ranks is not None:
            typed = [name for name in typed if name in own]
        if others := [name for name in typed if name not in own or asked[name] != own[name]]:
            hint = "leave them out, or penstock plan MODEL with these options for another plan"
            sizes = {"ranks": self._loaded.num_ranks, "microbatches": self._loaded.num_microbatches}
            problem = "options of the search have no effect on the plan of --plan"
            raise PlanError(problem, options=", ".join(others), plan=self._file, **sizes, hint=hint)

    def first(self) -> "Plan":
        """The plan to begin with."""
        if self._file is not None:
            check_min_ranks(self._job.checkpoints, self._loaded.num_ranks)
            return self._loaded
        saved = self._saved
        if saved is None:
            return self._search(self._options)
        # Any plan gives the same losses up to rounding; the same plan gives them bit for bit.
        if self._has_same_options(saved) and saved.plan.num_ranks == self._options.ranks:
            note(f"using the plan of the checkpoint: {saved.plan.choices.schedule} on {saved.plan.num_ranks} ranks")
            return saved.plan
        return self._search(self._same_microbatches(saved.plan))

    def for_fewer(self, plan: "Plan", ranks: int) -> "Plan":
        """A plan for fewer ranks with the same microbatches."""
        return self._search(replace(self._same_microbatches(plan), ranks=ranks))

    def for_running(self, ranks: int) -> "Plan":
        """The plan for the running process group; collective: the same on every rank."""
        import penstock
        from penstock.launch import use_local_device
        from penstock.runtime import PIPELINE

        replicas = self._job.flags.replicas
        if replicas > 1:
            if ranks % replicas:
                hint = "a number of processes that is a multiple of --replicas"
                raise PenstockError("replicas must have equally many ranks", ranks=ranks, replicas=replicas, hint=hint)
            ranks //= replicas
        device = None if self._job.flags.device is None else use_local_device(self._job.flags.device)
        mesh = job_mesh(self._job.flags, ranks)
        group = None if mesh is None else mesh.get_group(PIPELINE)
        fewest = self._job.checkpoints.min_ranks
        if fewest is not None and ranks < fewest:
            raise PenstockError("fewer ranks are running than --min-ranks", ranks=ranks, min_ranks=fewest)
        if self._file is not None and (self._loaded.num_ranks == ranks or fewest is None):
            return self._loaded  # the Pipeline refuses a plan for another number of ranks
        saved = self._saved
        if saved is not None and self._has_same_options(saved) and saved.plan.num_ranks == ranks:
            return saved.plan
        previous = self._loaded if self._file is not None else saved.plan if saved is not None else None
        options = self._options if previous is None else self._same_microbatches(previous)
        options = replace(options, ranks=ranks)
        # Each replica plans; if their measurements differ, all follow the plan of the first one.
        return penstock.plan_together(lambda running: self._search(options, running, device), group=group)

    @cached_property
    def _loaded(self) -> "Plan":
        """The plan of --plan."""
        from penstock.ir import Plan

        plan = read_record(self._file)
        if not isinstance(plan, Plan):
            hint = "penstock plan MODEL --out FILE, then --plan FILE"
            raise FormatError("--plan must be the file of a plan", file=self._file, got=type(plan).__name__, hint=hint)
        return plan

    @property
    def _saved(self) -> "SavedPlan | None":
        """The plan of the checkpoint that the run resumes from."""
        checkpoints = self._job.checkpoints
        return saved_plan(checkpoints.source(self._job.attempt)) if checkpoints.checkpoint is not None else None

    def _has_same_options(self, saved: "SavedPlan") -> bool:
        """Whether a saved plan was made with the present options, or no option but --ranks is given, nor --plan."""
        # Options that did not exist when it was saved had their defaults.
        given = asdict(PlanFlags()) | saved.options if isinstance(saved.options, dict) else None
        return self._file is None and (
            given == asdict(self._options) or self._options == PlanFlags(self._options.ranks)
        )

    def _same_microbatches(self, plan: "Plan") -> PlanFlags:
        """The options, with the microbatches of the plan unless a number is given."""
        is_default = self._options.microbatches == PlanFlags.microbatches
        return replace(self._options, microbatches=str(plan.num_microbatches)) if is_default else self._options

    def _search(self, options: PlanFlags, running: "Cluster | None" = None, device: Any = None) -> "Plan":
        """The best plan, for the running ranks or else for local processes."""
        flags = self._job.flags
        replicas, device = flags.replicas, device or flags.device
        # The batch of the loss, which has a target, takes the place of the model's own.
        example = nullcontext() if flags.loss is None else loss_example(flags.loss, flags.data, device)
        with autocast(self._job), example as loss:
            return make_plan(
                self._job.model,
                options,
                self._job.example,
                machine=Machine() if replicas == 1 else Machine.here(options.ranks, replicas),
                running=running,
                replicas=replicas,
                device=device,
                state=StateFlags.of_training(flags.optimizer),
                loss=loss,
            )
