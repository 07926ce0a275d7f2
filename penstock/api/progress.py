"""Progress: a bar on a terminal for whatever takes longer than a second."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_PATIENCE_SECONDS = 1.0

Tell = Callable[[int, int], None]
"""is called with the finished and the total number of work items"""


@contextmanager
def progress(text: str, wanted: bool | None = None) -> Iterator[Tell]:
    """A bar under that text on stderr, gone when the work is done; `wanted` None asks whether that is a terminal."""
    is_shown = sys.stderr.isatty() if wanted is None else wanted
    if not is_shown:
        yield lambda done, total: None
        return
    bar = _Bar(text)
    try:
        yield bar.tell
    finally:
        bar.close()


class _Bar:
    """Redrawn only on updates: a bar with a thread of its own would disturb what is measured."""

    def __init__(self, text: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._text, self._start = text, time.monotonic()
        self._task: TaskID | None = None

    def tell(self, done: int, total: int) -> None:
        """Draw how far it is, once it has taken long enough."""
        if self._task is None:
            if time.monotonic() - self._start < _PATIENCE_SECONDS:
                return
            self._progress.start()
            self._task = self._progress.add_task(self._text, total=total)
        self._progress.update(self._task, completed=done, total=total, refresh=True)

    def close(self) -> None:
        """Take it away."""
        if self._task is not None:
            self._progress.stop()
