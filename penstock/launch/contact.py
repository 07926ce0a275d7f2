"""How torch.distributed says, in the text of a RuntimeError, that a message timed out or that a peer went away."""

import re
from enum import Enum


class Loss(Enum):
    """Why a wait for a message ended without it."""

    TIMEOUT = "timeout"
    CLOSED = "closed"
    OTHER = "other"


# gloo: "Timed out waiting 500ms for recv operation to complete", "Operation timed out!", and for every later message of
# the pair "Application timeout caused pair closure"; NCCL: "Watchdog caught collective operation timeout".
_TIMEOUT = re.compile(r"tim(ed|e)[ -]?out", re.IGNORECASE)
# gloo: "Connection closed by peer [127.0.0.1]:49355. ..." or what the system says of a socket; NCCL: "remote process
# exited or there was a network error".
_CLOSED = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|not connected|remote process exited"
    r"|network error|software caused connection abort|socket (is )?closed",
    re.IGNORECASE,
)


def loss_of(error: BaseException) -> Loss:
    """What the text of an error says; a closed connection may mention a timeout, so it is looked for first."""
    text = str(error)
    if _CLOSED.search(text):
        return Loss.CLOSED
    return Loss.TIMEOUT if _TIMEOUT.search(text) else Loss.OTHER


def follows_another(error: BaseException) -> bool:
    """Whether the error, or one that led to it, only says that another rank went away."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and (loss_of(seen) is Loss.CLOSED or "pair closure" in str(seen)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False
