"""A progress bar on the terminal for work that takes longer than a second."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_DELAY_SECONDS = 1.0

Update = Callable[[int, int], None]
"""called with the number of finished work items and their total"""


@contextmanager
def progress(text: str, show: bool | None = None) -> Iterator[Update]:
    """Show a bar labelled `text` on stderr, and remove it at the end. `show` None: only on a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done, total: None
        return
    # Redrawn only on updates: a bar with its own thread would disturb what is measured.
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    start = time.monotonic()
    task: TaskID | None = None

    def update(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            if time.monotonic() - start < _DELAY_SECONDS:
                return
            bar.start()
            task = bar.add_task(text, total=total)
        bar.update(task, completed=done, total=total, refresh=True)

    try:
        yield update
    finally:
        if task is not None:
            bar.stop()
