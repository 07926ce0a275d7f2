"""Together: what one rank does for all, and what all do or none, with errors that every rank raises alike."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import CheckpointError, PenstockError
from penstock.runtime import Crew, Meeting, Occasion


@contextmanager
def all_or_none(meeting: Meeting, occasion: Occasion) -> Iterator[None]:
    """Whatever goes wrong inside on one rank is an error on all of them; they leave together."""
    try:
        yield
    except Exception as error:
        meeting.refuse(occasion, error)
        meeting.close()
        raise
    meeting.hold(occasion)
    meeting.close()


def told_by_first(crew: Crew, work: Callable[[], str], occasion: Occasion) -> str:
    """What the first rank of the first replica finds out, on every rank of all; its errors are errors of all."""
    if crew.rank or crew.replica:
        said: dict[str, object] = {}
        if crew.lookout is not None:
            crew.lookout.meets(occasion.name, occasion.step)
    else:
        try:
            said = {"text": work()}
        except (OSError, PenstockError) as error:
            said = written(error)
    said = said if crew.is_alone else json.loads(crew.tell_all(json.dumps(said)))
    if "problem" in said:
        raise error_of(said)
    return str(said["text"])


def written(error: Exception) -> dict[str, object]:
    """An error as it is told to other ranks."""
    if isinstance(error, PenstockError):
        return error.to_dict()
    file = {"file": str(error.filename)} if isinstance(error, OSError) and error.filename else {}
    reason = error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return {"problem": "the checkpoint could not be written", "hint": "", "values": {"reason": reason, **file}}


def error_of(said: dict[str, object]) -> CheckpointError:
    """The error that another rank told."""
    error = CheckpointError(str(said["problem"]), hint=str(said["hint"]), **dict(said["values"]))  # type: ignore[call-overload]
    error.is_shared = True
    return error
