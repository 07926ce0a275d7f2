"""Statements: code with the context that it is in, and the lines that many of them come to."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch

from penstock.codegen.layout import WIDTH, Chain, Code, call, lines, named, quoted
from penstock.ir import CallContext

USUAL = CallContext()


@dataclass(frozen=True)
class Statement:
    """One statement, the context that it is in, and what is remarked beside and above it."""

    code: Code
    context: CallContext = USUAL
    remark: str = ""
    heading: str = ""


def body(statements: Iterable[Statement], indent: str) -> list[str]:
    """The lines of statements; those in one context are in one `with`."""
    found: list[str] = []
    for context, group in groupby(statements, key=lambda statement: statement.context):
        inner = indent
        if context != USUAL:
            found += lines(_with(context), indent)
            inner += "    "
        for statement in group:
            found += _lines(statement, inner)
    return found


def _lines(statement: Statement, indent: str) -> list[str]:
    heading = [f"{indent}# {statement.heading}"] if statement.heading else []
    written = lines(statement.code, indent)
    if not statement.remark:
        return [*heading, *written]
    beside = f"{written[-1]}  # {statement.remark}"
    if len(beside) <= WIDTH:
        return [*heading, *written[:-1], beside]
    return [*heading, *written]


def _with(context: CallContext) -> Code:
    contexts: list[Code] = []
    if context.grad is not None:
        contexts.append("torch.enable_grad()" if context.grad else "torch.no_grad()")
    if context.autocast is not None:
        device, enabled, dtype = context.autocast
        kind = getattr(torch, dtype.removeprefix("torch."))
        options: list[Code] = [quoted(device), named("dtype", str(kind))]
        options += [] if enabled else [named("enabled", "False")]
        contexts.append(call("torch.autocast", options))
    first, *rest = contexts
    return Chain(("with ", first, *(piece for context in rest for piece in (", ", context)), ":"))
