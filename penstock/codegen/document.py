"""The Python file of a model's stages: support code, one class per stage, and `run`, which calls them all."""

import inspect
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import Captured
from penstock.codegen import support
from penstock.codegen.expressions import ConstantTensors, Expressions, access, dict_of, expect, list_of, tuple_of
from penstock.codegen.formatting import INDENT, body_lines, docstring_lines, return_lines, statement_lines
from penstock.codegen.names import Imports, Names, is_identifier, is_plain_path, name_values
from penstock.codegen.section import Section, sections
from penstock.codegen.statements import Statement, StepWriter
from penstock.ir import Graph, Partition, Placement, counted, flatten_one_level, write_atomic
from penstock.stages import Ownership, check_guards


def write_stages(captured: Captured, partition: Partition, placement: Placement, path: str | Path) -> Path:
    """Write the stages of a captured model as a Python file that can be read, imported and run by hand.

    Large constant tensors go to a safetensors file beside it.

    Raises:
        CodeError: if the model uses an object that has no importable name; nothing is written then
    """
    path = Path(path)
    constants_path = path.with_name(f"{path.stem}_constants.safetensors")
    text, constants = stage_document(captured, partition, placement, constants_path)
    if constants:
        # The code contains the digest of its constants: if only one of the two files gets written, importing it fails.
        write_atomic(constants_path, constants)
    write_atomic(path, text)
    return path


def stage_document(
    captured: Captured, partition: Partition, placement: Placement, constants_path: Path
) -> tuple[str, bytes]:
    """The text of the file of stages, and the bytes of the file at `constants_path`, empty without constants."""
    # The model may be in another mode (training or evaluation) than when the example was recorded first.
    recording = captured.recording(*captured.example)
    graph = recording.graph
    partition = Ownership(captured.graph, partition).fit(graph)
    check_guards(recording, partition)
    names, tensors = Names(), ConstantTensors()
    variables, imports = name_values(recording, names), Imports(names)
    stages = []
    for section in sections(captured, recording, partition):
        expressions = Expressions(recording, variables, section.blocks, imports, tensors)
        stages.append(StageClass(section, expressions, names, placement[section.stage]))
    # Imports and constants are known only after all code has been written.
    classes = [stage.lines() for stage in stages]
    run = _run_lines(captured, stages, Expressions(recording, variables, (), imports, tensors))
    load_constants = tensors.statement(constants_path)
    settings = [
        f"PLACEMENT = {placement.ranks!r}  # the rank of each stage",
        *statement_lines(f"TIED = {graph.tied!r}"),
        *statement_lines(f"STAGES = {tuple_of(stage.name for stage in stages)}"),
    ]
    written = "\n".join(line for lines in (*classes, run) for line in lines)
    definitions: list[Any] = [support.Part, support.Stage, support.expect, support.arguments, support.is_default]
    definitions += [each for each in (support.with_attributes, support.with_arguments) if each.__name__ in written]
    definitions += [support.constants] if load_constants else []
    blocks = [inspect.getsource(definition).rstrip().splitlines() for definition in definitions]
    blocks += [statement_lines(load_constants)] if load_constants else []
    body = "\n\n\n".join("\n".join(block) for block in (*blocks, *classes, settings, run))
    others = ["from torch import Tensor, nn", *imports.lines]
    others += ["from torch.nn import functional"] if "functional." in body else []
    others += ["from safetensors.torch import load"] if load_constants else []
    import_lines = [
        *(["import hashlib", "import inspect", "from pathlib import Path"] if load_constants else ["import inspect"]),
        "from typing import Any, ClassVar",
        "",
        "import torch",
        *sorted(others, key=lambda line: line.split()[1]),
    ]
    head = [
        *docstring_lines(_header(graph, captured.model, stages)),
        "",
        *import_lines,
        "",
        f"TRAINING = {captured.model.training}",
        *statement_lines(f"HOME = {recording.device!r}"),
    ]
    return "\n".join((*head, "", "", body, "")), tensors.content


