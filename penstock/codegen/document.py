"""The Python file of a model's stages: support code, one class per stage, and `run`, which calls them all."""

import hashlib
import inspect
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from penstock.capture import Captured, contiguous_entries, structure_with_names
from penstock.codegen import support
from penstock.codegen.expressions import Expressions, tuple_of
from penstock.codegen.formatting import INDENT, docstring_lines, statement_lines
from penstock.codegen.names import Names, is_identifier, name_values
from penstock.codegen.stage_class import StageClass
from penstock.codegen.statements import StatementWriter, expect
from penstock.ir import Graph, Partition, Placement, counted, write_atomic
from penstock.stages import Ownership, check_guards


def write_stages(captured: Captured, partition: Partition, placement: Placement, path: str | Path) -> Path:
    """Write the stages of a captured model as a Python file that can be read, imported and run by hand.

    Large constant tensors go to a safetensors file beside it.

    Raises:
        CodeError: if the model uses an object that has no importable name; nothing is written then
    """
    path = Path(path)
    # The model may be in another mode (training or evaluation) than when the example was recorded first.
    recording = captured.recording(*captured.example)
    graph = recording.graph
    partition = Ownership(captured.graph, partition).fit(graph)
    check_guards(recording, partition)
    names = Names()
    blocks = {*(node.module for node in graph.nodes if node.is_block), *captured.uncalled_blocks()}
    expressions = Expressions(recording, name_values(recording, names), names, blocks)
    stages = [StageClass(captured, partition, placement, expressions, n) for n in range(partition.num_stages)]
    # Imports and constants are known only after all code has been written.
    classes = [stage.lines() for stage in stages]
    run = _run_lines(captured, stages, replace(expressions, device="torch.device(HOME)"))
    tensors = enumerate(expressions.constants.values())
    constants = {f"constant{n}": contiguous_entries(tensor).cpu() for n, tensor in tensors}
    content, constants_path = save(constants), path.with_name(f"{path.stem}_constants.safetensors")
    # The code contains the digest of its constants: if only one of the two files gets written, importing it fails.
    digest = hashlib.sha256(content).hexdigest()
    load_constants = statement_lines(f"CONSTANTS = constants({constants_path.name!r}, {digest!r})")
    settings = [
        f"PLACEMENT = {placement.ranks!r}  # the rank of each stage",
        *statement_lines(f"TIED = {graph.tied!r}"),
        *statement_lines(f"STAGES = {tuple_of(stage.name for stage in stages)}"),
    ]
    sections = [*([load_constants] if constants else []), *classes, settings, run]
    written = "\n\n\n".join("\n".join(lines) for lines in sections)
    optional = (support.with_attributes, support.with_arguments, support.constants)
    used = [each for each in optional if f"{each.__name__}(" in written]
    definitions = (support.Part, support.Stage, support.expect, support.arguments, *used)
    copied = [inspect.getsource(definition).rstrip() for definition in definitions]
    head = [
        *docstring_lines(_header(graph, captured.model, stages)),
        "",
        "import inspect",
        "from typing import Any, ClassVar",
        "",
        "import torch",
        *sorted(["from torch import Tensor, nn", *names.import_lines], key=lambda line: line.split()[1]),
        "",
        f"TRAINING = {captured.model.training}",
        *statement_lines(f"HOME = {recording.device!r}"),
    ]
    if constants:
        write_atomic(constants_path, content)
    write_atomic(path, "\n\n\n".join(("\n".join(head), *copied, written)) + "\n")
    return path


def _header(graph: Graph, model: nn.Module, stages: Sequence[StageClass]) -> list[str]:
    """The docstring of the file."""
    kind = type(model).__name__ if is_identifier(type(model).__name__) else "A model"
    mode = "training" if model.training else "evaluation"
    versions = f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    summary = []
    for stage in stages:
        result = "the output of the model" if stage.is_last else ", ".join(stage.returned) or "nothing"
        summary.append(f"- rank {stage.rank}: {stage.name}({', '.join(stage.parameters)}) -> {result}")
    return [
        f"{kind} in {counted(len(stages), 'stage')}, one class each, in plain PyTorch.",
        "",
        *summary,
        "",
        "Stage0(model) shares its modules and parameters with the model; the state dicts of all stages together",
        "have the keys of the model. run(model, ...) is called like the model, runs the stages one after another",
        f"and returns the output of the model. The code is the forward as it was recorded once, in {mode} mode.",
        "Values that the model used for decisions, such as sizes, are checked (ValueError).",
        "",
        f"Written for the graph {graph.fingerprint[:16]} with {versions}.",
    ]


def _run_lines(captured: Captured, stages: Sequence[StageClass], expressions: Expressions) -> list[str]:
    """The function that takes the arguments of the model and runs all stages."""
    args, kwargs = captured.recorded_example
    recorded = support.arguments(captured.model, args, kwargs)
    # Arguments that capture added to those of the caller, such as use_cache=False.
    added = {name: value for name, value in kwargs.items() if name not in captured.example[1]}
    extra = "".join(f"{name!r}: {expressions.expression(value, name)}, " for name, value in added.items())
    statements = [f"given = arguments(model, args, {f'{{{extra}**kwargs}}' if added else 'kwargs'})"]
    statements.append(expect("sorted(given)", repr(sorted(recorded)), "the list of arguments"))
    read = {name: expressions.variables[name] for stage in stages for name in stage.inputs}
    # Every argument that is not a tensor must be the recorded one.
    writer = StatementWriter(expressions, read, is_checked=lambda _: True)
    for name, value in recorded.items():
        named = structure_with_names(value, lambda _, path: path, name)
        statements += writer.unpack(f"given[{name!r}]", named, name)
    for stage in stages:
        result = "return " if stage.is_last else f"{', '.join(stage.returned)} = " if stage.returned else ""
        statements.append(f"{result}{stage.name}(model)({', '.join(stage.parameters)})")
    return [
        "def run(model, /, *args, **kwargs):",
        *docstring_lines(["Run all stages, called like the model; returns the output of the model."], INDENT),
        *(line for statement in statements for line in statement_lines(statement, INDENT)),
    ]
