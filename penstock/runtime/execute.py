"""Execute: runs prepared calls, of one rank or of all ranks inside one process, and notes when each one ran."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from penstock.errors import RunError
from penstock.ir import ComputeAction, Message, decode_one
from penstock.runtime.compile import Prepared, Ready
from penstock.runtime.times import Times

Tell = Callable[[int], None]
_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_FULL = ("not enough memory", "can't allocate memory")
_ROOM = "more microbatches, recompute='full', more ranks, or a schedule that holds less (1f1b, v_half, v_min)"


def execute(prepared: Prepared, tell: Tell, times: Times | None = None) -> None:
    """Run the actions of one rank in order; `tell` hears the code of each before it runs, where that is worth it."""
    if times is not None:
        for ready in prepared.actions:
            _timed(prepared, ready, tell, times)
        return
    code = 0
    try:
        for code, waits, is_told, run in prepared.busy:
            for wait in waits:
                wait()
            if is_told:
                tell(code)
            run()
    except Exception as error:
        prepared.clear()
        raise located_error(error, prepared.rank, code) from error


def execute_together(ranks: Sequence[Prepared], tell: Tell, times: Sequence[Times] | None = None) -> None:
    """Run all ranks inside one process, each as far as the messages that it has allow, in turns."""
    places = [0] * len(ranks)
    while any(place < len(one.actions) for place, one in zip(places, ranks, strict=True)):
        before = list(places)
        for index, one in enumerate(ranks):
            places[index] = _advance(one, places[index], tell, times[index] if times else Times())
        if places == before:
            waiting = [one.actions[at].code for at, one in zip(places, ranks, strict=True) if at < len(one.actions)]
            raise RunError("every rank waits for another", actions=[str(decode_one(code)) for code in waiting])


def _advance(prepared: Prepared, place: int, tell: Tell, times: Times) -> int:
    """Run actions until one would have to wait; returns its place."""
    while place < len(prepared.actions) and prepared.actions[place].is_ready:
        _timed(prepared, prepared.actions[place], tell, times)
        place += 1
    return place


def _timed(prepared: Prepared, ready: Ready, tell: Tell, times: Times) -> None:
    try:
        for wait in ready.waits:
            wait()
        start = perf_counter()
        tell(ready.code)
        if ready.run is not None:
            ready.run()
        times.note(start, perf_counter())
    except Exception as error:
        prepared.clear()
        raise located_error(error, prepared.rank, ready.code) from error


def located_error(error: Exception, rank: int, code: int) -> Exception:
    """The same failure, with where it happened; errors that penstock raised on purpose keep their words."""
    action = decode_one(code)
    microbatch = action.microbatch if isinstance(action, ComputeAction | Message) else None
    where = {"rank": rank, "stage": action.stage, "microbatch": microbatch, "action": str(action)}
    known = {name: value for name, value in where.items() if value is not None}
    if isinstance(error, RunError):
        return error.at(**known)
    is_full = isinstance(error, _OUT_OF_MEMORY) or any(words in str(error) for words in _FULL)
    hint = _ROOM if is_full else ""
    return RunError(f"{type(error).__name__}: {error}", hint=hint, **known)
