"""Lines of generated code: statements without redundant parentheses, broken where they are too long; docstrings."""

import ast
import re
from collections.abc import Iterable
from textwrap import indent as indented
from textwrap import wrap

WIDTH = 120
INDENT = "    "
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?<=\de)\+""")
"""strings, and the sign of a positive exponent, in a line that `ast.unparse` wrote"""


def statement_lines(code: str, indent: str = "") -> list[str]:
    """The statement on as few lines as it needs, with double quotes and without redundant parentheses."""
    # Exactly one statement: whatever names a model has, they cannot add another.
    (node,) = ast.parse(code).body
    text = _text(node)
    if isinstance(node, ast.Assign):
        text = f"{_without_parentheses(node.targets[0])} = {_text(node.value)}"
    elif isinstance(node, ast.Return) and len(indent) + len(text) <= WIDTH:
        text = f"return {_without_parentheses(node.value)}"
    return broken_lines(text, node, indent)


def _text(node: ast.AST) -> str:
    """The code of a node in one line, with double quotes."""

    def normalized(token: re.Match[str]) -> str:
        """As ruff and black write it."""
        if token[0].startswith("'") and '"' not in token[0] and "\\'" not in token[0]:
            return f'"{token[0][1:-1]}"'
        return "" if token[0] == "+" else token[0]

    return _TOKEN.sub(normalized, ast.unparse(node))


def _without_parentheses(node: ast.expr) -> str:
    """An expression; a tuple of several items without its parentheses."""
    text = _text(node)
    return text[1:-1] if isinstance(node, ast.Tuple) and len(node.elts) > 1 else text


def broken_lines(text: str, node: ast.AST, indent: str) -> list[str]:
    """A line of code; if it is too long, with the items of the brackets at its end on lines of their own.

    The node is that of the line, or of an expression at its end.
    """
    if len(indent) + len(text) <= WIDTH:
        return [indent + text]
    # The outermost call or display at the end: in `x * f(y)`, the call. Only its brackets are broken: an index and an
    # expression in parentheses would become tuples by the comma after the last line.
    end = text.rstrip(",:")
    last = next((each for each in ast.walk(node) if _items(each) and end.endswith(_text(each))), None)
    if last is None:
        return [indent + text]
    items, inner = _items(last), indent + INDENT
    together = ", ".join(item for item, _ in items)
    opening, _, closing = text.rpartition(together)
    if isinstance(last, ast.Call) and len(inner) + len(together) <= WIDTH:
        middle = [inner + together]
    else:
        middle = [line for item, node in items for line in broken_lines(f"{item},", node, inner)]
    return [indent + opening, *middle, indent + closing.removeprefix(",")]


def _items(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """The arguments of a call or the items of a display, as text and as nodes; of a pair, the node of its value."""
    if isinstance(node, ast.Dict):
        keys = [f"{_text(key)}: " if key else "**" for key in node.keys]
        return [(key + _text(value), value) for key, value in zip(keys, node.values, strict=True)]
    items = [*node.args, *node.keywords] if isinstance(node, ast.Call) else getattr(node, "elts", [])
    return [(_text(item), item) for item in items]


def docstring_lines(paragraphs: Iterable[str], indent: str = "") -> list[str]:
    """A docstring; nothing in the paragraphs can end it."""
    room = WIDTH - len(indent) - 3
    lines = [line for text in paragraphs for line in wrap(text, room, subsequent_indent="  ") or [""]]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"', '\\"')
    end = '\n"""' if len(lines) > 1 else '"""'
    return indented(f'"""{text}{end}', indent).split("\n")
