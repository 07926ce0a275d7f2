"""Saves the state of a training run from all ranks into one checkpoint, synchronously or in a thread.

Further state of a training loop, such as its schedulers, is passed to `save` and restored in `loading.py`; a value of
the run belongs in `run_state.py`, a field that only describes the checkpoint in `manifest.py`.
"""

import functools
import json
import os
import platform
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.collective import run_on_first_rank, sync_after
from penstock.checkpoint.directory import CheckpointDir
from penstock.checkpoint.lr_scheduler_state import scheduler_document
from penstock.checkpoint.manifest import Manifest, PlanSummary, TensorRecord, fingerprint, step_name
from penstock.checkpoint.optimizer_state import check_optimizer, split_optimizer_state
from penstock.checkpoint.reader import CONFIG, PLAN
from penstock.checkpoint.run_state import RUN, RunState
from penstock.checkpoint.tensor_file import FileRecord, dtype_and_shape
from penstock.checkpoint.writer import BackgroundWriter, CheckpointWriter, Content
from penstock.errors import CheckpointError, DamagedError
from penstock.ir import Plan, as_int, to_json
from penstock.launch import run_before_exit
from penstock.runtime import ModelPart, NamedTensors, RankSync, SyncRequest, encode_tree, full_tensor, json_bytes


@dataclass(frozen=True)
class CheckpointOptions:
    """Where and how often checkpoints are written, how many are kept, and what to resume from."""

    directory: Path
    """the directory of checkpoints, which all ranks must see"""
    every: int = 100
    """steps between two checkpoints of a training loop"""
    keep: int | None = None
    """number of newest checkpoints to keep; None: all"""
    asynchronous: bool = False
    """whether a thread writes while training continues"""
    resume: str | Path | None = None
    """a checkpoint, or a directory of checkpoints, to resume from; None: start from the beginning. `fit` takes "auto"
    too: the newest one in `directory`, if there is any"""

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike):
            hint = '"checkpoints", or a Path'
            raise CheckpointError("the checkpoint directory must be a path", got=repr(self.directory), hint=hint)
        object.__setattr__(self, "directory", Path(self.directory))
        for name in ("every", "keep"):
            value = getattr(self, name)
            count = as_int(value)
            if (count is None or count < 1) and not (name == "keep" and value is None):
                hint = "3, or None to keep all" if name == "keep" else "100"
                raise CheckpointError(f"{name} must be a positive integer", got=repr(value), hint=hint)
        if not isinstance(self.asynchronous, bool):
            hint = "True, to write in a thread"
            raise CheckpointError("asynchronous must be True or False", got=repr(self.asynchronous), hint=hint)


