"""Stored: a checkpoint that lies in a directory, and what one rank reads of it."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint.manifest import Manifest, read_manifest, read_plain
from penstock.checkpoint.optimizer_state import SavedState
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.shelf import step_of
from penstock.checkpoint.values import Find, from_plain, from_text
from penstock.checkpoint.verifying import check_files, check_sizes, share_of
from penstock.errors import DamagedError

RUN, PLAN, CONFIG = "run", "plan.json", "config.json"


class Stored:
    """Reads documents and the tensors that they name, and counts the bytes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        if step_of(directory) not in (None, self.manifest.step):
            raise DamagedError("a directory has the name of another step", path=directory, step=self.manifest.step)
        check_sizes(directory, self.manifest)
        self.bytes_read = 0
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "Stored":
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()

    def verify(self, rank: int = 0, ranks: int = 1) -> int:
        """Compare this rank's share of the files with what was written; how many bytes that was."""
        return check_files(self.directory, self.manifest, share_of(self.manifest, rank, ranks))

    @property
    def reader(self) -> Reader:
        """The parameters and buffers."""
        return Reader({name: self.directory / file for name, (file, _, _) in self.manifest.tensors.items()})

    def has(self, file: str) -> bool:
        """Whether a file is part of the checkpoint."""
        return file in self.manifest.files

    def text(self, file: str) -> bytes:
        """A document as it is."""
        if file not in self.manifest.files:
            raise DamagedError("a file is missing", file=self.directory / file)
        content = read_plain(self.directory / file, self.manifest.files[file].bytes)
        self.bytes_read += len(content)
        return content

    def plain(self, stem: str) -> dict[str, Any]:
        """A document as JSON has it, with tensors by their names."""
        content = from_text(self.text(f"{stem}.json"), stem)
        if not isinstance(content, dict):
            raise DamagedError("a document is no object", file=stem)
        return content

    def document(self, stem: str) -> Any:
        """The value of a document and the tensors beside it."""
        return from_plain(self.plain(stem), self.find(stem))

    @property
    def run(self) -> dict[str, Any]:
        """Scaler, position and extra."""
        found = self.document(RUN)
        if not isinstance(found, dict):
            raise DamagedError("a document is no object", file=RUN)
        return found

    @property
    def optimizer(self) -> SavedState:
        """What was saved of the optimizer; tensors are read when they are asked for."""
        try:
            return SavedState((self.plain(stem), self.find(stem)) for stem in self.stems("optimizer"))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise DamagedError("the state of the optimizer cannot be read", reason=repr(error)) from None

    def stems(self, kind: str) -> list[str]:
        """The documents of one kind, such as optimizer, of which there may be several, by their numbers."""
        numbered = re.compile(rf"({kind}-\d{{3,}})\.json")
        return [found[1] for name in sorted(self.manifest.files) if (found := numbered.fullmatch(name))]

    def find(self, stem: str) -> Find:
        """What brings a tensor of the file beside a document, by its name."""

        def found(name: str) -> Tensor:
            try:
                tensor: Tensor = self._opened(f"{stem}.safetensors").get_tensor(name)
            except (SafetensorError, KeyError, OSError) as error:
                raise DamagedError("a tensor cannot be read", file=stem, name=name, reason=error) from None
            self.bytes_read += tensor.nbytes
            return tensor

        return found

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            if file not in self.manifest.files:
                raise DamagedError("a document names tensors that are not in the checkpoint", file=file)
            self._files[file] = self._open.enter_context(safe_open(self.directory / file, framework="pt"))
        return self._files[file]
