"""Formats generated statements: parses them, writes them with `ast.unparse`, breaks lines and adds comments."""

import ast
import io
import tokenize
from collections.abc import Iterable
from itertools import groupby
from textwrap import wrap

import torch

from penstock.codegen.statements import NO_CONTEXT, Statement

WIDTH = 120
INDENT = "    "


def expression_text(node: ast.expr) -> str:
    """The expression on one line, with double quotes and short exponents, as formatters write them."""
    code = ast.unparse(node)
    pieces, last = [], 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        text = token.string
        if token.type == tokenize.STRING and text.startswith("'") and '"' not in text and "\\'" not in text:
            text = f'"{text[1:-1]}"'
        elif token.type == tokenize.NUMBER:
            text = text.replace("e+", "e")
        # Strings are written with escapes, so all tokens are on the first line.
        if text != token.string:
            pieces += [code[last : token.start[1]], text]
            last = token.end[1]
    return "".join(pieces) + code[last:]


def statement_lines(code: str, indent: str = "") -> list[str]:
    """The statement on as few lines as it needs, without redundant parentheses."""
    # Exactly one statement: whatever names a model has, they cannot add another.
    (node,) = ast.parse(code).body
    if isinstance(node, ast.Assign):
        (target,) = node.targets
        return _lines(node.value, indent, f"{_tuple_text(target)} = ")
    if isinstance(node, ast.AugAssign):
        operator = ast.unparse(node).removeprefix(ast.unparse(node.target)).split()[0]
        return _lines(node.value, indent, f"{expression_text(node.target)} {operator} ")
    assert isinstance(node, ast.Expr)
    return _lines(node.value, indent)


def return_lines(code: str, indent: str) -> list[str]:
    """A `return` of an expression."""
    node = ast.parse(code, mode="eval").body
    text = f"{indent}return {_tuple_text(node)}"
    return [text] if len(text) <= WIDTH else _lines(node, indent, "return ")


def _tuple_text(node: ast.expr) -> str:
    """An expression; a tuple of several items without its parentheses."""
    if isinstance(node, ast.Tuple) and len(node.elts) > 1:
        return ", ".join(map(expression_text, node.elts))
    return expression_text(node)


def _lines(node: ast.expr, indent: str, before: str = "", after: str = "") -> list[str]:
    """An expression between two texts, broken at its outermost brackets if it is too long for a line."""
    text = f"{indent}{before}{expression_text(node)}{after}"
    if len(text) <= WIDTH:
        return [text]
    if isinstance(node, ast.Call):
        opening, closing = f"{expression_text(node.func)}(", ")"
        keywords = [(f"{keyword.arg}=" if keyword.arg else "**", keyword.value) for keyword in node.keywords]
        items = [*(("", item) for item in node.args), *keywords]
    elif isinstance(node, ast.Tuple | ast.List):
        opening, closing = "()" if isinstance(node, ast.Tuple) else "[]"
        items = [("", item) for item in node.elts]
    elif isinstance(node, ast.Dict):
        opening, closing = "{}"
        pairs = zip(node.keys, node.values, strict=True)
        items = [(f"{expression_text(key)}: " if key else "**", value) for key, value in pairs]
    else:
        return [text]
    if not items:
        return [text]
    inner = indent + INDENT
    together = inner + ", ".join(f"{prefix}{expression_text(item)}" for prefix, item in items)
    if isinstance(node, ast.Call) and len(together) <= WIDTH:
        middle = [together]
    else:
        middle = [line for prefix, item in items for line in _lines(item, inner, prefix, ",")]
    return [f"{indent}{before}{opening}", *middle, f"{indent}{closing}{after}"]


def body_lines(statements: Iterable[Statement], indent: str) -> list[str]:
    """The lines of statements; consecutive ones of one context share a `with`."""
    found: list[str] = []
    for context, group in groupby(statements, key=lambda statement: statement.context):
        inner = indent
        if context != NO_CONTEXT:
            managers = []
            if context.grad is not None:
                managers.append("torch.enable_grad()" if context.grad else "torch.no_grad()")
            if context.autocast is not None:
                device, is_enabled, dtype = context.autocast
                kind = getattr(torch, dtype.removeprefix("torch."))
                enabled = "" if is_enabled else ", enabled=False"
                managers.append(f'torch.autocast("{torch.device(device)}", dtype={kind}{enabled})')
            found.append(f"{indent}with {', '.join(managers)}:")
            inner += INDENT
        for statement in group:
            if statement.heading:
                found.append(f"{inner}# {statement.heading}")
            lines = statement_lines(statement.code, inner)
            beside = f"{lines[-1]}  # {statement.comment}"
            found += [*lines[:-1], beside if statement.comment and len(beside) <= WIDTH else lines[-1]]
    return found


def docstring_lines(paragraphs: Iterable[str], indent: str = "") -> list[str]:
    """A docstring; nothing in the paragraphs can end it."""
    room = WIDTH - len(indent) - 3
    folded = [line for text in paragraphs for line in wrap(text, room, subsequent_indent="  ") or [""]]
    for place, line in enumerate(folded):
        if "\\" in line or '"""' in line or line.endswith('"'):
            folded[place] = line.replace("\\", "\\\\").replace('"', '\\"')
    first, *rest = folded
    if not rest:
        return [f'{indent}"""{first}"""']
    return [f'{indent}"""{first}', *(f"{indent}{line}" if line else "" for line in rest), f'{indent}"""']
