"""Storing: the file of stages and the constants beside it, written whole or not at all."""

from pathlib import Path
from typing import Any

from penstock.codegen.document import document
from penstock.ir import Partition, Placement, write_atomic


def write_stages(captured: Any, partition: Partition, placement: Placement, path: str | Path) -> Path:
    """Write the stages of a captured model as a Python file; nothing is written if they cannot be."""
    path = Path(path)
    beside = path.with_name(f"{path.stem}_constants.safetensors")
    written = document(captured, partition, placement, beside)
    if written.constants:
        # The code knows the digest of its constants: if only one of the two gets written, it says so when imported.
        write_atomic(beside, written.constants)
    write_atomic(path, written.text)
    return path
