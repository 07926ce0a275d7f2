"""Stored: a checkpoint that lies in a directory, and what one rank reads of it."""

import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint.manifest import Manifest, read_manifest, read_plain
from penstock.checkpoint.optimizer_state import SavedState
from penstock.checkpoint.reading import Reader
from penstock.checkpoint.values import Find, from_plain, from_text
from penstock.checkpoint.verifying import check_files, check_sizes, share_of
from penstock.errors import DamagedError

RUN, PLAN, CONFIG = "run", "plan.json", "config.json"
_OPTIMIZER = re.compile(r"(optimizer-\d{3,})\.json")


class Stored:
    """Reads documents and the tensors that they name, and counts the bytes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
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
        content = read_plain(self.directory / file, self.manifest.files[file].bytes)
        self.bytes_read += len(content)
        return content

    def document(self, stem: str) -> Any:
        """The value of a document and the tensors beside it."""
        return from_plain(from_text(self.text(f"{stem}.json"), stem), self.find(stem))

    @property
    def optimizer(self) -> SavedState:
        """What was saved of the optimizer; tensors are read when they are asked for."""
        return SavedState(
            (from_text(self.text(f"{stem}.json"), stem), self.find(stem)) for stem in self._stems(self.manifest.files)
        )

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer was saved."""
        return bool(self._stems(self.manifest.files))

    def _stems(self, names: Iterable[str]) -> list[str]:
        return [found[1] for name in sorted(names) if (found := _OPTIMIZER.fullmatch(name))]

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
