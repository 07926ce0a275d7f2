"""Saving: the state of a training from all ranks into one directory, while they wait or while they go on."""

import functools
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.api.together import all_or_none, told_by_first
from penstock.checkpoint import (
    CONFIG,
    PLAN,
    RUN,
    Background,
    Content,
    Draft,
    FileRecord,
    Manifest,
    Tensors,
    check_optimizer,
    document_of,
    fingerprint,
    form_of,
    make_root,
    name_of,
    parted,
    random_state,
    tidy,
    to_plain,
    to_text,
)
from penstock.errors import CheckpointError
from penstock.ir import Plan, as_int, to_json
from penstock.launch import run_before_exit
from penstock.runtime import ModelPart, RankSync, StateOwners, SyncRequest


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is written."""

    keep: int | None = None
    """how many of the newest stay; None: all"""
    asynchronous: bool = False
    """whether a thread writes while training goes on"""

    def __post_init__(self) -> None:
        count = as_int(self.keep)
        if self.keep is not None and (count is None or count < 1):
            raise CheckpointError("keep is a whole number above 0, or None", given=repr(self.keep))
        if not isinstance(self.asynchronous, bool):
            raise CheckpointError("asynchronous is True or False", given=repr(self.asynchronous))

    @property
    def words(self) -> str:
        """As the user would write them."""
        kept = [] if self.keep is None else [f"keep={self.keep}"]
        return ", ".join([*kept, "asynchronous=True"] if self.asynchronous else kept)


@dataclass(frozen=True)
class Given:
    """What is saved beside the model."""

    optimizer: Any = None
    scheduler: Any = None
    run: Mapping[str, Any] | None = None
    """scaler, position and extra, as far as there are any"""


class Saver:
    """Writes the checkpoints of one Pipeline, one after the other."""

    def __init__(self, part: ModelPart, sync: RankSync) -> None:
        self._part, self._sync = part, sync
        self._background = Background()
        self._owners: StateOwners | None = None

    def save(self, path: Any, plan: Plan, step: int, given: Given, options: SaveOptions) -> Path:
        """Write a checkpoint; the same call on every rank."""
        request = SyncRequest("save", step, options.words)
        self._background.wait()
        self.check(request)
        with all_or_none(self._sync, request):
            root = _root(path)
            self._part.check_numbers()
            if given.optimizer is not None:
                check_optimizer(given.optimizer, parameter_names(self._part))
            documents = _documents(given.run) if self._part.groups.rank == 0 else {}
        self._owners = self._owners or StateOwners.agreed(self._part, _forms)
        draft = self._created(root.absolute(), request)  # a thread may write after the directory was changed
        try:
            with all_or_none(self._sync, request):
                contents = self._entered(draft, given, options.asynchronous)
                contents |= {name: _copied(content, options.asynchronous) for name, content in documents.items()}
                if self._part.groups.rank == 0:
                    contents |= _of_plan(plan, self._part)
        except BaseException:
            draft.abandon()
            raise
        write = functools.partial(self._write, draft, contents)
        end = functools.partial(self._end, draft, self._manifest_of(plan, step), step, options.keep)
        if options.asynchronous:
            self._background.start(functools.partial(_one_after_the_other, write, end))
            run_before_exit(self._background.settle)
        else:
            write()
            self._together(end, request)
        return root / name_of(step)

    def check(self, request: SyncRequest) -> None:
        """Say on all ranks that the last checkpoint was not written, if it was not."""
        problem = self._background.problem()
        if problem is not None:
            self._sync.refuse(request, problem)
            raise problem

    def wait(self, step: int) -> None:
        """Until what is under way is written, and an error on every rank if it could not be."""
        self._background.wait()
        with all_or_none(self._sync, SyncRequest("wait_for_save", step)):
            self._background.settle()

    def _created(self, root: Path, request: SyncRequest) -> Draft:
        """The draft that the first rank makes."""
        groups = self._part.groups
        made: list[Draft] = []

        def create() -> str:
            make_root(root)
            tidy(root)
            made.append(Draft.create(root, request.step, 1 if groups.is_local else groups.num_ranks))
            return made[0].path.name

        name = told_by_first(groups, create, request)
        return made[0] if made else Draft(root / name, groups.num_ranks)

    def _entered(self, draft: Draft, given: Given, copies: bool) -> dict[str, Content]:
        """The files of this rank, which is about to write. Replicas help to make whole what is sharded."""
        assert self._owners is not None
        groups, state = self._part.groups, self._part.state_dict()
        if not groups.replica:
            _enter(draft, groups.rank)
        found: dict[str, Content] = {}
        for index, own in self._owners.own.items():
            tensors = {name: _ready(state[here], copies) for name, here in own.items()}
            if tensors:
                found[f"stage-{index:03d}.safetensors"] = tensors
        if given.optimizer is not None:
            for index, part in parted(given.optimizer, parameter_names(self._part), self._owners.kept).items():
                tensors = {name: _ready(tensor, copies) for name, tensor in part.tensors.items()}
                found |= _files(f"optimizer-{index:03d}", part.document, tensors)
        own = {"random": random_state()}
        if given.scheduler is not None:
            own["scheduler"] = document_of(given.scheduler, given.optimizer)
        for kind, state in own.items():
            tensors = {}
            plain = to_plain(state, tensors, kind)
            tensors = {name: _ready(tensor, copies) for name, tensor in tensors.items()}
            found |= _files(f"{kind}-{groups.rank:03d}", plain, tensors)
        return found

    def _manifest_of(self, plan: Plan, step: int) -> Callable[[Mapping[str, FileRecord]], Manifest]:
        assert self._owners is not None
        tied = plan.graph.tied
        tensors = {
            name: (f"stage-{stage:03d}.safetensors", kind, tuple(shape))
            for name, (stage, kind, shape) in self._owners.everywhere.items()
        }
        model = fingerprint({name: form[1:] for name, form in tensors.items()}, tied)
        versions = {
            "penstock": version("penstock"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        }
        words = {
            "ranks": plan.num_ranks,
            "processes": 1 if self._part.groups.is_local else plan.num_ranks,
            "stages": plan.num_stages,
            "microbatches": plan.num_microbatches,
            "schedule": plan.choices.schedule,
        }

        def manifest(files: Mapping[str, FileRecord]) -> Manifest:
            return Manifest(step, _now(), model, words, versions, tied, tensors, dict(sorted(files.items())))

        return manifest

    def _write(self, draft: Draft, contents: dict[str, Content]) -> None:
        """Write what this rank has; what goes wrong is left in the draft, where the first rank finds it."""
        if not self._part.groups.replica:
            draft.write(self._part.groups.rank, contents)

    def _end(self, draft: Draft, manifest_of: Any, step: int, keep: int | None) -> CheckpointError | None:
        """Wait until all ranks have written; the first one ends it, and tells what went wrong on any of them."""
        groups = self._part.groups
        if groups.rank or groups.replica:
            draft.wait()
            return None
        try:
            draft.finish(step, keep, manifest_of)
        except CheckpointError as error:
            return error
        return None

    def _together(self, end: Callable[[], CheckpointError | None], request: SyncRequest) -> None:
        """Go on when all ranks have written."""
        monitor = self._part.groups.monitor
        if monitor is not None:
            # Who dies while the others wait for its files is missed as in any other wait for all.
            monitor.syncing(request.name, request.step)
        problem = end()

        def outcome() -> str:
            if problem is not None:
                raise problem
            return ""

        try:
            told_by_first(self._part.groups, outcome, request)
        finally:
            self._sync.close()


def _one_after_the_other(
    write: Callable[[], None], end: Callable[[], CheckpointError | None]
) -> CheckpointError | None:
    write()
    return end()


def parameter_names(part: ModelPart) -> dict[int, str]:
    """The names of this process's parameters by their identity, of tied ones that which stands in checkpoints."""
    tensor_of = part.captured.graph.tensor_of
    return {id(parameter): tensor_of(name) for name, parameter in part.parameters.items()}


