"""Document: the whole Python file of a model's stages."""

import inspect
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penstock.codegen import support
from penstock.codegen.constants import Constants
from penstock.codegen.entry import Entry
from penstock.codegen.imports import Imports
from penstock.codegen.inert import check_inert
from penstock.codegen.layout import Chain, display, docstring, lines, quoted
from penstock.codegen.names import Names, is_plain, variables
from penstock.codegen.section import sections
from penstock.codegen.stage_class import StageClass
from penstock.codegen.terms import Terms
from penstock.ir import Graph, Partition, Placement, counted
from penstock.stages import Ownership, check_guards


@dataclass(frozen=True)
class Document:
    """The text of a file, and the tensors that it reads from a file beside it; these are mostly none."""

    text: str
    constants: bytes = b""


def document(captured: Any, partition: Partition, placement: Placement, beside: Path) -> Document:
    """The stages of a captured model as a Python file; `beside` is where its constants will be."""
    # The mode of the model may be another than when the example was recorded first.
    recording = captured.recording(*captured.example)
    partition = Ownership(captured.graph, partition).fit(recording.graph)
    check_guards(recording, partition)
    names, constants = Names(), Constants()
    variable, imports = variables(recording, names), Imports(names)
    stages = []
    for section in sections(captured, recording, partition):
        terms = Terms(recording, variable, section.leaves, imports, constants)
        stages.append(StageClass(section, terms, names, placement[section.stage]))
    # What is imported is known when all classes are written.
    classes = [stage.lines for stage in stages]
    run = Entry(captured, stages, Terms(recording, variable, (), imports, constants)).lines
    reading = constants.lines(beside)
    settings = [*_settings(recording.graph, placement), *_list_of(stages)]
    definitions = [*_support(bool(reading)), *([reading] if reading else []), *classes]
    body = "\n\n\n".join("\n".join(block) for block in (*definitions, settings, run))
    head = [*docstring(_header(recording.graph, captured.model, stages)), "", *_imports(imports, body, bool(reading))]
    recorded = [f"TRAINING = {captured.model.training}", f"HOME = {quoted(recording.device)}"]
    text = "\n".join((*head, "", *recorded, "", "", body, ""))
    check_inert(text)
    return Document(text, constants.content)


def _header(graph: Graph, model: Any, stages: Sequence[StageClass]) -> list[str]:
    kind = type(model).__name__ if is_plain(type(model).__name__) else "A model"
    mode = "training" if model.training else "evaluation"
    versions = f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    return [
        f"{kind} in {counted(len(stages), 'stage')}, one class each, in plain PyTorch.",
        "",
        *(stage.summary for stage in stages),
        "",
        "Stage0(model) takes its parts from the model, which stay the model's own; the state dicts of all stages",
        "have the model's keys. run(model, ...) is called like the model, runs the stages one after another and",
        f"returns what the model returns. This is the model's forward as it ran once, in {mode} mode, with all",
        "decisions made; what it looked at when it decided, such as sizes, is checked (ValueError).",
        "",
        f"Written for the graph {graph.fingerprint[:16]} with {versions}.",
    ]


def _imports(imports: Imports, body: str, reads: bool) -> list[str]:
    """Only what is used."""
    standard = ["import hashlib", "import inspect", "from pathlib import Path"] if reads else ["import inspect"]
    others = ["from torch import Tensor, nn"]
    others += ["from torch.nn import functional"] if "functional." in body else []
    others += ["from safetensors.torch import load"] if reads else []
    third = ["import torch", *sorted((*others, *imports.lines), key=lambda line: line.split()[1])]
    return [*standard, "from typing import Any, ClassVar", "", *third]


@cache
def _support(reads: bool) -> list[list[str]]:
    things: list[Any] = [support.Part, support.Stage, support.expect, support.arguments, support.is_default]
    things += [support.constants] if reads else []
    return [inspect.getsource(thing).rstrip().splitlines() for thing in things]


def _settings(graph: Graph, placement: Placement) -> list[str]:
    tied = [display("(", map(quoted, names), ")") for names in graph.tied]
    return [
        f"PLACEMENT = {placement.ranks!r}  # the rank of each stage",
        *lines(Chain(("TIED = ", display("(", tied, ")")))),
    ]


def _list_of(stages: Sequence[StageClass]) -> list[str]:
    return lines(Chain(("STAGES = ", display("(", [stage.name for stage in stages], ")"))))
