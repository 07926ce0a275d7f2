"""Lines of generated code: statements without redundant parentheses, broken where they are too long; docstrings."""

import ast
import re
from collections.abc import Iterable
from itertools import pairwise
from textwrap import indent as indented
from textwrap import wrap

WIDTH = 120
INDENT = "    "
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{},]|(?<=\de)\+""")
"""strings, brackets, commas, and the sign of a positive exponent, in a line that `ast.unparse` wrote"""


def statement_lines(code: str, indent: str = "") -> list[str]:
    """The statement on as few lines as it needs, with double quotes and without redundant parentheses."""
    # Exactly one statement: whatever names a model has, they cannot add another.
    (node,) = ast.parse(code).body
    text = ast.unparse(node)
    if isinstance(node, ast.Assign):
        text = f"{_without_parentheses(node.targets[0])} = {ast.unparse(node.value)}"
    elif isinstance(node, ast.Return) and len(indent) + len(text) <= WIDTH:
        text = f"return {_without_parentheses(node.value)}"

    def as_formatters_write(token: re.Match[str]) -> str:
        if token[0].startswith("'") and '"' not in token[0] and "\\'" not in token[0]:
            return f'"{token[0][1:-1]}"'
        return "" if token[0] == "+" else token[0]

    return broken_lines(_TOKEN.sub(as_formatters_write, text), indent)


def _without_parentheses(node: ast.expr) -> str:
    """An expression; a tuple of several items without its parentheses."""
    text = ast.unparse(node)
    return text[1:-1] if isinstance(node, ast.Tuple) and len(node.elts) > 1 else text


def broken_lines(text: str, indent: str) -> list[str]:
    """A line of code; if it is too long, with the items of the brackets at its end on lines of their own."""
    if len(indent) + len(text) <= WIDTH:
        return [indent + text]
    # The last pair of brackets that is in no other: `opening` and `closing` are its ends, `commas` separate its items.
    # Only a pair that ends the line is broken.
    end = len(text.rstrip(",:")) - 1
    depth, opening, closing, commas = 0, 0, 0, []
    for token in _TOKEN.finditer(text):
        if token[0] in ("(", "[", "{"):
            depth += 1
            if depth == 1:
                opening, commas = token.start(), []
        elif token[0] in (")", "]", "}"):
            depth -= 1
            closing = token.start()
        elif token[0] == "," and depth == 1:
            commas.append(token.start())
    follows_name = re.match(r"[\w)\]]", text[opening - 1 : opening]) is not None
    is_call = follows_name and text[opening] == "("
    # An index and an expression in parentheses would become tuples by the comma after the last line.
    is_display = not follows_name and (text[opening] != "(" or bool(commas))
    items = [text[start + 1 : stop].strip() for start, stop in pairwise((opening, *commas, end))]
    items = [item for item in items if item]
    if closing != end or not items or not (is_call or is_display):
        return [indent + text]
    inner = indent + INDENT
    together = inner + ", ".join(items)
    if is_call and len(together) <= WIDTH:
        middle = [together]
    else:
        middle = [line for item in items for line in broken_lines(f"{item},", inner)]
    return [indent + text[: opening + 1], *middle, indent + text[end:]]


def docstring_lines(paragraphs: Iterable[str], indent: str = "") -> list[str]:
    """A docstring; nothing in the paragraphs can end it."""
    room = WIDTH - len(indent) - 3
    lines = [line for text in paragraphs for line in wrap(text, room, subsequent_indent="  ") or [""]]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"', '\\"')
    end = '\n"""' if len(lines) > 1 else '"""'
    return indented(f'"""{text}{end}', indent).split("\n")
