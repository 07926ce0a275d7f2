"""Reads a checkpoint: documents, and only those tensors that a rank needs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.capture import RowSlice, as_bytes, dtype_name
from penstock.checkpoint.locks import lock_shared, vanished
from penstock.checkpoint.manifest import Manifest, check_digests, check_sizes, files_to_check, read_manifest, step_of
from penstock.checkpoint.names import shorten
from penstock.checkpoint.optimizer_state import SavedOptimizer
from penstock.checkpoint.run_state import RUN, FitProgress, RunState
from penstock.checkpoint.sources import DOWNLOAD_AGAIN
from penstock.checkpoint.tensor_file import DTYPES, TensorFile, read_bytes
from penstock.errors import CheckpointError, DamagedError, PenstockError
from penstock.runtime import FindTensor, decode_tree, parse_json

PLAN, CONFIG = "plan.json", "config.json"
"""the plan; the configuration of a transformers model"""
_WRONG_TYPES = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Loaded:
    """The result of loading a checkpoint on one rank."""

    num_tensors: int
    """number of tensors that this rank read"""
    bytes_read: int
    """their bytes"""
    files: tuple[str, ...]
    """tensor files that were opened"""
    path: str = ""
    """the checkpoint that was read; empty for a Hugging Face directory"""
    step: int | None = None
    """number of the checkpoint, usually that of the steps taken; None for a Hugging Face directory"""
    num_steps: int | None = None
    """number of steps that the Pipeline had taken; None for a Hugging Face directory"""
    position: Any = None
    """the position in the data, as given to `save`"""
    extra: Any = None
    """the `extra` given to `save`"""
    bytes_checked: int = 0
    """size of the files whose digests this rank verified, on behalf of all ranks"""
    fit_progress: FitProgress = field(default=FitProgress())
    """the number of steps of `fit`, and of the Pipeline, when `fit` took its last step"""


class TensorReader:
    """Reads tensors by name from safetensors files; a file is opened only if one of its tensors is needed."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._files)

    def read(
        self,
        sources: Mapping[str, Sequence[str]],
        wanted: Mapping[str, Tensor],
        rows: Mapping[str, RowSlice] | None = None,
    ) -> tuple[dict[str, Tensor], Loaded]:
        """Read a tensor for every name in `wanted`, with the shape and dtype of the tensor given for it.

        `sources` has the names that each of them has in the checkpoint, several for tied parameters. Of those in `rows`
        only some rows are read. Nothing is read unless all shapes and dtypes match.
        """
        rows = rows or {}
        with ExitStack() as stack:
            opened: dict[Path, TensorFile] = {}
            for name in wanted:
                for source in sources[name]:
                    file = self._files[source]
                    if file not in opened:
                        opened[file] = _open(file, stack)
            handles = {source: opened[self._files[source]] for name in wanted for source in sources[name]}
            _check_shapes(handles, sources, wanted, rows)
            # By source, so that a tensor with several names in the model is read once.
            whole = {source for name in wanted if name not in rows for source in sources[name]}
            tensors = {source: handles[source].read(source) for source in handles if source in whole}
            _check_ties(tensors, sources, [name for name in wanted if name not in rows])
            by_name = {name: tensors[sources[name][0]] for name in wanted if name not in rows}
            for name in (name for name in wanted if name in rows):
                source, row = sources[name][0], rows[name]
                tensors[name] = by_name[name] = handles[source].read(source, slice(row.start, row.stop))
            size = sum(tensor.nbytes for tensor in tensors.values())
            return by_name, Loaded(len(tensors), size, tuple(sorted(file.name for file in opened)))


def _open(file: Path, stack: ExitStack) -> TensorFile:
    try:
        return TensorFile(stack.enter_context(safe_open(file, framework="pt")))
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError) as error:
        raise DamagedError("not a safetensors file", file=file, error=error, hint=DOWNLOAD_AGAIN) from None


def _check_shapes(
    handles: Mapping[str, TensorFile],
    sources: Mapping[str, Sequence[str]],
    wanted: Mapping[str, Tensor],
    rows: Mapping[str, RowSlice],
) -> None:
    """Refuse tensors that are missing in their files, or have another shape or dtype than the model's."""
    missing, shapes, dtypes = [], [], []
    for name, tensor in wanted.items():
        for source in sources[name]:
            if source not in handles[source].names:
                missing.append(source)
                continue
            dtype, found = handles[source].dtype_and_shape(source)
            shape = (rows[name].size, *tensor.shape[1:]) if name in rows else tuple(tensor.shape)
            if found != shape:
                shapes.append(f"{name} {list(found)}, the model {list(shape)}")
            elif DTYPES.get(dtype) is not tensor.dtype:
                dtypes.append(f"{name} {dtype}, the model {dtype_name(tensor.dtype)}")
    if missing:
        raise DamagedError(
            "a file lacks tensors that the index lists for it", names=shorten(missing), hint=DOWNLOAD_AGAIN
        )
    if shapes:
        hint = "a model of the configuration in that directory"
        raise CheckpointError("the shapes of tensors differ from the model's", names=shorten(shapes), hint=hint)
    if dtypes:
        hint = "model.to(dtype) before planning, or from_config(config, dtype=...), with the dtype of the files"
        raise CheckpointError("the dtypes of tensors differ from the model's", names=shorten(dtypes), hint=hint)


