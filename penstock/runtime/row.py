"""Row: what one rank shows all others at a meeting, in 512 bytes whatever the meeting is for.

gloo ends the process where the sizes of two ends differ, so ranks that were called for different things must be able to
show each other that first.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

ROOM = 36
"""numbers that a row has room for beside its figures"""
MOST_FIGURES = 4
"""sums that a row has room for, and as many maxima"""
_WORDS_BYTES = 104
_HEAD = struct.Struct(f"<6q{_WORDS_BYTES}sii{2 * MOST_FIGURES}d")
_NUMBER_BYTES = 8
_NO_SUMS, _NO_MAXES = (0.0,) * MOST_FIGURES, (-math.inf,) * MOST_FIGURES
_FIGURES = struct.Struct(f"<{2 * MOST_FIGURES}d")
_FIGURES_START = _HEAD.size - _FIGURES.size
KEY_BYTES = 5 * _NUMBER_BYTES
"""at the beginning of a row: its key"""
ROW_BYTES = _HEAD.size + ROOM * _NUMBER_BYTES


class Key(NamedTuple):
    """What must be the same on all ranks, as numbers."""

    number: int
    """how many meetings there were before"""
    step: int
    occasion: int
    """what this rank was called for"""
    form: int = 0
    """what it is about to do"""
    batch: int = 0
    """the content of its batch, where that is compared"""


class Figures(NamedTuple):
    """A few numbers that are summed over the ranks, and a few of which the largest counts; NaN counts as largest."""

    sums: tuple[float, ...] = ()
    maxes: tuple[float, ...] = ()


NO_FIGURES = Figures()


class Row(NamedTuple):
    """What one rank says."""

    key: Key
    words: str = ""
    """what it was called for, in words"""
    text_bytes: int = 0
    """the size of the text that it could show as well"""
    figures: Figures = NO_FIGURES
    content: tuple[float, ...] = ()
    """numbers that only this rank knows"""

    def pack(self) -> bytes:
        """The row as it is sent."""
        words, (sums, maxes) = _cut(self.words), self.figures
        figures = (*sums, *_NO_SUMS[len(sums) :], *maxes, *_NO_MAXES[len(maxes) :])
        head = _HEAD.pack(*self.key, self.text_bytes, words, len(words), len(self.content), *figures)
        return (head + struct.pack(f"<{len(self.content)}d", *self.content)).ljust(ROW_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> "Row":
        """The row that another rank packed."""
        number, step, occasion, form, batch, text_bytes, words, length, count, *figures = _HEAD.unpack_from(data)
        content = struct.unpack_from(f"<{count}d", data, _HEAD.size)
        key = Key(number, step, occasion, form, batch)
        parted = Figures(tuple(figures[:MOST_FIGURES]), tuple(figures[MOST_FIGURES:]))
        return cls(key, words[:length].decode(), text_bytes, parted, content)


def _cut(words: str) -> bytes:
    """As much as there is room for, without half a letter."""
    data = words.encode()
    return data if len(data) <= _WORDS_BYTES else data[:_WORDS_BYTES].decode(errors="ignore").encode()


def figures_in(data: bytes | bytearray, start: int) -> Figures:
    """Only the figures of the row that begins there."""
    found = _FIGURES.unpack_from(data, start + _FIGURES_START)
    return Figures(found[:MOST_FIGURES], found[MOST_FIGURES:])


def merged(figures: Sequence[Figures]) -> Figures:
    """The figures of several ranks as one, in their order: the same on every rank."""
    sums = tuple(sum(column) for column in zip(*[one.sums for one in figures], strict=True))
    return Figures(sums, tuple(_largest(column) for column in zip(*[one.maxes for one in figures], strict=True)))


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
