"""Resuming: the state of a training from a directory: each rank reads its own, and all of them change or none."""

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from penstock.api.saving import parameter_names, plan_text
from penstock.api.together import all_or_none, told_by_first
from penstock.checkpoint import (
    PLAN,
    Loaded,
    ModelNames,
    SavedSchedulers,
    Stored,
    candidates,
    check_optimizer,
    is_checkpoint,
    is_hugging_face,
    match,
    open_directory,
    restorer,
    tidy,
)
from penstock.errors import CheckpointError, DamagedError
from penstock.ir import Plan
from penstock.runtime import ModelPart, RankSync, SyncRequest, SyncVote, spread, unsaved_names

Result = TypeVar("Result")


@dataclass(frozen=True)
class Wanted:
    """What gets its state back beside the model."""

    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    random: bool = True
    """whether the generators of random numbers do"""


@dataclass(frozen=True)
class Ready:
    """All that was read, and what puts it in place."""

    loaded: Loaded
    commit: Callable[[], None]


class Loader:
    """Reads checkpoints for one Pipeline."""

    def __init__(self, part: ModelPart, sync: RankSync, plan: Plan) -> None:
        self._part, self._sync, self._plan = part, sync, plan

    def load(self, path: Any, step: int, wanted: Wanted) -> Loaded:
        """Read the newest good checkpoint, and put it in place on all ranks."""
        request = SyncRequest("load", step)
        with all_or_none(self._sync, request):
            is_foreign = is_hugging_face(path)
            if is_foreign:
                _check_foreign(wanted)
            elif wanted.optimizer is not None:
                check_optimizer(wanted.optimizer, parameter_names(self._part))
        found = told_by_first(self._part.groups, lambda: json.dumps(_names(Path(path), is_foreign)), request)
        names = json.loads(found)
        skipped: list[str] = []
        for place, name in enumerate(names):
            ready = self._attempt(Path(path) / name, wanted, SyncRequest("load", step, name), place + 1 == len(names))
            if isinstance(ready, Ready):
                if skipped:
                    self._warn(skipped, name)
                ready.commit()
                return ready.loaded
            skipped.append(f"{name}: {ready}")
        raise AssertionError("the last one is read or refused")

    def _attempt(self, directory: Path, wanted: Wanted, request: SyncRequest, is_last: bool) -> Ready | str:
        """What was read of a checkpoint, on all ranks or on none; why it is of no use, if there is another one."""
        # Every rank looks at some files and reads others: nothing is read before all files are known to be good.
        checked = self._agreed(lambda: self._checked(directory), request, is_last)
        if isinstance(checked, str):
            return checked
        return self._agreed(lambda: self._read(directory, wanted, checked), request, is_last)

    def _agreed(self, work: Callable[[], Result], request: SyncRequest, is_last: bool) -> Result | str:
        """What this rank's work returned, if that of all ranks did; why the checkpoint is of no use otherwise."""
        problem: Exception | None = None
        try:
            done = work()
        except Exception as error:
            problem = error
        is_damaged = isinstance(problem, DamagedError) and not is_last
        maxes = (float(is_damaged), float(problem is not None and not is_damaged))
        heard = self._sync.exchange(request, SyncVote(maxes=maxes)).maxes
        if heard[1]:
            # Not to be mended by an older checkpoint.
            with all_or_none(self._sync, request):
                if problem is not None and not is_damaged:
                    raise problem
        self._sync.close()
        if not heard[0]:
            return done
        return self._reason(problem)

    def _reason(self, problem: Exception | None) -> str:
        """Why a checkpoint was passed over, in the words of the first rank that found it."""
        groups = self._part.groups
        told = (
            [groups.broadcast_text("" if problem is None else str(problem), rank) for rank in range(groups.num_ranks)]
            if not groups.is_local
            else [str(problem)]
        )
        said = next(((rank, text) for rank, text in enumerate(told) if text), (0, "another replica cannot read it"))
        return f"{said[1].splitlines()[0]} [rank {said[0]}]"

    def _warn(self, skipped: list[str], name: str) -> None:
        if self._part.groups.rank == 0 and self._part.groups.replica == 0:
            newer = "\n  ".join(skipped)
            warnings.warn(
                f"newer checkpoints are damaged and were passed over; training goes on from {name}:\n  {newer}",
                RuntimeWarning,
                stacklevel=5,
            )

    @property
    def _place(self) -> tuple[int, int]:
        """Which process this is, and of how many."""
        groups = self._part.groups
        return (0, 1) if groups.is_local else (groups.rank, groups.num_ranks)

    def _checked(self, directory: Path) -> int:
        """How many bytes this rank has compared with their digests."""
        if is_hugging_face(directory):
            return 0
        with Stored(directory) as stored:
            return stored.verify(*self._place)

    def _read(self, directory: Path, wanted: Wanted, checked: int) -> Ready:
        if is_hugging_face(directory):
            state, loaded = _read_part(self._part, directory)
            return Ready(loaded, lambda: self._part.load_state_dict(state))
        with Stored(directory) as stored:
            state, loaded = _read_part(self._part, directory)
            run = stored.run
            commits = [lambda: self._part.load_state_dict(state), *self._others(stored, run, wanted)]
            if wanted.random:
                own = f"random-{self._place[0]:03d}"
                commits.append(restorer(stored.document(own if stored.has(f"{own}.json") else "random-000")))
            return Ready(
                replace(
                    loaded,
                    bytes_read=loaded.bytes_read + stored.bytes_read,
                    path=str(directory),
                    step=stored.manifest.step,
                    position=run.get("position"),
                    extra=run.get("extra"),
                    bytes_checked=checked,
                ),
                lambda: _all(commits),
            )

    def _others(self, stored: Stored, run: dict[str, Any], wanted: Wanted) -> list[Callable[[], None]]:
        """What gives optimizer, scheduler and scaler their state back."""
        found: list[Callable[[], None]] = []
        if wanted.optimizer is not None:
            names = parameter_names(self._part)
            found.append(stored.optimizer.restorer(wanted.optimizer, names, spread))
        if wanted.scheduler is not None:
            found.append(self._of_scheduler(stored, wanted))
        if wanted.scaler is not None and "scaler" in run:
            found.append(lambda: wanted.scaler.load_state_dict(run["scaler"]))
        return found

    def _of_scheduler(self, stored: Stored, wanted: Wanted) -> Callable[[], None]:
        """What gives a scheduler its state back, once the optimizer has its groups."""
        stems = stored.stems("scheduler")
        if not stems:
            raise CheckpointError("no scheduler was saved in this checkpoint", hint="load without the scheduler")
        rank, ranks = self._place
        saved = SavedSchedulers([stored.plain(stem) for stem in stems], [stored.find(stem) for stem in stems])
        if len(stems) == ranks and stored.text(PLAN) == plan_text(self._plan):
            own = saved.own(rank)
            return lambda: wanted.scheduler.load_state_dict(own)
        fitted = saved.fitted(wanted.optimizer)
        return lambda: wanted.scheduler.load_state_dict(fitted())


