"""Together: what one rank does for all, and what all do or none, with errors that every rank raises alike."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import CheckpointError, PenstockError
from penstock.runtime import ProcessGroups, RankSync, SyncRequest


@contextmanager
def all_or_none(sync: RankSync, request: SyncRequest) -> Iterator[None]:
    """Whatever goes wrong inside on one rank is an error on all of them; they leave together."""
    try:
        yield
    except Exception as error:
        sync.refuse(request, error)
        sync.close()
        raise
    sync.exchange(request)
    sync.close()


def told_by_first(groups: ProcessGroups, work: Callable[[], str], request: SyncRequest) -> str:
    """What the first rank of the first replica finds out, on every rank of all; its errors are errors of all."""
    if groups.rank or groups.replica:
        said: dict[str, object] = {}
        if groups.monitor is not None:
            groups.monitor.syncing(request.name, request.step)
    else:
        try:
            said = {"text": work()}
        except (OSError, PenstockError) as error:
            said = written(error)
    said = said if groups.is_local else json.loads(groups.broadcast_text_to_all(json.dumps(said)))
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
