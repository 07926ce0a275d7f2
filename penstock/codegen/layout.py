"""Layout: Python code as pieces that can be broken at their brackets, and the lines that they come to."""

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import wrap
from typing import TypeAlias

WIDTH = 120
_STEP = "    "


@dataclass(frozen=True)
class Bracket:
    """Items between brackets. Those of a call are first tried on one line of their own, those of a display never."""

    opening: str
    items: tuple["Code", ...]
    closing: str
    is_call: bool = False
    has_comma: bool = True
    """whether one may follow the last item without a change of meaning"""

    @property
    def text(self) -> str:
        """All on one line."""
        is_single = self.opening == "(" and not self.is_call and len(self.items) == 1
        return f"{self.opening}{', '.join(map(flat, self.items))}{',' if is_single else ''}{self.closing}"


@dataclass(frozen=True)
class Chain:
    """Pieces that follow each other without a space."""

    pieces: tuple["Code", ...]


Code: TypeAlias = str | Bracket | Chain


def call(function: Code, items: Iterable[Code]) -> Chain:
    """A call of a function."""
    return Chain((function, Bracket("(", tuple(items), ")", is_call=True)))


def named(name: str, value: Code) -> Chain:
    """An argument by keyword."""
    return Chain((f"{name}=", value))


def display(opening: str, items: Iterable[Code], closing: str) -> Bracket:
    """A tuple, list, set or dict."""
    return Bracket(opening, tuple(items), closing)


def index(item: Code) -> Bracket:
    """A single index."""
    return Bracket("[", (item,), "]", has_comma=False)


def flat(code: Code) -> str:
    """The code on one line."""
    if isinstance(code, str):
        return code
    return code.text if isinstance(code, Bracket) else "".join(map(flat, code.pieces))


def lines(code: Code, indent: str = "", taken: int = 0) -> list[str]:
    """The code on as many lines as it needs; `taken` characters follow it on its last one."""
    text = indent + flat(code)
    if len(text) + taken <= WIDTH:
        return [text]
    before, bracket, after = _broken(code)
    if bracket is None or not bracket.items:
        return [text]
    inner = indent + _STEP
    together = inner + ", ".join(map(flat, bracket.items))
    if bracket.is_call and len(together) <= WIDTH:
        middle = [together]
    else:
        comma = "," if bracket.has_comma else ""
        middle = [line for item in bracket.items for line in _ended(lines(item, inner, 1), comma)]
    return [f"{indent}{before}{bracket.opening}", *middle, f"{indent}{bracket.closing}{after}"]


def _ended(block: list[str], ending: str) -> list[str]:
    return [*block[:-1], f"{block[-1]}{ending}"]


def _broken(code: Code) -> tuple[str, Bracket | None, str]:
    """What comes before the last brackets that hold something, these, and what comes after."""
    if isinstance(code, Bracket):
        return "", code, ""
    pieces = code.pieces if isinstance(code, Chain) else (code,)
    for place in reversed(range(len(pieces))):
        before, bracket, after = _broken(pieces[place]) if not isinstance(pieces[place], str) else ("", None, "")
        if bracket is not None and bracket.items:
            left, right = "".join(map(flat, pieces[:place])), "".join(map(flat, pieces[place + 1 :]))
            return left + before, bracket, after + right
    return flat(code), None, ""


def quoted(text: str) -> str:
    """A text as a literal, whatever is in it: all that does not print is escaped."""
    literal = repr(text)
    has_quotes = '"' in literal or "\\'" in literal
    return literal if has_quotes or not literal.startswith("'") else f'"{literal[1:-1]}"'


def docstring(paragraphs: Iterable[str], indent: str = "") -> list[str]:
    """Lines as a docstring; nothing in them can end it."""
    room = WIDTH - len(indent) - 3
    folded = [line for text in paragraphs for line in wrap(text, room, subsequent_indent="  ") or [""]]
    first, *rest = [text.replace("\\", "\\\\").replace('"', '\\"') if _is_risky(text) else text for text in folded]
    if not rest:
        return [f'{indent}"""{first}"""']
    return [f'{indent}"""{first}', *(f"{indent}{line}" if line else "" for line in rest), f'{indent}"""']


def _is_risky(text: str) -> bool:
    return "\\" in text or '"""' in text or text.endswith('"')
