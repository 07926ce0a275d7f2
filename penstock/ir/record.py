"""One forward of a model as a list of calls on named values.

A record holds no tensor, module or function. Modules and parameters are named by their original names; functions,
classes and constants that text cannot hold are named by keys into an *object table* that is kept beside the record.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Ref:
    """A value: an input of the model, or the result of an earlier call."""

    value: str


@dataclass(frozen=True, slots=True)
class State:
    """A parameter or buffer, by its original name."""

    name: str


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object of the object table, by its key."""

    key: str


@dataclass(frozen=True, slots=True)
class Container:
    """A container: the key of its class in the object table, its keys, its items."""

    kind: str
    keys: tuple["Tree", ...]
    items: tuple["Tree", ...]


Tree: TypeAlias = Ref | State | ObjectRef | Container | bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class CallContext:
    """Grad mode and autocast of a call, None and empty where they are those of the whole forward.

    `autocast` has (device type, enabled, dtype name) for each device type for which it differs.
    """

    grad: bool | None = None
    autocast: tuple[tuple[str, bool, str], ...] = ()


TENSOR = "*"
"""the structure of a result that is a single tensor"""


@dataclass(frozen=True, slots=True)
class Results:
    """The result of a call: the names of its tensors from left to right, and the rest as a line of text.

    `structure` has the classes, keys, numbers and strings of the result, and a star for every tensor; the record is
    valid only as long as it stays the same. `updates` are pairs (value, buffer): the call wrote the buffer, which later
    calls read as the value.
    """

    values: tuple[str, ...]
    structure: str = TENSOR
    updates: tuple[tuple[str, str], ...] = ()


class _Step:
    """A step of a record, with arguments."""

    __slots__ = ()
    args: Tree
    kwargs: Tree

    @property
    def arg_values(self) -> tuple[str, ...]:
        """The names of the values among its arguments."""
        return (*refs(self.args), *refs(self.kwargs))

    @property
    def arg_states(self) -> tuple[str, ...]:
        """The names of the parameters and buffers among its arguments."""
        return (*states(self.args), *states(self.kwargs))

    @property
    def arg_keys(self) -> tuple[str, ...]:
        """The keys of the objects among its arguments."""
        return (*object_keys(self.args), *object_keys(self.kwargs))

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the values that must exist before it."""
        return self.arg_values

    @property
    def makes(self) -> tuple[str, ...]:
        """The names of the values that it makes; none for a guard."""
        return ()


@dataclass(frozen=True, slots=True)
class Call(_Step):
    """One call of a module or function.

    `writes` are pairs (new name, old name) of values that it changed in place: the same tensor with other contents.
    If it `changes_arguments`, it put other tensors or numbers into a container among its arguments: then `results` are
    those of the tuple (result, args, kwargs), as they are after the call.
    """

    name: str
    target: str
    is_module: bool
    args: Tree
    kwargs: Tree
    results: Results
    writes: tuple[tuple[str, str], ...] = ()
    context: CallContext = CallContext()
    changes_arguments: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the values that must exist before it: its arguments, and values that it writes in place."""
        # Not only arguments: all values that share memory with a written argument are written.
        return (*self.arg_values, *(old for _, old in self.writes))

    @property
    def makes(self) -> tuple[str, ...]:
        """The new names of values and buffers that it writes, and the names of its results; "" for state in these."""
        return (*(new for new, _ in (*self.writes, *self.results.updates)), *self.results.values)


@dataclass(frozen=True, slots=True)
class Guard(_Step):
    """A Python value that the model read from a tensor: the record is valid only as long as it stays the same."""

    name: str
    target: str
    args: Tree
    kwargs: Tree
    expected: str
    """key of the expected result in the object table"""
    scope: str
    """the module in whose forward it was read"""


@dataclass(frozen=True)
class Record:
    """A forward: its inputs, its calls and its outputs."""

    inputs: tuple[str, ...]
    steps: tuple[Call | Guard, ...]
    outputs: Tree


def refs(tree: Tree) -> tuple[str, ...]:
    """The names of the values in a tree."""
    if isinstance(tree, Ref):
        return (tree.value,)
    if isinstance(tree, Container):
        return tuple(name for item in (*tree.keys, *tree.items) for name in refs(item))
    return ()


def states(tree: Tree) -> tuple[str, ...]:
    """The names of the parameters and buffers in a tree."""
    if isinstance(tree, State):
        return (tree.name,)
    if isinstance(tree, Container):
        return tuple(name for item in tree.items for name in states(item))
    return ()


def object_keys(tree: Tree) -> tuple[str, ...]:
    """The keys of the objects in a tree."""
    if isinstance(tree, ObjectRef):
        return (tree.key,)
    if isinstance(tree, Container):
        return tuple(key for item in (*tree.keys, *tree.items) for key in object_keys(item))
    return ()


def bind_state(tree: Tree, names: dict[str, str]) -> Tree:
    """The tree with some values replaced by parameters and buffers; `names` maps values to state names."""
    if isinstance(tree, Ref):
        return State(names[tree.value]) if tree.value in names else tree
    if isinstance(tree, Container):
        return Container(tree.kind, tree.keys, tuple(bind_state(item, names) for item in tree.items))
    return tree


def leaf_names(tree: Tree) -> tuple[str, ...]:
    """The names of the tensors among the leaves of a tree, in their order; "" for a parameter or buffer."""
    if isinstance(tree, Ref):
        return (tree.value,)
    if isinstance(tree, State):
        return ("",)
    if isinstance(tree, Container):
        return tuple(name for item in tree.items for name in leaf_names(item))
    return ()
