"""Stopping: a wish to end after the present step, by a signal to a rank or by a file beside the boards.

The launcher of the ranks passes a wish on as a file, because signals to the ranks are how it ends them.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from penstock.launch.rank import board_directory

_NAME = "stop"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Wish:
    """Whether this rank was asked to stop; the ranks agree among themselves on when."""

    def __init__(self, board: Path | None) -> None:
        self._file = board / _NAME if board is not None else None
        self._was_signalled = False

    def __bool__(self) -> bool:
        return self._was_signalled or (self._file is not None and self._file.exists())

    def signalled(self) -> None:
        """A signal came."""
        self._was_signalled = True


_HEARD: list[Wish] = []
"""the wish that signals of this process become, while one is waited for"""


@contextmanager
def wish_to_stop() -> Iterator[Wish]:
    """On a rank: a first signal becomes a wish, a second one ends the process at once. Inside another one, the same."""
    if _HEARD:
        yield _HEARD[-1]
        return
    wish = Wish(board_directory())
    _HEARD.append(wish)

    def once(number: int, frame: FrameType | None) -> None:
        wish.signalled()
        for each, handler in before.items():
            signal.signal(each, handler if callable(handler) else signal.SIG_DFL)

    # One that is ignored stays so, as of jobs in the background; but it is launch that lets its ranks ignore ctrl-c.
    is_launched = board_directory() is not None
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if is_launched or handler is not signal.SIG_IGN:
            signal.signal(number, once)
    try:
        yield wish
    finally:
        _HEARD.remove(wish)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def passing_on(board: Path, tell: Callable[[], None]) -> Iterator[Wish]:
    """In the launcher: a first signal asks the ranks to stop after their step, a second one interrupts as usual."""
    (board / _NAME).unlink(missing_ok=True)

    def once(number: int, frame: FrameType | None) -> None:
        (board / _NAME).touch()
        for each in _SIGNALS:
            signal.signal(each, signal.default_int_handler)
        tell()

    before = {number: signal.signal(number, once) for number in _SIGNALS}
    try:
        yield Wish(board)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
