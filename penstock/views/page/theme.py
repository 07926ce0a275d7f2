"""Theme: every colour of a report on light paper and on dark, by a class of its own."""

from collections.abc import Iterable

from penstock.ir import Kind
from penstock.views.curves import GROUND
from penstock.views.palette import ALARM, FAINT, IDLE, INK, KINDS, MARK, PAPER, RULE, contrast, mix

DARK_PAPER = "#12161c"
AREA = mix(KINDS[Kind.FORWARD], PAPER, 0.8)
"""below a curve"""
LEAST_CONTRAST = 3.2
"""of what is drawn, against dark paper; 3 is asked of graphics on the web"""
_DARK = {
    INK: "#e9edf2",
    MARK: "#ffffff",
    FAINT: "#9ba6b4",
    RULE: "#3b444f",
    IDLE: "#232a33",
    PAPER: DARK_PAPER,
    ALARM: "#ff7185",
    GROUND: mix(KINDS[Kind.FORWARD], DARK_PAPER, 0.35),
    AREA: mix(KINDS[Kind.FORWARD], DARK_PAPER, 0.65),
}
_STEPS = 20


def dark(color: str) -> str:
    """The colour on dark paper: its counterpart, or itself with as much white as it needs to be seen."""
    if color in _DARK:
        return _DARK[color]
    shades = (mix(color, PAPER, step / _STEPS) for step in range(_STEPS + 1))
    return next(shade for shade in shades if contrast(shade, DARK_PAPER) >= LEAST_CONTRAST)


def word(color: str) -> str:
    """The class that stands for a colour."""
    return f"c{color.removeprefix('#')}"


def rules(colors: Iterable[str], is_dark: bool = False) -> str:
    """The style rules that give every class its colour."""
    named = dict.fromkeys(colors)
    return "".join(f".{word(color)}{{--c:{dark(color) if is_dark else color}}}" for color in named)
