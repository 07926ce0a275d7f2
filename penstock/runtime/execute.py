"""Execute: runs prepared calls, of one rank or of all ranks inside one process, and notes when each one ran."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from penstock.errors import RunError
from penstock.ir.action import ComputeAction, Message
from penstock.ir.code import decode_one
from penstock.runtime.compile import Prepared
from penstock.runtime.times import Times

Tell = Callable[[int], None]
_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_FULL = ("not enough memory", "can't allocate memory")
_ROOM = "more microbatches, recompute='full', more ranks, or a schedule that holds less (1f1b, v_half, v_min)"


def execute(prepared: Prepared, tell: Tell, times: Times | None = None) -> None:
    """Run the calls of one rank in order; `tell` hears the code of each before it runs."""
    code = 0
    try:
        if times is None:
            for code, call in prepared.busy:
                call.wait()
                tell(code)
                call()
        else:
            for code, call in zip(prepared.codes, prepared.calls, strict=True):
                call.wait()
                tell(code)
                start = perf_counter()
                call()
                times.note(start, perf_counter())
    except Exception as error:
        prepared.clear()
        raise located(error, prepared.rank, code) from error


def execute_together(ranks: Sequence[Prepared], tell: Tell, times: Sequence[Times] | None = None) -> None:
    """Run all ranks inside one process, each as far as the messages that it has allow, in turns."""
    places = [0] * len(ranks)
    while any(place < len(one.calls) for place, one in zip(places, ranks, strict=True)):
        before = list(places)
        for index, one in enumerate(ranks):
            places[index] = _advance(one, places[index], tell, times[index] if times else None)
        if places == before:
            waiting = [one.codes[place] for place, one in zip(places, ranks, strict=True) if place < len(one.codes)]
            raise RunError("every rank waits for another", actions=[str(decode_one(code)) for code in waiting])


def _advance(prepared: Prepared, place: int, tell: Tell, times: Times | None) -> int:
    """Run calls until one would have to wait; returns its place."""
    stop = place
    while stop < len(prepared.calls) and prepared.calls[stop].is_ready:
        execute(prepared.part(stop), tell, times)
        stop += 1
    return stop


def located(error: Exception, rank: int, code: int) -> Exception:
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
