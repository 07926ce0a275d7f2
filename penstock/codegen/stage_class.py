"""Stage class: the text of the class of one stage."""

from collections.abc import Iterable

from penstock.codegen.layout import Chain, Code, call, display, docstring, lines, named, quoted
from penstock.codegen.names import Names, is_plain_path
from penstock.codegen.section import Section
from penstock.codegen.statements import Statement, body
from penstock.codegen.steps import Steps
from penstock.codegen.terms import Terms
from penstock.ir import Graph, counted, refs

_ONE, _TWO = "    ", "        "


class StageClass:
    """Writes one stage."""

    def __init__(self, section: Section, terms: Terms, names: Names, rank: int) -> None:
        self.section, self._terms, self._names, self._rank = section, terms, names, rank

    @property
    def name(self) -> str:
        """The name of the class."""
        return f"Stage{self.section.stage}"

    @property
    def taken(self) -> list[str]:
        """The variables that `forward` takes: inputs of the model, then what comes from other stages."""
        return self._variables((*self.section.inputs, *self.section.receives))

    @property
    def returned(self) -> list[str]:
        """The variables that `forward` returns, if it is not the last."""
        return self._variables(self.section.sends)

    @property
    def summary(self) -> str:
        """Where it runs, what it takes and what it returns, in a line."""
        answer = "the output of the model" if self.section.is_last else ", ".join(self.returned) or "nothing"
        return f"- rank {self._rank}: {self.name}({', '.join(self.taken)}) -> {answer}"

    @property
    def lines(self) -> list[str]:
        """The text of the class."""
        signature = Chain(("def forward", call("", ["self", *self.taken]), ":"))
        return [
            f"class {self.name}(Stage):",
            *docstring(self._description(), _ONE),
            "",
            *self._tables(),
            "",
            *lines(signature, _ONE),
            *self._forward(),
        ]

    def _variables(self, values: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self._terms.variables[name] for name in values))

    @property
    def _graph(self) -> Graph:
        return self.section.recording.graph  # type: ignore[no-any-return]

    def _description(self) -> list[str]:
        section = self.section
        found = [f"Stage {section.stage} of {section.partition.num_stages}, on rank {self._rank}.", ""]
        found += [f"In: {self._shown(name)}, an input of the model" for name in section.inputs]
        found += [
            f"In: {self._shown(name)}, from stage {stage}{self._made(name)}" for name, stage in section.receives.items()
        ]
        found += [
            f"Out: {self._shown(name)}, {_to(stages)}{self._made(name)}" for name, stages in section.sends.items()
        ]
        found += ["Out: what the model returns"] if section.is_last else []
        again = (
            f"Again: {counted(section.rerun, 'call')} of another stage, as what depends on inputs alone is never sent"
        )
        return [*found, *([again] if section.rerun else [])]

    def _shown(self, value: str) -> str:
        return f"{self._terms.variables[value]}, {self._graph.spec(value)}"

    def _made(self, value: str) -> str:
        maker = self._graph.makers[value].name
        return f", made by {maker}" if is_plain_path(maker) else ""

    def _tables(self) -> list[str]:
        section, variables = self.section, self._terms.variables
        tables: dict[str, Code] = {"PARTS": display("(", map(quoted, section.parts), ")")}
        tables["TAKES"] = _dict({variables[name]: self._taken(name) for name in (*section.inputs, *section.receives)})
        tables["RECEIVES"] = _dict({variables[name]: str(stage) for name, stage in section.receives.items()})
        tables["SENDS"] = _dict({variables[name]: repr(stages) for name, stages in section.sends.items()})
        return [line for name, table in tables.items() for line in lines(Chain((f"{name} = ", table)), _ONE)]

    def _taken(self, value: str) -> Code:
        """The type and sizes that a value must have; if the model looked at no size at all, they may be any."""
        spec = self._graph.spec(value)
        sizes = spec.shape if self.section.recording.record.sized else (None,) * len(spec.shape)
        return display("(", [f"torch.{spec.dtype}", repr(tuple(sizes))], ")")

    def _forward(self) -> list[str]:
        section, terms = self.section, self._terms
        start = [Statement(call("self.check", [named(name, name) for name in self.taken]))] if self.taken else []
        # Several stages may write into an input, and the caller's own stays as it is.
        written = self._variables(name for name in section.inputs if name in self._graph.written)
        start += [Statement(f"{name} = {name}.clone()") for name in written]
        read = set(self._variables((*section.mentioned, *section.sends)))
        statements = [*start, *Steps(terms, self._names, read).statements(section.steps)]
        return [*body(statements, _TWO), *lines(self._return(), _TWO)]

    def _return(self) -> Code:
        section, terms = self.section, self._terms
        if section.is_last:
            outputs = section.recording.record.outputs
            copied = {name: f"{terms.variables[name]}.clone()" for name in refs(outputs) if self._is_copied(name)}
            output = self._with_copies(copied).code(outputs, "the output of the model")
            return Chain(("return ", output))
        found = list(dict.fromkeys(self._leaving(name) for name in section.sends))
        return "return None" if not found else f"return {', '.join(found)}"

    def _with_copies(self, copied: dict[str, str]) -> Terms:
        terms = self._terms
        return Terms(terms.recording, {**terms.variables, **copied}, terms.leaves, terms.imports, terms.constants)

    def _leaving(self, value: str) -> str:
        return f"{self._terms.variables[value]}{'.clone()' if self._is_copied(value) else ''}"

    def _is_copied(self, value: str) -> bool:
        """Whether a value lies in the memory of a buffer that the next forward writes."""
        return value in self.section.recording.state_views and value in self._graph.makers


def _dict(pairs: dict[str, Code]) -> Code:
    return display("{", [Chain((quoted(name), ": ", item)) for name, item in pairs.items()], "}")


def _to(stages: tuple[int, ...]) -> str:
    return f"to stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
