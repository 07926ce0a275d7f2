"""Loads a checkpoint: each rank reads its own part, and either all ranks change or none does."""

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from penstock.capture import internal_call
from penstock.checkpoint.collective import errors_on_all_ranks, run_on_first_rank
from penstock.checkpoint.directory import CheckpointDir, find_checkpoints, is_checkpoint, open_tensors
from penstock.checkpoint.names import LOSS_STATE, ModelNames, match_names
from penstock.checkpoint.optimizer_state import check_optimizer
from penstock.checkpoint.reader import PLAN, CheckpointReader, Loaded
from penstock.checkpoint.saving import parameter_names, plan_text, random_state_restorer
from penstock.checkpoint.scheduler_state import SavedSchedulers
from penstock.checkpoint.sources import is_hugging_face
from penstock.errors import CheckpointError, DamagedError, PenstockWarning
from penstock.ir import Plan, as_int
from penstock.runtime import ModelPart, RankSync, SyncRequest, SyncVote, shard_like, unsaved_buffer_names

T = TypeVar("T")


@dataclass(frozen=True)
class LoadTargets:
    """The objects to restore besides the model."""

    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    random: bool = True
    """whether to restore the random number generators"""


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that was read on this rank, and the function that applies it."""

    loaded: Loaded
    apply: Callable[[], None]


class Loader:
    """Reads checkpoints for one Pipeline."""

    def __init__(self, part: ModelPart, sync: RankSync, plan: Plan) -> None:
        self._part, self._groups, self._sync, self._plan = part, part.groups, sync, plan

    def load(self, path: Any, step: int, targets: LoadTargets) -> Loaded:
        """Load the newest good checkpoint; a collective call."""
        request = SyncRequest("load", step)
        with errors_on_all_ranks(self._sync, request):
            is_foreign = is_hugging_face(path)
            if is_foreign:
                _check_foreign(targets)
            elif targets.optimizer is not None:
                check_optimizer(targets.optimizer, parameter_names(self._part), self._part.remote_parameters)
        # The first rank decides which checkpoints there are: a file system may show the others an older state.
        text = run_on_first_rank(self._groups, lambda: json.dumps(_candidates(Path(path), is_foreign)), request)
        names = json.loads(text)
        skipped: list[str] = []
        for index, name in enumerate(names):
            is_last = index + 1 == len(names)
            pending = self._try(Path(path) / name, targets, SyncRequest("load", step, name), is_last)
            if isinstance(pending, _Pending):
                if skipped and self._groups.is_first:
                    reasons = "\n  ".join(skipped)
                    problem = "newer checkpoints are damaged and were skipped; training resumes from"
                    warnings.warn(f"{problem} {name}:\n  {reasons}", PenstockWarning, stacklevel=4)
                pending.apply()
                return pending.loaded
            skipped.append(f"{name}: {pending}")
        raise AssertionError("the last checkpoint is loaded, or its error raised")

    def _try(self, directory: Path, targets: LoadTargets, request: SyncRequest, is_last: bool) -> _Pending | str:
        """Read a checkpoint on all ranks; the reason if it is damaged and there is an older one."""
        # Each rank verifies some files and reads others, so nothing is read before all files are known to be good.
        checked = self._on_all_ranks(lambda: self._verify(directory), request, is_last)
        if isinstance(checked, str):
            return checked
        return self._on_all_ranks(lambda: self._read(directory, targets, checked), request, is_last)

    def _on_all_ranks(self, work: Callable[[], T], request: SyncRequest, is_last: bool) -> T | str:
        """The result of this rank's work if that of all ranks succeeded, else why the checkpoint is damaged.

        Errors other than damage, which an older checkpoint would not fix, are raised on all ranks, and so is damage
        of the last checkpoint.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        is_damaged = isinstance(error, DamagedError) and not is_last
        votes = (float(is_damaged), float(error is not None and not is_damaged))
        some_damaged, some_failed, *_ = self._sync.exchange(request, SyncVote(maxes=votes)).maxes
        if some_failed:
            with errors_on_all_ranks(self._sync, request):
                if error is not None and not is_damaged:
                    raise error
        self._sync.close()
        return self._damage_reason(error) if some_damaged else result

    def _damage_reason(self, error: Exception | None) -> str:
        """The error of the first rank that found damage, on every rank."""
        groups, text = self._groups, "" if error is None else str(error)
        texts = [text] if groups.is_local else [groups.broadcast_text(text, rank) for rank in range(groups.num_ranks)]
        reasons = ((rank, text) for rank, text in enumerate(texts) if text)
        rank, reason = next(reasons, (0, "another replica cannot read it"))
        return f"{reason.splitlines()[0]} [rank {rank}]"

    @property
    def _rank_and_ranks(self) -> tuple[int, int]:
        return (0, 1) if self._groups.is_local else (self._groups.rank, self._groups.num_ranks)

    def _verify(self, directory: Path) -> int:
        """Verify this rank's share of the files; returns the number of bytes read."""
        if is_hugging_face(directory):
            return 0
        with CheckpointReader(directory) as reader:
            return reader.verify(*self._rank_and_ranks)

    def _read(self, directory: Path, targets: LoadTargets, bytes_checked: int) -> _Pending:
        weights, loaded = _read_weights(self._part, directory)
        if is_hugging_face(directory):
            return _Pending(loaded, lambda: self._part.load_state_dict(weights))
        with CheckpointReader(directory) as reader:
            run = reader.run
            steps = [lambda: self._part.load_state_dict(weights), *self._restorers(reader, run, targets)]
            if targets.random:
                # Ranks that the saved run did not have continue with the random numbers of its first rank.
                stem = f"random-{self._rank_and_ranks[0]:03d}"
                document = reader.document(stem if reader.has(f"{stem}.json") else "random-000")
                steps.append(random_state_restorer(document))
            loaded = replace(
                loaded,
                bytes_read=loaded.bytes_read + reader.bytes_read,
                path=str(directory),
                step=reader.manifest.step,
                num_steps=reader.manifest.step if (taken := as_int(run.get("num_steps"))) is None else taken,
                position=run.get("position"),
                extra=run.get("extra"),
                bytes_checked=bytes_checked,
            )

        def apply() -> None:
            for step in steps:
                step()

        return _Pending(loaded, apply)

    def _restorers(
        self, reader: CheckpointReader, run: dict[str, Any], targets: LoadTargets
    ) -> list[Callable[[], None]]:
        """Functions that restore optimizer, scheduler and scaler; everything is read and checked here."""
        restorers: list[Callable[[], None]] = []
        if targets.optimizer is not None:
            restorers.append(reader.optimizer.restorer(targets.optimizer, parameter_names(self._part), shard_like))
        if targets.scheduler is not None:
            state = self._scheduler_state(reader, targets)
            restorers.append(lambda: targets.scheduler.load_state_dict(state()))
        if targets.scaler is not None and "scaler" in run:
            restorers.append(lambda: targets.scaler.load_state_dict(run["scaler"]))
        return restorers

    def _scheduler_state(self, reader: CheckpointReader, targets: LoadTargets) -> Callable[[], Any]:
        """A function that returns the scheduler's state, to be called once the optimizer has been restored."""
        stems = reader.stems("scheduler")
        if not stems:
            raise CheckpointError("the checkpoint has no scheduler state", hint="load without the scheduler")
        rank, ranks = self._rank_and_ranks
        saved = SavedSchedulers([reader.plain(stem) for stem in stems], [reader.find(stem) for stem in stems])
        if len(stems) == ranks and reader.text(PLAN) == plan_text(self._plan):
            state = saved.of_rank(rank)
            return lambda: state
        return saved.for_optimizer(targets.optimizer)


