"""Loads a checkpoint: each rank reads its own part, and either all ranks change or none does."""

import json
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from penstock.capture import internal_call
from penstock.checkpoint.collective import run_on_first_rank, sync_after
from penstock.checkpoint.directory import MAX_TRIES, open_tensors, with_checkpoints
from penstock.checkpoint.locks import VanishedError, lock_shared, vanished
from penstock.checkpoint.lr_scheduler_state import SavedSchedulers
from penstock.checkpoint.names import LOSS_STATE, ModelNames, match_names
from penstock.checkpoint.optimizer_state import check_optimizer
from penstock.checkpoint.reader import PLAN, CheckpointReader, Loaded, TensorReader
from penstock.checkpoint.run_state import RunState
from penstock.checkpoint.saving import parameter_names, plan_bytes, random_state_restorer
from penstock.checkpoint.sources import is_hugging_face
from penstock.errors import CheckpointError, DamagedError, PenstockWarning
from penstock.ir import Plan, printable
from penstock.runtime import ModelPart, RankSync, SyncRequest, SyncVote, unsaved_buffer_names

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
        with sync_after(self._sync, request):
            from_hugging_face = is_hugging_face(path)
            if from_hugging_face:
                for name in ("optimizer", "scheduler"):
                    if getattr(targets, name) is not None:
                        raise CheckpointError(
                            f"a Hugging Face directory has no {name} state",
                            hint="pipe.load(path), and a new optimizer over pipe.parameters()",
                        )
            elif targets.optimizer is not None:
                check_optimizer(targets.optimizer, parameter_names(self._part), self._part.remote_parameters)
        for attempt in range(MAX_TRIES):
            with ExitStack() as stack:
                try:
                    return self._load_newest(Path(path), from_hugging_face, step, targets, stack)
                except VanishedError:  # on all ranks: another process saves and prunes, so there is a newer one
                    if attempt + 1 == MAX_TRIES:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def _load_newest(
        self, path: Path, from_hugging_face: bool, step: int, targets: LoadTargets, stack: ExitStack
    ) -> Loaded:
        """Load the newest good checkpoint of those that the first rank finds now. `stack` holds its lock."""

        def candidates() -> str:
            if from_hugging_face:
                paths = [path]
            else:
                # The newest is locked until all ranks have opened it.
                paths, lock = with_checkpoints(path, lambda found: (found, lock_shared(found[0])))
                stack.callback(lock.release)
            return json.dumps([os.path.relpath(each, path) for each in paths])

        # The first rank decides which checkpoints there are: a file system may show the others an older state.
        names = json.loads(run_on_first_rank(self._groups, candidates, SyncRequest("load", step)))
        skipped: list[str] = []
        for index, name in enumerate(names):
            is_last = index + 1 == len(names)
            request = SyncRequest("load", step, name)
            pending = self._read_on_all_ranks(path / name, from_hugging_face, targets, request, is_last)
            if isinstance(pending, _Pending):
                if skipped and self._groups.is_first:
                    reasons = "\n  ".join(skipped)
                    problem = "newer checkpoints are damaged and were skipped; training resumes from"
                    warnings.warn(printable(f"{problem} {name}:\n  {reasons}"), PenstockWarning, stacklevel=5)
                pending.apply()
                return pending.loaded
            skipped.append(f"{name}: {pending}")
        raise AssertionError("the last checkpoint is loaded, or its error raised")

    def _read_on_all_ranks(
        self, directory: Path, from_hugging_face: bool, targets: LoadTargets, request: SyncRequest, is_last: bool
    ) -> _Pending | str:
        """Read a checkpoint on all ranks, without applying it; a text is the reason why it is damaged."""
        if from_hugging_face:

            def read_weights() -> _Pending:
                weights, loaded = _read_weights(self._part, open_tensors(directory))
                return _Pending(loaded, lambda: self._part.load_state_dict(weights))

            return self._on_all_ranks(read_weights, request, is_last)
        with ExitStack() as stack:

            def verify() -> tuple[CheckpointReader, int]:
                reader = stack.enter_context(CheckpointReader(directory))
                return reader, reader.verify(self._groups.rank, self._groups.num_processes)

            # Each rank verifies some files and reads others, so nothing is read before all files are known to be good.
            checked = self._on_all_ranks(verify, request, is_last)
            if isinstance(checked, str):
                return checked
            return self._on_all_ranks(lambda: self._read(*checked, targets), request, is_last)

    def _on_all_ranks(self, work: Callable[[], T], request: SyncRequest, is_last: bool) -> T | str:
        """The result of this rank's work if that of all ranks succeeded, else why the checkpoint is damaged.

        Errors other than damage, which an older checkpoint would not fix, are raised on all ranks, and so is damage
        of the last checkpoint. A checkpoint that vanished on one rank raises VanishedError on all.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        is_gone = isinstance(error, VanishedError)
        is_damaged = isinstance(error, DamagedError) and not is_last and not is_gone
        # Ranks agree on one outcome: gone on any rank, else failed on any rank, else damaged on any rank, else a
        # result.
        votes = (float(is_damaged), float(error is not None and not is_damaged and not is_gone), float(is_gone))
        some_damaged, some_failed, some_gone, *_ = self._sync.exchange(request, SyncVote(maxes=votes)).maxes
        if some_gone:
            self._sync.operation_ended()
            raise vanished(Path(request.text))
        if some_failed:
            with sync_after(self._sync, request):
                if error is not None and not is_damaged:
                    raise error
        self._sync.operation_ended()
        if not some_damaged:
            return result
        # Every rank returns the error of the first rank that found damage.
        text = "" if error is None else str(error)
        texts = self._groups.gather_texts(text)
        reasons = ((rank, text) for rank, text in enumerate(texts) if text)
        rank, reason = next(reasons, (0, "another replica cannot read it"))
        return f"{reason.splitlines()[0]} [rank {rank}]"

    def _read(self, reader: CheckpointReader, bytes_checked: int, targets: LoadTargets) -> _Pending:
        """Read and check everything that this rank needs from a checkpoint."""
        with reader.documents():
            weights, loaded = _read_weights(self._part, reader.tensors)
            run = reader.run
            steps = [lambda: self._part.load_state_dict(weights), *self._restorers(reader, run, targets)]
            if targets.random:
                # Ranks that the saved run did not have continue with the random numbers of its first rank.
                stem = f"random-{self._groups.rank:03d}"
                document = reader.document(stem if f"{stem}.json" in reader.manifest.files else "random-000")
                steps.append(random_state_restorer(document))
            loaded = replace(
                loaded,
                bytes_read=loaded.bytes_read + reader.bytes_read,
                path=str(reader.directory),
                step=reader.manifest.step,
                num_steps=run.num_steps,
                position=run.position,
                extra=run.extra,
                bytes_checked=bytes_checked,
                fit_progress=run.fit_progress,
            )

        def apply() -> None:
            for step in steps:
                step()

        return _Pending(loaded, apply)

    def _restorers(self, reader: CheckpointReader, run: RunState, targets: LoadTargets) -> list[Callable[[], None]]:
        """Functions that restore optimizer, scheduler and scaler; everything is read and checked here."""
        restorers: list[Callable[[], None]] = []
        if targets.optimizer is not None:
            names, rows = parameter_names(self._part), self._part.rows.trained
            restorers.append(reader.optimizer.restorer(targets.optimizer, names, rows))
        if targets.scheduler is not None:
            stems = reader.stems("scheduler")
            if not stems:
                raise CheckpointError("the checkpoint has no scheduler state", hint="load without the scheduler")
            finders = [reader.tensor_finder(stem) for stem in stems]
            saved = SavedSchedulers([reader.json_object(stem) for stem in stems], finders)
            if len(stems) == self._groups.num_processes and reader.content(PLAN) == plan_bytes(self._plan):
                state_for_groups = saved.for_order_of_groups(self._groups.rank, targets.optimizer)
            else:
                state_for_groups = saved.for_optimizer(targets.optimizer)
            # The state depends on the groups of this rank's optimizer, which is restored before.
            restorers.append(lambda: targets.scheduler.load_state_dict(state_for_groups()))
        if targets.scaler is not None:
            restorers.append(run.scaler_restorer(targets.scaler))
        return restorers


def _read_weights(part: ModelPart, reader: TensorReader) -> tuple[dict[str, Tensor], Loaded]:
    """Read the parameters and buffers of this process."""
    model, own = part.captured.model, part.own_state()
    loss_state = part.loss_state
    if not loss_state & set(reader.names):
        # A checkpoint of the model alone: the loss module keeps its state.
        loss_state, own = frozenset(), {name: tensor for name, tensor in own.items() if name not in loss_state}
    with internal_call():
        model_names = frozenset(model.state_dict()) - part.rows.slices.keys()
    model_names |= {name for row in part.rows.slices.values() for name in row.names}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    names = ModelNames(
        model_names | loss_state,
        part.tied_names,
        unsaved_buffer_names(model),
        str(getattr(model, "base_model_prefix", "")),
        (*ignored, *(() if part.loss_state else (LOSS_STATE,))),
    )
    sources = match_names(reader.names, names)
    sources |= {name: sources[row.whole] for name, row in part.rows.slices.items()}
    return reader.read(sources, own, part.rows.slices)
