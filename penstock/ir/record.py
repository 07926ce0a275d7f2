"""Record: one forward of a model as a list of calls on named values.

A record holds no tensor, module or function. Modules and parameters go by their original names; functions, classes and
constants that text cannot hold go by keys into a *live* table that travels beside the record.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Ref:
    """A value: an input of the model, or what an earlier call made."""

    value: str


@dataclass(frozen=True, slots=True)
class State:
    """A parameter or buffer, by its original name."""

    name: str


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Something kept in the live table."""

    key: str


@dataclass(frozen=True, slots=True)
class Container:
    """A container: the key of its class in the live table, its keys, its items."""

    kind: str
    keys: tuple["Tree", ...]
    items: tuple["Tree", ...]


Tree: TypeAlias = Ref | State | ObjectRef | Container | bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class CallContext:
    """How a call differs from the model's surroundings: None where it does not.

    `grad` is whether gradients were recorded; `autocast` the (device type, enabled, dtype name) in force.
    """

    grad: bool | None = None
    autocast: tuple[str, bool, str] | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """What a call returns: the names of its tensors from left to right, and a line that tells all else.

    The line has classes, keys, numbers and texts, and a star for every tensor: the record holds only while it comes
    out the same. `updates` are pairs (value, buffer): what the call wrote into the buffer is read as the value from
    then on.
    """

    values: tuple[str, ...]
    structure: str = "*"
    updates: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module or function.

    `writes` are pairs (new name, old name) of values that it changed in place: the tensor is the same, what it holds
    is not.
    """

    name: str
    target: str
    is_module: bool
    args: Tree
    kwargs: Tree
    results: Results
    writes: tuple[tuple[str, str], ...] = ()
    context: CallContext = CallContext()


@dataclass(frozen=True, slots=True)
class Guard:
    """A Python value that the model read from a tensor: the record holds only while it comes out the same."""

    name: str
    target: str
    args: Tree
    kwargs: Tree
    expected: str
    """key of the expected result in the live table"""
    scope: str
    """the module in whose forward it was read"""


@dataclass(frozen=True)
class Record:
    """A forward: what came in, what was called, what went out."""

    inputs: tuple[str, ...]
    steps: tuple[Call | Guard, ...]
    outputs: Tree
    sized: frozenset[str] = frozenset()
    """values whose size the model looked at: the record holds only while they have the same"""


def refs(tree: Tree) -> tuple[str, ...]:
    """The values that a tree mentions."""
    if isinstance(tree, Ref):
        return (tree.value,)
    if isinstance(tree, Container):
        return tuple(name for item in (*tree.keys, *tree.items) for name in refs(item))
    return ()


def states(tree: Tree) -> tuple[str, ...]:
    """The parameters and buffers that a tree mentions."""
    if isinstance(tree, State):
        return (tree.name,)
    if isinstance(tree, Container):
        return tuple(name for item in tree.items for name in states(item))
    return ()


def object_keys(tree: Tree) -> tuple[str, ...]:
    """The keys of what a tree mentions from the live table."""
    if isinstance(tree, ObjectRef):
        return (tree.key,)
    if isinstance(tree, Container):
        return tuple(key for item in (*tree.keys, *tree.items) for key in object_keys(item))
    return ()


def bind_state(tree: Tree, names: dict[str, str]) -> Tree:
    """The tree with parameters and buffers in the place of some values."""
    if isinstance(tree, Ref):
        return State(names[tree.value]) if tree.value in names else tree
    if isinstance(tree, Container):
        return Container(tree.kind, tree.keys, tuple(bind_state(item, names) for item in tree.items))
    return tree


def leaf_names(tree: Tree) -> tuple[str, ...]:
    """The names of the tensors among the leaves of a tree, in their order; a parameter or buffer has none, ""."""
    if isinstance(tree, Ref):
        return (tree.value,)
    if isinstance(tree, State):
        return ("",)
    if isinstance(tree, Container):
        return tuple(name for item in tree.items for name in leaf_names(item))
    return ()
