"""Writes the metrics of every step of a training loop: CSV, JSON lines, TensorBoard and Weights & Biases.

A run that resumes writes the steps after its checkpoint once: those that an interrupted attempt had taken beyond it are
removed first. A step is written when it ends, and again with `eval_loss` once it is evaluated.
"""

import csv
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.api.train_options import LogTarget
from penstock.errors import PenstockError, RunError
from penstock.ir import StepMetrics, replace_file

FIELDS = tuple(field.name for field in fields(StepMetrics))


class StepLog(ABC):
    """One place that metrics are written to."""

    @abstractmethod
    def write(self, metrics: StepMetrics) -> None:
        """Write a step. The first call of a run removes this step and later ones; later calls are in order."""

    @abstractmethod
    def close(self) -> None:
        """Finish writing, at the end of the run."""


class LineFile(StepLog):
    """A text file with a line per step."""

    header = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[int, int] | None = None
        """the last step that was written, and where its line begins"""

    @abstractmethod
    def line(self, metrics: StepMetrics) -> str:
        """The line of a step, with its end."""

    @abstractmethod
    def parse(self, line: str) -> StepMetrics:
        """The step of a line; raises ValueError or TypeError if it is damaged."""

    def read(self) -> tuple[StepMetrics, ...]:
        """The steps so far, up to the first line that is cut off or damaged."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ()
        if text and not text.startswith(self.header):
            hint = "another name, or remove the file"
            raise RunError("the log file has other columns than these metrics", file=self.path, hint=hint)
        steps = []
        for line in text.removeprefix(self.header).splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # a number that is cut off may still parse
            try:
                steps.append(self.parse(line))
            except (ValueError, TypeError):
                break
        return tuple(steps)

    def write(self, metrics: StepMetrics) -> None:
        if self._last is None:
            earlier = [known for known in self.read() if known.step < metrics.step]
            replace_file(self.path, (self.header + "".join(map(self.line, earlier))).encode())
        with self.path.open("r+b") as file:
            if self._last is not None and self._last[0] == metrics.step:
                start = file.seek(self._last[1])
            else:
                start = file.seek(0, os.SEEK_END)
            file.truncate()
            file.write(self.line(metrics).encode())
        self._last = metrics.step, start

    def close(self) -> None:
        """No-op: the file is closed after every step."""


class JsonLines(LineFile):
    """A JSON object per line."""

    def line(self, metrics: StepMetrics) -> str:
        return json.dumps(asdict(metrics), allow_nan=False) + "\n"

    def parse(self, line: str) -> StepMetrics:
        return StepMetrics(**json.loads(line))


class Csv(LineFile):
    """CSV with a header; a value that is not known or not finite is empty."""

    header = ",".join(FIELDS) + "\n"

    def line(self, metrics: StepMetrics) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerow(asdict(metrics).values())
        return out.getvalue()

    def parse(self, line: str) -> StepMetrics:
        values = dict(zip(FIELDS, next(csv.reader([line])), strict=True))
        whole = {name: int(values.pop(name)) for name in ("step", "samples")}
        return StepMetrics(**whole, **{name: float(text) if text else None for name, text in values.items()})


class Scalars(StepLog):
    """A log that has one number per name and step, and cannot replace it."""

    def __init__(self) -> None:
        self._step, self._written = -1, set[str]()

    def write(self, metrics: StepMetrics) -> None:
        """Write the numbers of a step that are not yet written."""
        if metrics.step != self._step:
            self._step, self._written = metrics.step, set()
        values = {name: value for name, value in asdict(metrics).items() if name != "step" and value is not None}
        new = {name: float(value) for name, value in values.items() if name not in self._written}
        self._written |= new.keys()
        self.write_scalars(metrics.step, new)

    @abstractmethod
    def write_scalars(self, step: int, values: dict[str, float]) -> None:
        """Write numbers by name."""


class TensorBoard(Scalars):
    """Events of TensorBoard in a directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory, self._writer = directory, None

    def write_scalars(self, step: int, values: dict[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard then ignores this step and later ones in files that are already there.
            self._writer = SummaryWriter(str(self._directory), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb(Scalars):
    """A run of Weights & Biases. WANDB_MODE=offline works; so do the other variables of wandb."""

    def __init__(self, project: str, run_id: str) -> None:
        super().__init__()
        self._project, self._id, self._run = project, run_id, None

    def write_scalars(self, step: int, values: dict[str, float]) -> None:
        """Write numbers by name. wandb ignores steps that the run, if it is resumed, has already."""
        if self._run is None:
            import wandb

            try:
                self._run = wandb.init(project=self._project, id=self._id, resume="allow")
            except Exception as problem:  # such as a missing key, or a server that does not answer
                reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
                hint = "wandb login, or WANDB_MODE=offline"
                error = RunError("the log of wandb cannot be started", project=self._project, reason=reason, hint=hint)
                error.is_final = True  # a restart would fail the same way
                raise error from problem
        self._run.log(values, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def make_log(target: LogTarget, run_id: str) -> StepLog:
    """The log that a target names."""
    kind, where = target
    if kind == "wandb":
        return Wandb(where, run_id)
    return {"csv": Csv, "jsonl": JsonLines, "tensorboard": TensorBoard}[kind](Path(where))


class StepLogs:
    """All logs of a run; one that cannot be written is dropped with a message, and training continues."""

    def __init__(self, targets: Iterable[LogTarget], run_id: str | None = None) -> None:
        self.run_id = run_id or uuid4().hex[:8]
        """of the run in logs that are not files; saved in checkpoints, so that a run that resumes has the same"""
        self._targets = tuple(targets)
        self._logs: dict[LogTarget, StepLog] | None = None

    def write(self, metrics: StepMetrics) -> list[str]:
        """Write a step to every log; returns messages about those that cannot be written."""
        return self._for_each(lambda log: log.write(metrics))

    def close(self) -> list[str]:
        """Close every log that was opened; returns messages about those that cannot be written."""
        return [] if self._logs is None else self._for_each(lambda log: log.close())

    def _for_each(self, act: Callable[[StepLog], Any]) -> list[str]:
        # Logs are opened by the first call, once a checkpoint has set `run_id`.
        if self._logs is None:
            self._logs = {target: make_log(target, self.run_id) for target in self._targets}
        messages = []
        for target, log in list(self._logs.items()):
            try:
                act(log)
            except PenstockError:
                raise
            except Exception as error:  # wandb and TensorBoard have errors of their own besides OSError
                del self._logs[target]
                messages.append(f"STEPS ARE NO LONGER WRITTEN TO {target.where}, training continues: {error}")
        return messages
