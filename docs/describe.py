"""The names listed in reference.md with their signatures and descriptions, read from the source.

conf.py shows the fields of records with it, tests/test_reference.py checks that nothing is left undescribed, and

    python docs/describe.py

writes llms.txt: the same reference as one page of plain text.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

REFERENCE, PAGE = Path(__file__).with_name("reference.md"), Path(__file__).with_name("llms.txt")
SECTIONS = ("Args", "Returns", "Raises")
WIDTH = 120
INTRODUCTION = """\
penstock trains an ordinary PyTorch model as a pipeline over several ranks, with the loss and gradients of the unsplit
model. It records the model, cuts it into stages, orders the work of every rank, proves that the order cannot deadlock,
and predicts time and memory before the first process starts. Planning runs without processes and without a GPU.

    import torch
    from torch.nn import functional
    import penstock

    plan = penstock.plan(model, (x,), ranks=2, microbatches=4)      # x is one example batch
    assert penstock.check(model, plan, (x,), loss_fn=functional.cross_entropy, target=y).ok

    def train():                                                    # runs on every rank
        pipe = penstock.Pipeline(model, plan, loss_fn=functional.cross_entropy)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for x, y in batches:                                        # whole batches, the same call on every rank
            optimizer.zero_grad()
            loss = pipe.step(x, target=y).loss                      # forward and backward; do not call loss.backward()
            pipe.clip_grad_norm_(1.0)                               # torch's own would clip per rank
            optimizer.step()

    penstock.launch(train, 2)                                       # or: torchrun --nproc-per-node 2 script.py

Every error is a penstock.PenstockError that ends with `try:` and what to change."""


@dataclass(frozen=True)
class Description:
    """One public name: its signature as written in the source, and its docstring in parts."""

    name: str
    signature: str
    """parameters and result; empty for a property"""
    text: str
    parameters: dict[str, str]
    """the description of every parameter; empty where there is none"""
    returns: str = ""
    raises: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    """names that are described and are no parameters"""
    members: "tuple[Description, ...]" = ()


def sections(docstring: str) -> tuple[str, dict[str, str]]:
    """The text before the first section of a docstring, and each section by its name."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", docstring, flags=re.MULTILINE)
    found = zip(parts[1::2], parts[2::2], strict=True)
    return parts[0].strip(), {name: textwrap.dedent(body).strip() for name, body in found}


def entries(section: str) -> dict[str, str]:
    """The items of a section: `name: description`, further lines indented."""
    items = re.split(r"^(\*{0,2}\w+): ", section, flags=re.MULTILINE)
    return {name.lstrip("*"): _joined(text) for name, text in zip(items[1::2], items[2::2], strict=True)}


def _joined(text: str) -> str:
    return " ".join(text.split())


def field_texts(record: type) -> dict[str, str]:
    """The description below every field of a dataclass, of its bases too."""
    found: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = _definition(base).body
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = _joined(str(text.value.value))
    return found


