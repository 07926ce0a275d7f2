"""The flags of `penstock train` besides those of the training loop (`api/train_options.py`) and of `penstock plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

if TYPE_CHECKING:
    from penstock.checkpoint import CheckpointOptions
    from penstock.launch import RestartPolicy

AUTO = "auto"
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TrainFlags:
    """The user's functions, and settings of the run that are arguments in Python."""

    data: Annotated[
        str, Option(metavar="FILE.py:FUNCTION", help="Yields inputs, or with --loss, pairs of inputs and target.")
    ]
    loss: Annotated[
        str | None, Option(metavar="NAME", help="A function of torch.nn.functional, or FILE.py:FUNCTION.")
    ] = None
    optimizer: Annotated[str, Option(metavar="NAME", help="A class of torch.optim, or FILE.py:FUNCTION.")] = "adamw"
    lr: Annotated[float, Option(metavar="RATE", help="Learning rate of an optimizer given by name.")] = 1e-3
    eval_data: Annotated[
        str | None, Option(metavar="FILE.py:FUNCTION", help="Yields batches to evaluate, of the same form as --data.")
    ] = None
    callback: Annotated[
        list[str] | None,
        Option(metavar="FILE.py:FUNCTION", help="Called on every rank with events of the training; may be repeated."),
    ] = None
    replicas: Annotated[
        int, Option(min=1, metavar="N", help="Copies of the pipeline, which share the samples of every batch.")
    ] = 1
    device: Annotated[
        str | None,
        Option(
            metavar="TYPE",
            help="cpu, or cuda: rank n of a host uses GPU n, over NCCL. Default: where MODEL and --data put tensors.",
        ),
    ] = None
    seed: Annotated[int, Option(min=0, metavar="N", help="Seed of the weights and of all random numbers.")] = 0
    deadline: Annotated[
        float, Option(metavar="SECONDS", help="Time a rank waits for another before it is reported as hung.")
    ] = 60.0


@dataclass(frozen=True)
class CheckpointFlags:
    """Checkpoints, resuming and restarts."""

    checkpoint: Annotated[
        Path | None, Option(metavar="DIRECTORY", help="Save checkpoints there: regularly, at the end, and on SIGTERM.")
    ] = None
    every: Annotated[int, Option(min=1, metavar="N", help="Steps between checkpoints.")] = 100
    keep: Annotated[int, Option(min=1, metavar="N", help="Number of newest checkpoints to keep.")] = 3
    asynchronous: Annotated[bool, Option("--asynchronous", help="Write checkpoints while training continues.")] = False
    resume: Annotated[
        str | None, Option(metavar="WHERE", help='A checkpoint to resume from, or "auto": the newest good one, if any.')
    ] = None
    restarts: Annotated[int, Option(min=0, metavar="N", help="Maximum automatic restarts after a rank failure.")] = 3
    min_ranks: Annotated[
        int | None,
        Option(min=1, metavar="K", help="Minimum ranks: re-plan and continue if a rank fails permanently."),
    ] = None
    fault: Annotated[
        list[str] | None,
        Option(metavar="FAULT", help="Inject a fault, such as kill,rank=1,step=5; needs PENSTOCK_ALLOW_FAULTS=1."),
    ] = None

    @property
    def restart_policy(self) -> "RestartPolicy":
        """The restart policy; without checkpoints there is nothing to restart from."""
        from penstock.launch import RestartPolicy

        return RestartPolicy(self.restarts if self.checkpoint else 0, self.min_ranks)

    def options(self, attempt: int) -> "CheckpointOptions | None":
        """The checkpoint options of a rank; None without checkpoints."""
        from penstock.checkpoint import CheckpointOptions

        if self.checkpoint is None:
            return None
        return CheckpointOptions(self.checkpoint, self.every, self.keep, self.asynchronous, self.source(attempt))

    def source(self, attempt: int = 0) -> Path | None:
        """The checkpoint to resume from; None to begin. After a restart always the newest one of this run."""
        from penstock.checkpoint import CheckpointDir

        assert self.checkpoint is not None
        if CheckpointDir(self.checkpoint).checkpoints and (attempt or self.resume == AUTO):
            return self.checkpoint
        return None if self.resume in (None, AUTO) else Path(str(self.resume))