def _check_ties(tensors: Mapping[str, Tensor], sources: Mapping[str, Sequence[str]], names: Iterable[str]) -> None:
    """Refuse different values for one parameter that has several names in the checkpoint."""
    for name in names:
        first, *others = sources[name]
        for other in others:
            # Compared as bytes, so that NaN equals itself.
            if not torch.equal(as_bytes(tensors[first]), as_bytes(tensors[other])):
                raise CheckpointError(
                    "names that are one parameter in the model have different values in the checkpoint",
                    names=(first, other),
                    hint="a configuration with tie_word_embeddings=False, if they are meant to differ",
                )


class CheckpointReader:
    """One checkpoint that penstock wrote, locked so that no save removes it until the reader is closed.

    Opening it reads the manifest and checks the sizes of all files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bytes_read = 0
        """bytes of documents and of their tensors so far"""
        self._opened: dict[str, TensorFile] = {}
        """tensor files of documents, by name"""
        with ExitStack() as stack:
            self._lock = lock_shared(directory)
            stack.callback(self._lock.release)
            with self.unchanged():
                self.manifest: Manifest = read_manifest(directory)
                if step_of(directory) not in (None, self.manifest.step):
                    problem = "a checkpoint has the directory name of another step"
                    raise DamagedError(problem, path=directory, step=self.manifest.step)
                check_sizes(directory, self.manifest)
            self._stack = stack.pop_all()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise VanishedError if the checkpoint is removed or replaced during the body, in place of any other error.

        Other processes of penstock do not remove it while it is locked, but may replace it by another one of its step;
        and files can be removed by hand.
        """
        try:
            yield
        except Exception as error:
            if self._lock.is_current:
                raise
            raise vanished(self.directory) from error
        if not self._lock.is_current:
            raise vanished(self.directory)

    @contextmanager
    def documents(self) -> Iterator[None]:
        """A context for reading documents: a Python error because of wrong types in one counts as damage."""
        with self.unchanged():
            try:
                yield
            except PenstockError:
                raise
            except _WRONG_TYPES as error:
                reason = f"{type(error).__name__}: {error}"[:200]
                raise DamagedError("a document cannot be read", path=self.directory, reason=reason) from error

    def verify(self, rank: int = 0, ranks: int = 1) -> int:
        """Compare this rank's share of the files with their digests; returns the number of bytes read."""
        with self.unchanged():
            return check_digests(self.directory, self.manifest, files_to_check(self.manifest, rank, ranks))

    @property
    def tensors(self) -> TensorReader:
        """Parameters and buffers."""
        return TensorReader({name: self.directory / record.file for name, record in self.manifest.tensors.items()})

    def content(self, file: str) -> bytes:
        """The content of a file."""
        if file not in self.manifest.files:
            raise DamagedError("a file is missing", file=self.directory / file)
        content = read_bytes(self.directory / file, self.manifest.files[file].bytes)
        self.bytes_read += len(content)
        return content

    def json_object(self, stem: str) -> dict[str, Any]:
        """A document as it is stored: a JSON object with references to tensors."""
        content = parse_json(self.content(f"{stem}.json"), stem)
        if not isinstance(content, dict):
            raise DamagedError("a document is not a JSON object", file=stem)
        return content

    def document(self, stem: str) -> Any:
        """The value of a document, with the tensors of its tensor file."""
        return decode_tree(self.json_object(stem), self.tensor_finder(stem))

    @property
    def run(self) -> RunState:
        """The state of the run, read inside `documents`."""
        return RunState.decode(self.document(RUN), self.manifest.step)

    @property
    def optimizer(self) -> SavedOptimizer:
        """The state of the optimizer; its tensors are read when they are needed.

        Call it inside `documents`, which reports wrong types as damage.
        """
        return SavedOptimizer((self.json_object(stem), self.tensor_finder(stem)) for stem in self.stems("optimizer"))

    def stems(self, kind: str) -> list[str]:
        """Names without suffix of the numbered documents of a kind, such as optimizer-000, in the order of numbers."""
        numbered = re.compile(rf"({kind}-(\d{{3,}}))\.json")
        matches = filter(None, map(numbered.fullmatch, self.manifest.files))
        # Not by name: 1000 comes after 999.
        return [match[1] for match in sorted(matches, key=lambda match: int(match[2]))]

    def tensor_finder(self, stem: str) -> FindTensor:
        """A function that reads tensors by name from the tensor file of a document."""

        def read_tensor(name: str) -> Tensor:
            file = f"{stem}.safetensors"
            if file not in self.manifest.files:
                raise DamagedError("a document refers to tensors that are not in the checkpoint", file=file)
            try:
                if file not in self._opened:
                    handle = safe_open(self.directory / file, framework="pt")
                    self._opened[file] = TensorFile(self._stack.enter_context(handle))
                tensor = self._opened[file].read(name)
            except (SafetensorError, KeyError, OSError, RuntimeError, ValueError, TypeError) as error:
                raise DamagedError("a tensor cannot be read", file=stem, name=name, reason=error) from None
            self.bytes_read += tensor.nbytes
            return tensor

        return read_tensor