def _read_weights(part: ModelPart, directory: Path) -> tuple[dict[str, Tensor], Loaded]:
    """Read the weights of this process from a directory, and nothing else of it."""
    model, reader, own = part.captured.model, open_tensors(directory), part.own_state()
    loss_state = part.loss_state
    if not loss_state & set(reader.names):
        # A checkpoint of the model alone: the loss module keeps its state.
        loss_state, own = frozenset(), {name: tensor for name, tensor in own.items() if name not in loss_state}
    with internal_call():
        model_names = frozenset(model.state_dict())
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    names = ModelNames(
        model_names | loss_state,
        part.captured.graph.tied,
        unsaved_buffer_names(model),
        str(getattr(model, "base_model_prefix", "")),
        (*ignored, *(() if part.loss_state else (LOSS_STATE,))),
    )
    return reader.read(match_names(reader.names, names), own)


def _candidates(path: Path, is_foreign: bool) -> list[str]:
    """The checkpoints at a path, relative to it, newest first."""
    if is_foreign:
        return ["."]
    if not is_checkpoint(path):
        with suppress(OSError):  # the directory may be read-only
            CheckpointDir(path).clean_up()
    return [str(checkpoint.relative_to(path)) for checkpoint in find_checkpoints(path)]


def _check_foreign(targets: LoadTargets) -> None:
    for name in ("optimizer", "scheduler"):
        if getattr(targets, name) is not None:
            raise CheckpointError(
                f"a Hugging Face directory has no {name} state",
                hint="pipe.load(path), and a new optimizer over pipe.parameters()",
            )
