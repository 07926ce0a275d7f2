"""CPU seconds of a call."""

import time
from collections.abc import Callable


def cpu_seconds(call: Callable[[], object], times: int = 1) -> float:
    """The least CPU seconds of so many calls: what others do on the machine only ever adds."""
    return min(_once(call) for _ in range(times))


def _once(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start
