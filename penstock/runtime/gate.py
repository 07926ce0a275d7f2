"""Gate: no message leaves or is awaited before all ranks have shown that they are about to take the same step.

The ranks say what they were called for when a step begins, and the first of them computes while that travels: only
its first message waits for the answer.
"""

from collections.abc import Callable

from penstock.runtime.transport import Arrival, Departure, Route, Transport


class Gate(Transport):
    """Another transport behind a check that is made once, with the first message after it was closed."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._check: Callable[[], object] | None = None
        self.problem: Exception | None = None

    def close(self, check: Callable[[], object]) -> None:
        """Until `check` has returned, nothing passes; if it raises, nothing ever does."""
        self._check, self.problem = check, None

    def open(self) -> None:
        """Make the check, if it was not made yet."""
        check, self._check = self._check, None
        if check is not None:
            try:
                check()
            except Exception as error:
                self.problem = error
                raise

    def departure(self, route: Route) -> Departure:
        """The end that sends, behind the gate."""
        return self._inner.departure(route)

    def arrival(self, route: Route) -> Arrival:
        """The end that receives, behind the gate."""
        return self._inner.arrival(route)

    def clear(self) -> None:
        """Forget what an interrupted step has left behind."""
        self._check = None
        self._inner.clear()
