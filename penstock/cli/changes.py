"""Changes: what is asked of a training otherwise than when it was saved, told where it goes on."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.checkpoint import Loaded
    from penstock.cli.training_job import Job

HOW, WISHES = "how", "wishes"
_TOLD = ("data", "loss", "optimizer", "lr", "clip", "seed")


def asked(job: "Job") -> dict[str, Any]:
    """What is asked of a training, as a checkpoint keeps it."""
    return {WISHES: asdict(job.wishes), HOW: asdict(job.how)}


def changes(job: "Job", optimizer: Any) -> "Callable[[Loaded], str]":
    """What tells the changes once a checkpoint was read; the learning rate counts as it is asked for now."""

    def told(loaded: "Loaded") -> str:
        before, now = _how(loaded.extra), asdict(job.how)
        other = [name for name in _TOLD if name in before and before[name] != now[name]]
        if "lr" in other and ":" not in job.how.optimizer:
            for group in optimizer.param_groups:
                group["lr"] = job.how.lr
        words = ", ".join(f"--{name} {_word(before[name])} is now {_word(now[name])}" for name in other)
        return f"changed since it was saved: {words}" if words else ""

    return told


def _how(extra: object) -> dict[str, Any]:
    """What was asked when it was saved, as far as that is known."""
    found = extra.get(HOW) if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else {}


def _word(value: object) -> str:
    return "none" if value is None else str(value)
