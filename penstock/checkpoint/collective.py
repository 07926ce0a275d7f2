"""Work that one rank does for all, and errors that are raised on all ranks or on none."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import CheckpointError, PenstockError
from penstock.runtime import ProcessGroups, RankSync, SyncRequest


@contextmanager
def sync_after(sync: RankSync, request: SyncRequest) -> Iterator[None]:
    """Synchronise all ranks after the body; an exception in the body of one rank is raised on every rank."""
    try:
        yield
    except Exception as error:
        # The other ranks are waiting in `exchange`, and raise this error there.
        sync.refuse(request, error)
        sync.operation_ended()
        raise
    sync.exchange(request)
    sync.operation_ended()


def run_on_first_rank(groups: ProcessGroups, work: Callable[[], str], request: SyncRequest) -> str:
    """Run `work` on the first rank of the first pipeline; its result, or its error, reaches every rank."""
    if not groups.is_first:
        # Wait for the broadcast below.
        message: dict[str, object] = {}
        if groups.monitor is not None:
            groups.monitor.syncing(request.name, request.step)
    else:
        try:
            message = {"text": work()}
        except PenstockError as error:
            message = error.to_dict()
        except OSError as error:
            message = write_error(error).to_dict()
    if not groups.is_local:
        message = json.loads(groups.broadcast_text_to_all(json.dumps(message)))
    if "problem" not in message:
        return str(message["text"])
    raise CheckpointError.from_dict(message)


def write_error(error: Exception) -> CheckpointError:
    """The CheckpointError for an exception while a checkpoint is written."""
    if isinstance(error, CheckpointError):
        return error
    reason = error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    file = getattr(error, "filename", None)
    return CheckpointError("the checkpoint could not be written", reason=reason, **({"file": file} if file else {}))
