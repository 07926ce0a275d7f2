"""Seconds, bytes, counts and shares as short text, and tables of text."""

import math
from collections.abc import Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def printable(text: str, one_line: bool = False) -> str:
    """The text with control characters replaced, so that a name from a file cannot control the terminal.

    Also replaces characters that change the direction of text. Newlines and tabs stay, unless with `one_line`.
    """
    kept = "" if one_line else "\n\t"
    # Most texts have none, and `isprintable` of the whole text is quick.
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in kept else "?" for char in text)


def seconds_text(seconds: float, digits: int = 4) -> str:
    """`12.5 ms`, in the largest unit in which the number is 1 or more."""
    scale, unit = seconds_unit(abs(seconds))
    return f"{number_text(seconds / scale, digits)} {unit}"


def seconds_unit(largest: float) -> tuple[float, str]:
    """The unit for numbers up to the largest: its seconds and its name."""
    if largest == 0:
        return _SECONDS[0]
    return next((entry for entry in _SECONDS if largest >= entry[0]), _SECONDS[-1])


def bytes_text(size: float) -> str:
    """`3.25 GiB`."""
    scale, unit = next((entry for entry in _BYTES if abs(size) >= entry[0]), (1, "B"))
    return f"{number_text(size / scale, 3)} {unit}"


def count_text(count: int) -> str:
    """`8.03 B`: thousands, millions, billions and trillions, as parameters are counted."""
    scale, unit = next(((scale, unit) for scale, unit in _COUNTS if count >= scale), (1, ""))
    return f"{number_text(count / scale, 3)} {unit}".rstrip()


def counted(count: int, word: str) -> str:
    """`1 node`, `2 nodes`."""
    ending = "" if count == 1 else "es" if word.endswith("ch") else "s"
    return f"{count} {word}{ending}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 2 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def percent_text(share: float) -> str:
    """`27.3 %`."""
    return f"{0.0 if abs(share) < 5e-4 else 100 * share:.1f} %"


def number_text(value: float, digits: int) -> str:
    """The value with `digits` significant digits; with an exponent only if very small or large."""
    if value and not 1e-6 < abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    text = f"{value:.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def round_step(largest: float, count: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that divides 0 .. `largest` into at most `count` parts."""
    if largest <= 0:
        return 1.0
    rough = largest / max(1.0, count)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * (1 - 1e-9)), 10 * power)


def align_columns(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines of text: all columns right-aligned but the last, which is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join((*map(str.rjust, row[:-1], widths), row[-1])).rstrip() for row in table]