@dataclass(frozen=True)
class StageClass:
    """The class of one stage."""

    section: Section
    expressions: Expressions
    names: Names
    rank: int

    @property
    def name(self) -> str:
        """The name of the class."""
        return f"Stage{self.section.stage}"

    @property
    def parameters(self) -> list[str]:
        """The parameters of `forward`: inputs of the model, then values from other stages."""
        return self._variables((*self.section.inputs, *self.section.receives))

    @property
    def returned(self) -> list[str]:
        """The variables that `forward` returns, unless it is the last stage."""
        return self._variables(self.section.sends)

    def _variables(self, values: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self.expressions.variables[name] for name in values))

    def lines(self) -> list[str]:
        """The text of the class."""
        section, variables = self.section, self.expressions.variables
        graph = section.recording.graph
        reads_sizes = bool(section.recording.record.size_reads)
        takes = {}
        for value in (*section.inputs, *section.receives):
            spec = graph.spec(value)
            # If the model read no size at all, any size is right.
            sizes = spec.shape if reads_sizes else (None,) * len(spec.shape)
            takes[variables[value]] = f"(torch.{spec.dtype}, {tuple(sizes)!r})"
        tables = {
            "PARTS": repr(section.parts),
            "TAKES": dict_of(map(repr, takes), takes.values()),
            "RECEIVES": repr({variables[value]: stage for value, stage in section.receives.items()}),
            "SENDS": repr({variables[value]: stages for value, stages in section.sends.items()}),
        }
        # A value in the memory of a buffer is copied, as the next forward writes the buffer.
        copied = {name for name in section.recording.state_views if name in graph.makers}
        expressions = replace(self.expressions, copied=copied)
        if section.is_last:
            result = expressions.argument(section.recording.record.outputs, "the output of the model")
        else:
            sent = {variables[name]: expressions.variable(name) for name in section.sends}
            result = ", ".join(sent.values()) or "None"
        # A call has the form of the signature, so that a long one is broken in the same way.
        signature = statement_lines(f"forward({', '.join(('self', *self.parameters))})", INDENT)
        signature[0] = signature[0].replace("forward", "def forward", 1)
        return [
            f"class {self.name}(Stage):",
            *docstring_lines(self._description(), INDENT),
            "",
            *(line for name, table in tables.items() for line in statement_lines(f"{name} = {table}", INDENT)),
            "",
            *signature[:-1],
            f"{signature[-1]}:",
            *body_lines(self._statements(), 2 * INDENT),
            *return_lines(result, 2 * INDENT),
        ]

    def _description(self) -> list[str]:
        """The docstring: the values that cross, with their types and shapes."""
        section = self.section
        found = [f"Stage {section.stage} of {section.num_stages}, on rank {self.rank}.", ""]
        found += [f"In: {self._shown(name)}, an input of the model" for name in section.inputs]
        for name, stage in section.receives.items():
            found.append(f"In: {self._shown(name)}, from stage {stage}{self._maker(name)}")
        for name, stages in section.sends.items():
            word = "stages" if len(stages) > 1 else "stage"
            found.append(f"Out: {self._shown(name)}, to {word} {', '.join(map(str, stages))}{self._maker(name)}")
        if section.is_last:
            found.append("Out: the output of the model")
        if section.num_rerun:
            found.append(f"Rerun: {counted(section.num_rerun, 'call')} of other stages that depend on inputs only")
        return found

    def _shown(self, value: str) -> str:
        return f"{self.expressions.variables[value]}, {self.section.recording.graph.spec(value)}"

    def _maker(self, value: str) -> str:
        maker = self.section.recording.graph.makers[value].name
        return f", made by {maker}" if is_plain_path(maker) else ""

    def _statements(self) -> Iterator[Statement]:
        """The body of `forward` up to its return."""
        section = self.section
        if self.parameters:
            yield Statement(f"self.check({', '.join(f'{name}={name}' for name in self.parameters)})")
        # Several stages may write into an input, and the caller's tensor must stay as it is.
        for name in self._variables(name for name in section.inputs if name in section.recording.graph.written):
            yield Statement(f"{name} = {name}.clone()")
        read = set(self._variables((*section.read, *section.sends)))
        yield from StepWriter(self.expressions, self.names, read).statements(section.steps)


# -------------------------------------------------------------------------------------------------------------- run


def _run_lines(captured: Captured, stages: Sequence[StageClass], expressions: Expressions) -> list[str]:
    """The function that takes the arguments of the model and runs all stages."""
    purpose = "Run all stages, called like the model; returns the output of the model."
    lines = ["def run(model, /, *args, **kwargs):", *docstring_lines([purpose], INDENT)]
    args, kwargs = captured.recorded_example
    recorded = support.arguments(captured.model, args, kwargs)
    # Arguments that capture added to those of the caller, such as use_cache=False.
    added = {name: value for name, value in kwargs.items() if name not in captured.example[1]}
    extra = "".join(f"{name!r}: {_constant(value, name, expressions)}, " for name, value in added.items())
    statements = [f"given = arguments(model, args, {f'{{{extra}**kwargs}}' if added else 'kwargs'})"]
    statements.append(expect("sorted(given)", repr(sorted(recorded)), "the list of arguments"))
    needed = {name for stage in stages for name in stage.section.inputs}
    for name, value in recorded.items():
        statements += _unpack_argument(f"given[{name!r}]", name, value, needed, expressions)
    for stage in stages[:-1]:
        returned = f"{', '.join(stage.returned)} = " if stage.returned else ""
        statements.append(f"{returned}{stage.name}(model)({', '.join(stage.parameters)})")
    lines += [line for statement in statements for line in statement_lines(statement, INDENT)]
    return [*lines, *return_lines(f"{stages[-1].name}(model)({', '.join(stages[-1].parameters)})", INDENT)]


def _unpack_argument(code: str, name: str, value: Any, needed: set[str], expressions: Expressions) -> Iterator[str]:
    """Assign the tensors of an argument to their variables; everything else must equal the recorded argument."""
    if isinstance(value, Tensor):
        if name in needed:
            yield f"{expressions.variable(name)} = {code}"
        return
    parts = flatten_one_level(value)
    if parts is None:
        yield expect(code, _constant(value, name, expressions), name)
        return
    if issubclass(parts.kind, Mapping):
        keys = list_of(_constant(key, name, expressions) for key in parts.keys)
        yield expect(f"list({code})", keys, f"the keys of {name}")
    elif issubclass(parts.kind, list | tuple):
        yield expect(f"len({code})", str(len(parts.items)), f"the length of {name}")
    for key, item in zip(parts.keys, parts.items, strict=True):
        inner = access(code, parts.kind, key, _constant(key, name, expressions))
        yield from _unpack_argument(inner, f"{name}.{key}", item, needed, expressions)


def _constant(value: Any, name: str, expressions: Expressions) -> str:
    if isinstance(value, torch.device):  # outside of a stage there is no self.device
        return f"torch.device({str(value)!r})"
    return expressions.constant(value, f"the argument {name}")


# ------------------------------------------------------------------------------------------ the rest of the file


def _header(graph: Graph, model: nn.Module, stages: Sequence[StageClass]) -> list[str]:
    kind = type(model).__name__ if is_identifier(type(model).__name__) else "A model"
    mode = "training" if model.training else "evaluation"
    versions = f"torch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}"
    summary = []
    for stage in stages:
        result = "the output of the model" if stage.section.is_last else ", ".join(stage.returned) or "nothing"
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
