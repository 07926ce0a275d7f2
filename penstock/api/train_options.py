"""TrainOptions: the options of a training loop, which are also flags of `penstock train`. Does not load torch."""

import math
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

from penstock.errors import PenstockError

CONSTANT, LINEAR, COSINE = LR_SCHEDULES = ("constant", "linear", "cosine")
PRECISIONS = ("fp32", "bf16", "fp16")
LOG_PACKAGES = {"csv": "", "jsonl": "", "tensorboard": "tensorboard", "wandb": "wandb"}
"""kinds of logs, and the package that each needs"""
_LOG_HINT = "csv:FILE, tensorboard:DIRECTORY or wandb:PROJECT"


class Flag(NamedTuple):
    """How a field of options is shown on the command line."""

    metavar: str
    help: str
    min: int | None = None
    """of a whole number: the smallest one"""


class LogTarget(NamedTuple):
    """One entry of `TrainOptions.log`."""

    kind: str
    where: str
    """a file, a directory or the name of a project"""


@dataclass(frozen=True)
class TrainOptions:
    """Options of `penstock.fit`, and flags of `penstock train`.

    A step is one update of the weights: with `accumulate`, it takes several batches. The same options in a plain
    PyTorch loop give the same numbers; docs/training.md has that loop.
    """

    steps: Annotated[int | None, Flag("N", "Steps; default: until the data ends.", 1)] = None
    """number of steps, including those that the Pipeline has taken before; None: until the batches end"""
    clip: Annotated[float | None, Flag("NORM", "Clip the gradient norm to this value.")] = None
    """maximum gradient norm"""
    accumulate: Annotated[int, Flag("N", "Batches per step: gradients are averaged over them.", 1)] = 1
    """batches per step, whose gradients are averaged"""
    budget_tokens: Annotated[
        int | None, Flag("N", "Group samples by length: at most N padded tokens per microbatch.", 1)
    ] = None
    """at most N padded tokens per microbatch: samples are grouped by length, as by `Pipeline.step`; None: the
    microbatches of the plan"""
    precision: Annotated[
        str, Flag("NAME", "fp32; bf16: autocast to bfloat16; fp16: autocast to float16, with a scaled loss.")
    ] = "fp32"
    """"fp32", or "bf16" or "fp16" for autocast to that type; "fp16" needs a Pipeline with a GradScaler"""
    lr_schedule: Annotated[
        str | None, Flag("NAME", "Learning rate over the steps: constant, linear (to 0) or cosine (to 0).")
    ] = None
    """"constant", "linear" or "cosine"; None: the learning rate of the optimizer is not changed"""
    warmup: Annotated[int, Flag("N", "Steps in which the learning rate rises from 0.", 0)] = 0
    """steps in which the learning rate rises from 0"""
    eval_every: Annotated[int | None, Flag("N", "Steps between evaluations; default: only at the end.", 1)] = None
    """steps between evaluations; None: only at the end"""
    log: Annotated[
        list[str] | None, Flag("KIND:WHERE", "Write metrics to csv:FILE, tensorboard:DIRECTORY or wandb:PROJECT.")
    ] = None
    """where to write the metrics of every step, such as "csv:run.csv", "tensorboard:runs/first" or "wandb:project\""""

    def __post_init__(self) -> None:
        from penstock.ir import as_int, choices_text, is_finite  # loads numpy, which `penstock --help` must not

        for each in fields(self):
            name, value, least = each.name, getattr(self, each.name), get_args(each.type)[1].min
            if least is None or (value is None and each.default is None):
                continue
            number = as_int(value)
            if number is None or number < least:
                raise PenstockError(
                    f"{name} must be a whole number, {least} or more", got=repr(value), hint=f"{name}={max(least, 1)}"
                )
        if self.clip is not None and not (is_finite(self.clip) and self.clip > 0):
            raise PenstockError("clip must be finite and above 0", got=self.clip, hint="clip=1.0")
        if self.precision not in PRECISIONS:
            problem = f"precision must be {choices_text(PRECISIONS)}"
            raise PenstockError(problem, got=repr(self.precision), hint=f'precision="{PRECISIONS[0]}"')
        if self.lr_schedule not in (None, *LR_SCHEDULES):
            problem = f"lr_schedule must be {choices_text((*LR_SCHEDULES, None))}"
            raise PenstockError(problem, got=repr(self.lr_schedule), hint=f'lr_schedule="{COSINE}"')
        if self.lr_schedule in (LINEAR, COSINE):
            if self.steps is None:
                hint = "steps=1000, at whose end the learning rate is 0"
                raise PenstockError(f"lr_schedule {self.lr_schedule!r} needs the number of steps", hint=hint)
            if self.warmup >= self.steps:
                sizes, hint = {"got": self.warmup, "steps": self.steps}, f"warmup={self.steps // 10}"
                raise PenstockError("warmup must be shorter than steps", **sizes, hint=hint)
        targets = self.log_targets
        if twice := next((target for index, target in enumerate(targets) if target in targets[:index]), None):
            raise PenstockError("log must name every target once", got=":".join(twice), hint="leave out one of them")

    @property
    def log_targets(self) -> tuple[LogTarget, ...]:
        """The entries of `log`; raises an error if one is malformed or needs a package that is not installed."""
        if isinstance(self.log, str):
            raise PenstockError("log must be a list", got=repr(self.log), hint=f"[{self.log!r}]")
        targets = []
        for text in self.log or ():
            kind, _, where = str(text).partition(":")
            if kind not in LOG_PACKAGES or not where:
                raise PenstockError("log must be KIND:WHERE", got=repr(text), hint=_LOG_HINT)
            package = LOG_PACKAGES[kind]
            spec = find_spec(package) if package else None
            if package and (spec is None or spec.origin is None):  # without an origin it is a directory of that name
                raise PenstockError(f"log {kind} needs the package {package}", log=text, hint=f"pip install {package}")
            path = Path(where)
            if kind in ("csv", "jsonl") and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise PenstockError("log must name a file in a directory that exists", log=text, hint=f"{kind}:FILE")
            if kind == "tensorboard" and path.is_file():
                raise PenstockError("log must name a directory", log=text, hint="another name")
            targets.append(LogTarget(kind, where))
        return tuple(targets)

    def num_left(self, num_taken: int) -> int | None:
        """Steps left after `num_taken`; None: until the batches end."""
        return None if self.steps is None else max(0, self.steps - num_taken)

    @property
    def changes_lr(self) -> bool:
        """Whether the learning rate of a step depends on its number."""
        return self.lr_schedule is not None or self.warmup > 0

    def lr_factor(self, step: int) -> float:
        """The factor of the learning rate in a step, which counts from 0: as in transformers' schedules."""
        if step < self.warmup:
            return step / self.warmup
        if self.lr_schedule in (None, CONSTANT) or self.steps is None:
            return 1.0
        share = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return 1.0 - share if self.lr_schedule == LINEAR else 0.5 * (1.0 + math.cos(math.pi * share))
