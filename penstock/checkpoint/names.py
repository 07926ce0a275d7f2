"""Maps the names of tensors in a checkpoint to the parameters and buffers of a model."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from penstock.errors import CheckpointError
from penstock.ir import listed, printable

_SHOWN = 5
LOSS_STATE = r"^loss_fn_*\."
"""pattern of the names of a loss module, which a pipeline without one, and the model alone, do not need"""


@dataclass(frozen=True)
class ModelNames:
    """The names of a whole model, on any number of ranks."""

    saved: frozenset[str]
    """parameters and persistent buffers"""
    tied: tuple[tuple[str, ...], ...] = ()
    """groups of names of one parameter: a checkpoint needs one name of each group"""
    unsaved: frozenset[str] = frozenset()
    """non-persistent buffers; older checkpoints may have them"""
    prefix: str = ""
    """attribute of the inner model (`base_model_prefix` in transformers), which may have been saved on its own"""
    ignored: tuple[str, ...] = ()
    """patterns of names that the model ignores when it is loaded"""

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of a parameter, the given one first."""
        group = next((group for group in self.tied if name in group), ())
        return tuple(dict.fromkeys((name, *group)))

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint may have this name although the model does not."""
        return name in self.unsaved or any(re.search(pattern, name) for pattern in self.ignored)


def match_names(found: Collection[str], names: ModelNames) -> dict[str, tuple[str, ...]]:
    """For every name of the model, its names in the checkpoint (several if it is tied); refused if names differ.

    A checkpoint of the inner model alone, or one that has it inside, is accepted only if all names then match.
    """
    renamings: list[Callable[[str], str]] = [str]
    if names.prefix:
        start = f"{names.prefix}."
        renamings += [lambda name: start + name, lambda name: name.removeprefix(start)]
    matches = [_match(found, names, rename) for rename in renamings]
    for sources, missing, unexpected in matches:
        if not missing and not unexpected:
            return sources
    _, missing, unexpected = matches[0]
    values = {"missing": missing, "unexpected": unexpected}
    close = get_close_matches((unexpected or [""])[0], missing, n=1)
    renamed = f", if {unexpected[0]!r} is this model's {close[0]!r}" if close else ""
    raise CheckpointError(
        "the tensors of the checkpoint do not match the names of the model",
        **{kind: shorten(group) for kind, group in values.items() if group},
        hint=f"a model of the same configuration, or Model.from_pretrained(path), which can rename{renamed}",
    )


def _match(
    found: Iterable[str], names: ModelNames, rename: Callable[[str], str]
) -> tuple[dict[str, tuple[str, ...]], list[str], list[str]]:
    """The sources of the model's names if those of the checkpoint are renamed, and missing and unexpected names."""
    known: dict[str, str] = {}
    unexpected = []
    for name in found:
        renamed = rename(name)
        if renamed in names.saved and renamed not in known:
            known[renamed] = name
        elif renamed in known or not (names.is_ignored(renamed) or names.is_ignored(name)):
            unexpected.append(name)
    sources = {
        name: tuple(known[other] for other in names.names_of(name) if other in known) for name in sorted(names.saved)
    }
    return sources, [name for name, own in sources.items() if not own], unexpected


def shorten(names: Collection[str]) -> str:
    """The first names of a list, and how many more there are."""
    return printable(listed(list(names), _SHOWN))
