"""Statements: code with the mood that it is in, and the lines that many of them come to."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch

from penstock.codegen.layout import WIDTH, Chain, Code, call, lines, named, quoted
from penstock.ir import Mood

USUAL = Mood()


@dataclass(frozen=True)
class Statement:
    """One statement, the mood that it is in, and what is remarked beside and above it."""

    code: Code
    mood: Mood = USUAL
    remark: str = ""
    heading: str = ""


def body(statements: Iterable[Statement], indent: str) -> list[str]:
    """The lines of statements; those in one mood are in one `with`."""
    found: list[str] = []
    for mood, group in groupby(statements, key=lambda statement: statement.mood):
        inner = indent
        if mood != USUAL:
            found += lines(_with(mood), indent)
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


def _with(mood: Mood) -> Code:
    contexts: list[Code] = []
    if mood.grad is not None:
        contexts.append("torch.enable_grad()" if mood.grad else "torch.no_grad()")
    if mood.autocast is not None:
        device, enabled, dtype = mood.autocast
        kind = getattr(torch, dtype.removeprefix("torch."))
        options: list[Code] = [quoted(device), named("dtype", str(kind))]
        options += [] if enabled else [named("enabled", "False")]
        contexts.append(call("torch.autocast", options))
    first, *rest = contexts
    return Chain(("with ", first, *(piece for context in rest for piece in (", ", context)), ":"))
