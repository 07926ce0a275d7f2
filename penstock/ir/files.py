"""Files: a text written whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from penstock.errors import FormatError


def write_whole(path: str | Path, text: str) -> None:
    """Write the text; a file that was there before stays whole until the new one is."""
    draft = Path(f"{path}.{os.getpid()}.draft")
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_text(text, encoding="utf-8")  # a device or a pipe, which nothing can take the place of
            return
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except (OSError, ValueError, TypeError) as error:
        raise FormatError("cannot write the file", file=path, reason=error) from None
    finally:
        with suppress(OSError, ValueError):
            draft.unlink()
