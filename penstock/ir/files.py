"""Atomic writes of whole files."""

import os
from contextlib import suppress
from pathlib import Path

from penstock.errors import FormatError


def write_atomic(path: str | Path, document: str | bytes) -> None:
    """Write the document to a temporary file and rename it, so that the path never holds a partial document."""
    content = document.encode() if isinstance(document, str) else document
    draft = Path(f"{path}.{os.getpid()}.draft")
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_bytes(content)  # a device or a pipe cannot be replaced by rename
            return
        draft.write_bytes(content)
        draft.replace(path)
    except (OSError, ValueError, TypeError) as error:
        raise FormatError("cannot write the file", file=path, reason=error) from None
    finally:
        with suppress(OSError, ValueError):
            draft.unlink()