class Saver:
    """Writes the checkpoints of one Pipeline."""

    def __init__(self, part: ModelPart, sync: RankSync) -> None:
        self._part, self._groups, self._sync = part, part.groups, sync
        self.background = BackgroundWriter()
        self._copies: HostCopies | None = None
        self._layout: StateLayout | None = None

    def save(
        self, plan: Plan, step: int, optimizer: Any, scheduler: Any, run: RunState, options: CheckpointOptions
    ) -> Path:
        """Write a checkpoint; a collective call. Returns its directory.

        `optimizer` and `scheduler` may be None.
        """
        settings = {"keep": options.keep} if options.keep is not None else {}
        settings |= {"asynchronous": True} if options.asynchronous else {}
        request = SyncRequest("save", step, ", ".join(f"{name}={value}" for name, value in settings.items()))
        root = options.directory
        self.background.wait()
        self.check(request)
        # 1. Check everything that can be wrong before anything is written, on all ranks.
        with sync_after(self._sync, request):
            # Not by pathlib, which raises for a directory that may not be searched: creating it gives a better error.
            if os.path.lexists(root) and not os.path.isdir(root):
                is_file = os.path.exists(root)
                problem = f"the checkpoint directory must be a directory, got a {'file' if is_file else 'broken link'}"
                hint = f"its directory: {root.parent}" if is_file else "a link to an existing directory"
                raise CheckpointError(problem, path=root, hint=hint)
            self._part.check_weights()
            if optimizer is not None:
                check_optimizer(optimizer, parameter_names(self._part), self._part.remote_parameters)
            run_tensors: NamedTensors = {}
            if self._groups.rank == 0:
                run_document = run.encode(run_tensors)
        # 2. Agree on the rank that saves each tensor. Names and shapes do not change: once for all checkpoints.
        self._layout = self._layout or StateLayout.gather(self._part)
        # 3. Make a temporary directory. By an absolute path: the thread may still write after the program has changed
        # its working directory.
        writer = self._create(root.absolute(), request)
        # 4. Collect the contents of this rank's files, as copies if training continues while they are written.
        try:
            with sync_after(self._sync, request):
                # A thread writes copies; those of the previous save, which has ended, may be overwritten.
                copies = HostCopies(self._copies) if options.asynchronous and not self._groups.pipeline else None
                contents = self._own_files(writer, optimizer, scheduler, copies)
                if self._groups.rank == 0:
                    contents |= _document_files(RUN, run_document, run_tensors, copies) | _plan_files(plan, self._part)
                self._copies = copies or self._copies
        except BaseException:
            writer.abandon()
            raise
        make_manifest = functools.partial(self._make_manifest, plan, step, self._layout)

        def write() -> CheckpointError | None:
            """Write this rank's files, and on the first rank finish the checkpoint; returns the error of any rank."""
            if not self._groups.pipeline:
                writer.write(self._groups.rank, contents)
            if not options.asynchronous and self._groups.monitor is not None:
                # A rank that dies while the others wait for its files is reported as in any other sync.
                self._groups.monitor.syncing(request.name, request.step)
            if not self._groups.is_first:
                writer.wait()
                return None
            try:
                writer.finish(step, options.keep, make_manifest)
            except CheckpointError as error:
                return error
            return None

        # 5. Write them. From here on ranks communicate through the directory only, so that a thread can do it.
        if options.asynchronous:
            self.background.start(write)
            run_before_exit(self.background.wait_and_raise)  # a launched rank may return before it is written
        else:
            try:
                error = write()
            except BaseException:  # such as KeyboardInterrupt: this process may continue, and still has the lock
                writer.abandon()
                raise

            def outcome() -> str:
                if error is not None:
                    raise error
                return ""

            # All ranks return once the first one has finished the checkpoint, or raise its error.
            try:
                run_on_first_rank(self._groups, outcome, request)
            finally:
                self._sync.operation_ended()
        return root / step_name(step)

    def check(self, request: SyncRequest) -> None:
        """Raise the error of the last asynchronous save on all ranks, if it failed."""
        error = self.background.take_error()
        if error is not None:
            self._sync.refuse(request, error)
            raise error

    def wait(self, step: int) -> None:
        """Wait for a running asynchronous save; its error is raised on every rank."""
        with sync_after(self._sync, SyncRequest("wait_for_save", step)):
            self.background.wait_and_raise()

    def _create(self, root: Path, request: SyncRequest) -> CheckpointWriter:
        """The writer in a temporary directory that the first rank makes."""
        created: list[CheckpointWriter] = []

        def create() -> str:
            directory = CheckpointDir(root)
            directory.create()
            directory.clean_up()
            created.append(CheckpointWriter.create(root, request.step, self._groups.num_processes))
            return created[0].path.name

        name = run_on_first_rank(self._groups, create, request)
        return created[0] if created else CheckpointWriter(root / name, self._groups.num_processes)

    def _own_files(
        self, writer: CheckpointWriter, optimizer: Any, scheduler: Any, copies: "HostCopies | None"
    ) -> dict[str, Content]:
        """The files that this rank writes, by name.

        Only the first pipeline writes. Ranks of the others take part because sharded tensors are gathered.
        """
        rank, weights = self._groups.rank, self._part.own_state()
        for whole, names in self._part.rows.split_names.items():
            gathered = self._part.rows.gather(whole, {name: weights[name] for name in names if name in weights})
            if gathered is not None:
                weights[names[0]] = gathered
        if not self._groups.pipeline:
            writer.join(rank)
        files: dict[str, Content] = {}
        for stage, names in self._layout.own.items():
            if names:
                file = _stage_file(stage)
                files[file] = _whole_tensors(file, {name: weights[at] for name, at in names.items()}, copies)
        if optimizer is not None:
            names, joined = parameter_names(self._part), self._joined_states(optimizer)
            stage_of = {name: stage for stage, own in self._layout.own.items() for name in own}
            parts = split_optimizer_state(optimizer, names, stage_of, joined)
            for stage, part in parts.items():
                files |= _document_files(f"optimizer-{stage:03d}", part.document, part.tensors, copies)
        rank_state = {"random": random_state()}
        if scheduler is not None:
            rank_state["scheduler"] = scheduler_document(scheduler, optimizer)
        for kind, value in rank_state.items():
            tensors: NamedTensors = {}
            document = encode_tree(value, tensors, kind)
            files |= _document_files(f"{kind}-{rank:03d}", document, tensors, copies)
        return files

    def _joined_states(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer state of parameters that no rank has whole, on the rank that saves them; a collective call."""
        states: dict[str, dict[str, Any]] = {}
        own = self._part.parameters
        for whole, names in self._part.rows.split_names.items():
            parameters = {name: own[name] for name in names if name in own}
            if not parameters:
                continue  # the user's own parameter is trained, or other ranks have the rows
            first = next(iter(parameters.values()))
            joined = dict(optimizer.state.get(first, {}))
            # All ranks have optimizers of one class, and so state of the same names.
            like = [key for key, value in joined.items() if isinstance(value, Tensor) and value.shape == first.shape]
            for key in sorted(like):
                parts = {name: optimizer.state[parameter][key] for name, parameter in parameters.items()}
                gathered = self._part.rows.gather(whole, parts)
                if gathered is not None:
                    joined[key] = gathered
            if names[0] in parameters:
                states[whole] = joined
        return states

    def _make_manifest(self, plan: Plan, step: int, layout: "StateLayout", files: Mapping[str, FileRecord]) -> Manifest:
        return Manifest(
            step=step,
            written=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            model=fingerprint(layout.tensors, self._part.tied_names),
            plan=PlanSummary(
                ranks=plan.num_ranks,
                processes=self._groups.num_processes,
                stages=plan.num_stages,
                microbatches=plan.num_microbatches,
                schedule=plan.choices.schedule,
            ),
            versions={
                "penstock": version("penstock"),
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            tied=self._part.tied_names,
            tensors=layout.tensors,
            files=dict(sorted(files.items())),
        )


@dataclass(frozen=True)
class StateLayout:
    """Which stage saves each parameter and buffer: of several stages that have it, the first."""

    tensors: dict[str, TensorRecord]
    """every parameter and buffer of the model, tied ones once; the same on every rank"""
    own: dict[int, dict[str, str]]
    """for every stage of this process the names that it saves, with their names in the stage"""

    @classmethod
    def gather(cls, part: ModelPart) -> "StateLayout":
        """Exchange names, dtypes and shapes with all ranks; a collective call."""
        tensor_of = part.captured.graph.tensor_of
        # For every stage of this process, its names by the names that checkpoints use.
        here: dict[int, dict[str, str]] = {}
        formats: dict[int, dict[str, Any]] = {}
        for index, stage in part.stages.items():
            weights = stage.state_dict()
            here[index] = {}
            for name in weights:  # tied parameters have several names and are saved under the first
                if name not in part.rows.slices:
                    here[index].setdefault(tensor_of(name), name)
            # The stage of the first rows saves the whole parameter, unless another stage has that.
            here[index] |= {whole: names[0] for whole, names in part.rows.split_names.items() if names[0] in weights}
            formats[index] = {name: dtype_and_shape(weights[at], name) for name, at in here[index].items()}
            for name, at in here[index].items():
                if at in part.rows.slices:
                    dtype, shape = formats[index][name]
                    formats[index][name] = dtype, (part.rows.slices[at].size, *shape[1:])
        texts = part.groups.gather_texts(json.dumps(formats))
        everywhere = [(int(index), names) for text in texts for index, names in json.loads(text).items()]
        # Every rank computes the same from the same texts: the first stage that has a tensor saves it.
        tensors: dict[str, TensorRecord] = {}
        for index, names in sorted(everywhere):
            for name, (dtype, shape) in names.items():
                tensors.setdefault(name, TensorRecord(_stage_file(index), dtype, tuple(shape)))
        own = {
            index: {name: at for name, at in names.items() if tensors[name].file == _stage_file(index)}
            for index, names in here.items()
        }
        return cls(tensors, own)


def parameter_names(part: ModelPart) -> dict[int, str]:
    """Names of this process's parameters by their ids; of tied ones the name that checkpoints have."""
    tensor_of, slices = part.captured.graph.tensor_of, part.rows.slices
    names = {name: slices[name].whole if name in slices else name for name in part.parameters}
    return {id(parameter): tensor_of(names[name]) for name, parameter in part.parameters.items()}


def random_state() -> dict[str, Any]:
    """The state of this process's random number generators: torch, numpy, Python and CUDA."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def random_state_restorer(state: Any) -> Callable[[], None]:
    """Check a state of `random_state` on separate generators; the returned function applies it."""
    try:
        torch.Generator().set_state(state["torch"])
        np.random.RandomState().set_state(state["numpy"])
        random.Random().setstate(state["python"])
        cuda = state.get("cuda", ())
        if not all(isinstance(each, Tensor) for each in cuda):
            raise TypeError("the state of a device must be a tensor")
    except Exception as error:  # numpy and Python raise many types
        raise DamagedError("the state of random numbers cannot be read", reason=repr(error)[:200]) from None

    def restore() -> None:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])

    return restore


# Cached, because a large plan takes a while to write and is the same for every checkpoint.
@functools.lru_cache(maxsize=1)
def plan_bytes(plan: Plan) -> bytes:
    """The plan as it is saved."""
    return to_json(plan).encode()


def _stage_file(stage: int) -> str:
    return f"stage-{stage:03d}.safetensors"


def _plan_files(plan: Plan, part: ModelPart) -> dict[str, Content]:
    """The plan, and the configuration of a model that has one, as those of transformers do."""
    files: dict[str, Content] = {PLAN: plan_bytes(plan)}
    model = part.captured.model
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_dict", None)):
        with suppress(TypeError, ValueError):  # not JSON: the checkpoint is complete without it
            files[CONFIG] = json_bytes({**config.to_dict(), "architectures": [type(model).__name__]})
    return files


def _document_files(stem: str, document: Any, tensors: NamedTensors, copies: "HostCopies | None") -> dict[str, Content]:
    """A document as JSON, and the tensors that it refers to, if any, as a second file."""
    files: dict[str, Content] = {f"{stem}.json": json_bytes(document)}
    if tensors:
        files[f"{stem}.safetensors"] = _whole_tensors(f"{stem}.safetensors", tensors, copies)
    return files


def _whole_tensors(file: str, tensors: Mapping[str, Tensor], copies: "HostCopies | None") -> dict[str, Tensor]:
    """The tensors of a file, gathered from their shards one after the other; copies of them, if there are `copies`."""
    found = {}
    for name, tensor in tensors.items():
        # full_tensor of a replicated DTensor, or of one sharded over one rank, is the tensor itself: it is copied too.
        full = full_tensor(tensor).detach()
        found[name] = full if copies is None else copies.copy((file, name), full)
    return found


class HostCopies:
    """Copies of the tensors of one save in host memory, in the memory of the previous one's copies where they fit.

    New memory would cost more than copying: the system clears every page of it.
    """

    def __init__(self, previous: "HostCopies | None") -> None:
        self._previous = {} if previous is None else previous._memory
        self._memory: dict[tuple[str, str], Tensor] = {}

    def copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        """A copy of the tensor, which has this key in every save."""
        memory = self._previous.pop(key, None)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            memory = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._memory[key] = memory.copy_(tensor)
        return memory
