"""Background: one thread that writes while training goes on, one piece of work at a time."""

import logging
import threading
from collections.abc import Callable

from penstock.errors import CheckpointError

_LOGGER = logging.getLogger(__name__)


class Background:
    """Runs a piece of work; what goes wrong in it is kept until somebody asks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: CheckpointError | None = None

    def start(self, work: Callable[[], CheckpointError | None]) -> None:
        """Begin; what was begun before has been waited for."""
        # The end of the program waits for a thread of this kind: what was begun is written.
        self._thread = threading.Thread(target=self._run, args=(work,), name="penstock checkpoint", daemon=False)
        self._thread.start()

    def _run(self, work: Callable[[], CheckpointError | None]) -> None:
        try:
            self._problem = work()
        except Exception as error:
            problem = error if isinstance(error, CheckpointError) else CheckpointError(f"saving failed: {error!r}")
            self._problem = problem
        if self._problem is not None:
            # Said at once: there may be no further step that could.
            _LOGGER.error("a checkpoint was not written: %s", self._problem)

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def settle(self) -> None:
        """Until nothing is under way; an error if something went wrong that nobody has asked for yet."""
        self.wait()
        if problem := self.problem():
            raise problem

    def problem(self) -> CheckpointError | None:
        """What went wrong since this was last asked."""
        found, self._problem = self._problem, None
        return found