def _definition(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def describe(name: str, thing: Any, members: tuple[str, ...] = ()) -> Description:
    """Describe a function, class, method or property."""
    text, parts = sections(inspect.getdoc(thing) or "")
    described = entries(parts.get("Args", ""))
    signature = ""
    if inspect.isclass(thing):
        names, signature, more = _constructor(thing)
        described = more | described
    elif inspect.isfunction(inspect.unwrap(thing)):
        names, signature = _parameters(_definition(inspect.unwrap(thing)))
    else:
        names = []
    inner = tuple(describe(f"{name}.{each}", _member(thing, each)) for each in members)
    parameters = {each: described.get(each, "") for each in names}
    returns, raises = _joined(parts.get("Returns", "")), entries(parts.get("Raises", ""))
    unknown = tuple(each for each in entries(parts.get("Args", "")) if each not in names)
    return Description(name, signature, text, parameters, returns, raises, unknown, inner)


def _member(owner: type, name: str) -> Any:
    value = inspect.getattr_static(owner, name)
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def _constructor(thing: type) -> tuple[list[str], str, dict[str, str]]:
    """Parameters, signature and descriptions of a class: its fields, or those of the `__init__` that it has."""
    if dataclasses.is_dataclass(thing):
        fields = [field for field in dataclasses.fields(thing) if field.init]
        written = {
            ast.unparse(each.target): each
            for base in reversed(thing.__mro__)
            if dataclasses.is_dataclass(base)
            for each in _definition(base).body
            if isinstance(each, ast.AnnAssign)
        }
        ordered = sorted(fields, key=lambda field: field.kw_only)
        words = [_field(written[field.name], field) for field in ordered]
        if stars := [place for place, field in enumerate(ordered) if field.kw_only]:
            words.insert(stars[0], "*")
        return [field.name for field in ordered], f"({', '.join(words)})", field_texts(thing)
    owner = next((base for base in thing.__mro__ if "__init__" in vars(base)), object)
    init = vars(owner)["__init__"]
    is_protocol = getattr(thing, "_is_protocol", False)
    if is_protocol or not inspect.isfunction(init) or not owner.__module__.startswith("penstock"):
        return [], "", {}
    names, signature = _parameters(_definition(init))
    documented = (getattr(each, "__doc__", "") or "" for each in (owner, init))
    found = [entries(sections(inspect.cleandoc(each))[1].get("Args", "")) for each in documented]
    return names, signature.removesuffix(" -> None"), found[0] | found[1]


def _field(written: ast.AnnAssign, field: "dataclasses.Field[Any]") -> str:
    annotation = ast.unparse(written.annotation).strip("'\"")
    if field.default is not dataclasses.MISSING:
        return f"{field.name}: {annotation} = {field.default!r}"
    return f"{field.name}: {annotation}" + ("" if field.default_factory is dataclasses.MISSING else " = ...")


def _parameters(function: ast.FunctionDef) -> tuple[list[str], str]:
    """The names of the parameters, without self, and the signature."""
    arguments = function.args
    first = [*arguments.posonlyargs, *arguments.args][:1]
    if first and first[0].arg in ("self", "cls"):
        (arguments.posonlyargs or arguments.args).pop(0)
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    # A class that is named before it is complete is quoted in the source.
    signature = f"({ast.unparse(arguments)}){result.replace(chr(39), '')}".replace("'", '"')
    return [each.arg for each in every if each], signature


def listed(page: Path = REFERENCE) -> Iterator[tuple[str, Description]]:
    """Every name of the reference, under the heading of its section."""
    heading = ""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        if found := re.match(r"\.\. auto(?:class|function|exception):: ([\w.]+)$", line):
            options = re.match(r"   :members: (.+)", lines[number + 1]) if number + 1 < len(lines) else None
            module, _, name = found[1].rpartition(".")
            members = tuple(each.strip() for each in options[1].split(",")) if options else ()
            yield heading, describe(found[1], getattr(import_module(module), name), members)


def page_text() -> str:
    """The whole reference as plain text."""
    lines = ["# penstock", "", INTRODUCTION]
    last = ""
    for heading, each in listed():
        if heading != last:
            lines += ["", f"## {heading}"]
            last = heading
        lines += ["", *_lines(each, "")]
        for member in each.members:
            lines += _lines(member, "  ")
    return "\n".join(lines) + "\n"


def _lines(each: Description, indent: str) -> Iterator[str]:
    def wrapped(text: str, first: str, more: str) -> list[str]:
        return textwrap.wrap(
            text, WIDTH, initial_indent=first, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
        )

    name = each.name if not indent else each.name.rpartition(".")[2]
    yield from wrapped(f"{name}{each.signature}", indent, f"{indent}        ")
    for number, paragraph in enumerate(each.text.split("\n\n")):
        if paragraph.startswith("    "):
            yield from (f"{indent}    {line}" for line in paragraph.splitlines())
        elif number < 2 or indent == "":
            yield from wrapped(_joined(paragraph), f"{indent}    ", f"{indent}    ")
    described = {name: text for name, text in each.parameters.items() if text}
    for part, text in (*described.items(), *((("returns", each.returns),) if each.returns else ())):
        yield from wrapped(f"{part}: {text}", f"{indent}    - ", f"{indent}      ")
    for error, text in each.raises.items():
        yield from wrapped(f"raises {error}: {text}", f"{indent}    - ", f"{indent}      ")


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
    print(PAGE)
