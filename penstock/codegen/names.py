"""Names: Python names for the values of a recording, and the way from a stage to a part of the model."""

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from penstock.codegen import support
from penstock.codegen.inert import BUILT_IN
from penstock.codegen.layout import quoted
from penstock.ir import Call, Graph, Node

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_STAGE = re.compile(r"[Ss]tage[0-9]+", re.ASCII)
_LONGEST = 32
# fmt: off
_OWN = frozenset(
    {
        "self", "model", "args", "kwargs", "given", "run", "functional", "PLACEMENT", "STAGES", "TIED", "CONSTANTS",
        *vars(support),
    }
)
# fmt: on
"""what the file calls something else by"""
_KEYWORDS = frozenset((*keyword.kwlist, *keyword.softkwlist))
_TAKEN_ATTRIBUTES = frozenset((*dir(support.Stage), *support.Stage.__annotations__, "training"))
"""names that mean something else on a stage than a part of the model"""


def is_plain(name: str) -> bool:
    """Whether a name can stand in code as it is."""
    return _PLAIN.fullmatch(name) is not None and name not in _KEYWORDS


def is_plain_path(path: str) -> bool:
    """Whether a dotted name, with numbers in it, can stand in a comment as it is."""
    return all(is_plain(word) or _NUMBER.fullmatch(word) for word in path.split("."))


class Names:
    """Gives out every name once."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._numbers: Counter[str] = Counter()

    def fresh(self, wish: str, *, is_input: bool = False) -> str:
        """The wish, or something near it that is free."""
        wish = wish.strip("_")
        wish = wish[:_LONGEST].strip("_") if is_plain(wish) else "value"
        found = wish if is_input or not hasattr(builtins, wish) else f"{wish}_"
        found = found if self._is_free(found) or wish in self._used else f"{wish}_"
        while not self._is_free(found):
            self._numbers[wish] += 1
            found = f"{wish}_{self._numbers[wish] + 1}"
        self._used.add(found)
        return found

    def _is_free(self, name: str) -> bool:
        taken = name in self._used or name in _OWN or name in BUILT_IN or name in _KEYWORDS
        return not taken and not _STAGE.fullmatch(name)


def variables(recording: Any, names: Names) -> dict[str, str]:
    """A variable for every value; what is written in place stays in the variable that it was in."""
    graph: Graph = recording.graph
    found = {value.name: names.fresh(_input_wish(value.name), is_input=True) for value in graph.inputs}
    for step in recording.record.steps:
        if not isinstance(step, Call):
            continue
        found |= {new: found[old] for new, old in step.writes}
        found |= {new: names.fresh(buffer.rpartition(".")[2]) for new, buffer in step.results.updates}
        fresh = [name for name in dict.fromkeys(step.results.values) if name and name not in found]
        wish = _wish(graph[step.name])
        for place, name in enumerate(fresh):
            found[name] = names.fresh(wish if len(fresh) == 1 else f"{wish}_{place}")
    return found


def _input_wish(name: str) -> str:
    """The name of an argument, with what it is within it: `batch_0_mask`."""
    return "_".join(filter(_is_word, name.split(".")))


def _is_word(word: str) -> bool:
    """Whether a word can be a part of a Python name."""
    return is_plain(f"_{word}")


def _wish(node: Node) -> str:
    """How a reader would call what a node makes: `layers_0`, `embed_tokens`, `mul`."""
    words = node.module.split(".")
    if not node.is_leaf or not all(map(_is_word, words)):
        return node.kind.lower() if node.is_leaf else node.kind
    start = max((place for place, word in enumerate(words) if not _NUMBER.fullmatch(word)), default=-1)
    tail = words[start:] if start >= 0 else [node.kind.lower(), *words]
    return "_".join(tail)


def part_code(path: str, leaves: Collection[str]) -> str:
    """The expression for a module, parameter or buffer of a stage, some of whose modules are the model's own."""
    words = path.split(".")
    inside = next((n for n in range(1, len(words)) if ".".join(words[:n]) in leaves), len(words))
    code = "self" + "".join(map(_step, words[:inside]))
    if inside == len(words):
        return code
    # Inside a module of the model only its own names lead on.
    owner, attribute = words[inside:-1], words[-1]
    code += f".get_submodule({quoted('.'.join(owner))})" if owner else ""
    return f"{code}.{attribute}" if _is_attribute(attribute) else f"getattr({code}, {quoted(attribute)})"


def _step(word: str) -> str:
    if _NUMBER.fullmatch(word):
        return f"[{word}]"
    return f".{word}" if _is_attribute(word) and word not in _TAKEN_ATTRIBUTES else f"[{quoted(word)}]"


def _is_attribute(word: str) -> bool:
    # Python changes names that begin with two underscores inside a class.
    return is_plain(word) and not word.startswith("__")
