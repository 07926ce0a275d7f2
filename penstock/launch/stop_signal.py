"""Makes SIGINT and SIGTERM end training after the current step instead of at once.

The launcher forwards a request as a file beside the status files, because it uses signals to end its ranks.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from penstock.launch.status_file import status_directory

_FILE = "stop"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """True once a stop was requested here; the ranks agree among themselves after which step they stop."""

    def __init__(self, directory: Path | None) -> None:
        self._file = directory / _FILE if directory is not None else None
        self.was_signalled = False

    def __bool__(self) -> bool:
        return self.was_signalled or (self._file is not None and self._file.exists())


_ACTIVE: list[StopRequest] = []
"""the request of the `catch_stop_signals` that is entered, if any"""


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """On a rank: the first signal becomes a stop request, a second one ends the process at once.

    A nested use yields the request of the outer one. In any other thread than the main one, where Python allows no
    signal handlers, signals act as usual, and only the launcher can request a stop.
    """
    if _ACTIVE:
        yield _ACTIVE[-1]
        return
    request = StopRequest(status_directory())
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    _ACTIVE.append(request)

    def handle(number: int, frame: FrameType | None) -> None:
        request.was_signalled = True
        # The next signal ends the process, also one that was ignored before.
        for each, handler in before.items():
            signal.signal(each, handler if callable(handler) else signal.SIG_DFL)

    # An ignored signal stays ignored, as in background jobs; except in launched ranks, which ignore ctrl-c because the
    # launcher handles it.
    is_launched = status_directory() is not None
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if is_launched or handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield request
    finally:
        _ACTIVE.remove(request)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def forward_stop_signals(directory: Path, on_request: Callable[[], None]) -> Iterator[StopRequest]:
    """In the launcher: the first signal asks the ranks to stop after their step, a second one interrupts as usual."""
    (directory / _FILE).unlink(missing_ok=True)

    def handle(number: int, frame: FrameType | None) -> None:
        (directory / _FILE).touch()
        for each in _SIGNALS:
            signal.signal(each, signal.default_int_handler)
        on_request()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield StopRequest(directory)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