def _enter(draft: Draft, rank: int) -> None:
    try:
        draft.enter(rank)
    except FileNotFoundError as error:
        raise CheckpointError(
            "a rank does not reach the directory in which the first one writes",
            path=draft.path,
            reason=error.strerror,
            hint="a path that all ranks share",
        ) from None
    except OSError as error:
        raise CheckpointError("the checkpoint could not be written", path=draft.path, reason=error.strerror) from None


def _root(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError("a checkpoint is written into a directory", given=repr(path))
    root = Path(path)
    if root.exists() and not root.is_dir():
        raise CheckpointError("checkpoints are written into a directory, and this is none", path=root)
    return root


def _documents(run: Mapping[str, Any] | None) -> dict[str, Content]:
    if run is None:
        return {}
    tensors: Tensors = {}
    return _files(RUN, {name: to_plain(value, tensors, name) for name, value in run.items()}, tensors)


def _files(stem: str, document: Any, tensors: Tensors) -> dict[str, Content]:
    files: dict[str, Content] = {f"{stem}.json": to_text(document)}
    return {**files, f"{stem}.safetensors": tensors} if tensors else files


@functools.lru_cache(maxsize=1)
def plan_text(plan: Plan) -> bytes:
    """The plan as it stands in a checkpoint."""
    return to_json(plan).encode()


def _of_plan(plan: Plan, part: ModelPart) -> dict[str, Content]:
    """The plan, and the configuration of a model that has one as those of transformers do."""
    found: dict[str, Content] = {PLAN: plan_text(plan)}
    model = part.captured.model
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_dict", None)):
        values = {**config.to_dict(), "architectures": [type(model).__name__]}
        try:
            found[CONFIG] = to_text(values)
        except (TypeError, ValueError):
            return found
    return found


def _forms(state: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: form_of(tensor, name) for name, tensor in state.items()}


def _ready(tensor: Tensor, copies: bool) -> Tensor:
    """Whole, and if it will be written later, as it is now."""
    # What is replicated, or sharded over one rank, is whole already: then this is the tensor itself.
    as_int = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return as_int.detach().to("cpu", copy=True) if copies else as_int.detach()


def _copied(content: Content, copies: bool) -> Content:
    if isinstance(content, bytes):
        return content
    return {name: _ready(tensor, copies) for name, tensor in content.items()}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
