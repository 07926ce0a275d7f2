"""Names: which tensor of a checkpoint is which parameter or buffer of a model."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from penstock.errors import CheckpointError
from penstock.ir import printable

_SHOWN = 5


@dataclass(frozen=True)
class ModelNames:
    """The names that a model has and expects, however many ranks share it."""

    saved: frozenset[str]
    """parameters, and buffers that belong into a checkpoint"""
    tied: tuple[tuple[str, ...], ...] = ()
    """groups of names that are one parameter: of each, one in the checkpoint will do"""
    unsaved: frozenset[str] = frozenset()
    """buffers that do not belong into a checkpoint; older ones may have them"""
    prefix: str = ""
    """the attribute in which the model has its inner model, which may have been saved without what is around it"""
    ignored: tuple[str, ...] = ()
    """patterns of names that the model says to pass over"""

    def ties(self, name: str) -> tuple[str, ...]:
        """All names of a parameter, itself first."""
        group = next((group for group in self.tied if name in group), ())
        return tuple(dict.fromkeys((name, *group)))

    def is_passed_over(self, name: str) -> bool:
        """Whether a name that the model does not have may be in a checkpoint."""
        return name in self.unsaved or any(re.search(pattern, name) for pattern in self.ignored)


def match(found: Collection[str], names: ModelNames) -> dict[str, tuple[str, ...]]:
    """For every name of the model the names that it has in the checkpoint, several if it is tied; refused if unequal.

    A checkpoint of the inner model alone, or one that has it inside, is taken only if all names then fit.
    """
    readings = [_Reading(found, names, rename) for rename in _renamings(names.prefix)]
    fitting = next((reading for reading in readings if not reading.missing and not reading.unexpected), None)
    if fitting is None:
        raise _mismatch(readings[0])
    return fitting.places


def _renamings(prefix: str) -> list[Callable[[str], str]]:
    """From a name in the checkpoint to one in the model, the plain way first."""
    if not prefix:
        return [str]
    start = f"{prefix}."
    return [str, lambda name: start + name, lambda name: name.removeprefix(start)]


class _Reading:
    """One way to read the names of a checkpoint."""

    def __init__(self, found: Iterable[str], names: ModelNames, rename: Callable[[str], str]) -> None:
        known: dict[str, str] = {}
        self.unexpected: list[str] = []
        for name in found:
            own = rename(name)
            if own in names.saved and own not in known:
                known[own] = name
            elif own in known or not (names.is_passed_over(own) or names.is_passed_over(name)):
                self.unexpected.append(name)
        self.places = {
            name: tuple(known[other] for other in names.ties(name) if other in known) for name in sorted(names.saved)
        }
        self.missing = [name for name, places in self.places.items() if not places]


def _mismatch(reading: _Reading) -> CheckpointError:
    values: dict[str, object] = {}
    if reading.missing:
        values["missing"] = listed(reading.missing)
    if reading.unexpected:
        values["unexpected"] = listed(reading.unexpected)
    close = get_close_matches((reading.unexpected or [""])[0], reading.missing, n=1)
    renamed = f", if {reading.unexpected[0]!r} is this model's {close[0]!r}" if close else ""
    return CheckpointError(
        "the checkpoint is of another model, or names its tensors in another way",
        **values,
        hint=f"a model of the same configuration, or Model.from_pretrained(path), which knows how to rename{renamed}",
    )


def listed(names: Collection[str]) -> str:
    """Some names, and how many more there are."""
    shown = printable(", ".join(list(names)[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