def _read_part(part: ModelPart, directory: Path) -> tuple[dict[str, Tensor], Loaded]:
    """Read the weights of this process from a directory, and nothing else of it; nothing is changed yet."""
    model = part.captured.model
    names = ModelNames(
        frozenset(model.state_dict()),
        part.captured.graph.tied,
        unsaved_names(model),
        str(getattr(model, "base_model_prefix", "")),
        tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )
    reader = open_directory(directory)
    return reader.read(match(reader.names, names), part.own_state())


def _all(commits: list[Callable[[], None]]) -> None:
    for commit in commits:
        commit()


def _names(path: Path, is_foreign: bool) -> list[str]:
    """The checkpoints that a path may mean, by their names in it, the newest first."""
    if is_foreign:
        return ["."]
    if not is_checkpoint(path):
        with suppress(OSError):  # of a directory that may only be read
            tidy(path)
    return [str(found.relative_to(path)) for found in candidates(path)]


def _check_foreign(wanted: Wanted) -> None:
    for name, given in (("optimizer", wanted.optimizer), ("scheduler", wanted.scheduler)):
        if given is not None:
            article = "an" if name == "optimizer" else "a"
            raise CheckpointError(
                f"a directory of Hugging Face has no state of {article} {name}",
                hint="pipe.load(path), and a new optimizer over pipe.parameters()",
            )
