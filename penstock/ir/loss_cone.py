"""Loss cone: what the values of a record depend on, and which of its nodes mix the samples of a batch."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from penstock.ir.graph import Graph, Node
from penstock.ir.record import Call, Container, Guard, Record, Ref, State, Tree, refs

SAME = frozenset(("to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "neg", "negative", "pos",
                  "nan_to_num", "cpu", "cuda", "requires_grad_", "alias"))  # fmt: skip
"""functions of one number that keep it, up to its sign and precision"""
RESHAPE = frozenset(("view", "reshape", "squeeze", "unsqueeze", "flatten", "contiguous", "ravel", "expand", "getitem"))
ADD = frozenset(("add", "sub", "subtract", "radd", "rsub"))
DIVIDE = frozenset(("div", "truediv", "true_divide", "divide", "itruediv"))
_SUMMING = frozenset(("sum", "mean", "var", "std", "amax", "amin", "logsumexp", "prod", "norm", "median", "nansum",
                      "nanmean", "var_mean", "std_mean", "vector_norm"))  # fmt: skip
_SPREADING = frozenset(("softmax", "log_softmax", "softmin", "cumsum", "logcumsumexp", "normalize", "sort", "cummax"))
_MULTIPLYING = frozenset(("matmul", "mm", "einsum", "cdist", "linear", "rmatmul", "addmm"))

Read = Callable[[str], Any]
"""what a guard expects to read, by its key in the live table"""


class Cone:
    """A record, asked from the loss backwards. `known` are the inputs that are there before the step."""

    def __init__(
        self,
        record: Record,
        graph: Graph,
        known: Collection[str] | None = None,
        read: Read | None = None,
        num_samples: int | None = None,
    ) -> None:
        """`num_samples`: how many there are, if it is not the first dimension of the first input that has one."""
        self.record, self.graph, self.read = record, graph, read
        self.known_inputs = frozenset(record.inputs if known is None else known)
        self.calls = {step.name: step for step in record.steps if isinstance(step, Call)}
        first = next((value.spec.shape[0] for value in graph.inputs if value.spec.shape), 0)
        self.batch = first if num_samples is None else num_samples

    # What a value depends on

    def depends(self, value: str) -> bool:
        """Whether it depends on any input."""
        return value in self._rooted

    def varies(self, tree: Tree) -> bool:
        """Whether it is another for every microbatch: it depends on an input that is cut, or on an activation."""
        return isinstance(tree, Ref) and tree.value in self._cut

    def is_known(self, value: str) -> bool:
        """Whether it is there before the step, as it depends on known inputs only."""
        return value in self._free

    def size(self, tree: Tree) -> int:
        """How many numbers it holds."""
        if isinstance(tree, Ref):
            return math.prod(self.graph.spec(tree.value).shape)
        if isinstance(tree, State):
            state = {value.name: value.spec for value in (*self.graph.parameters, *self.graph.buffers)}
            return math.prod(state[tree.name].shape) if tree.name in state else 0
        return 1

    def maker(self, value: str) -> tuple[Node | None, Call | None]:
        """The node that makes a value and its call; an input has none."""
        node = self.graph.makers.get(value)
        return (node, self.calls[node.name]) if node else (None, None)

    def nodes_of(self, values: Iterable[str]) -> tuple[str, ...]:
        """All nodes that some values depend on, in their order."""
        found = {node.name for node in self._behind(values)}
        return tuple(node.name for node in self.graph.nodes if node.name in found)

    def first_like(self, value: str) -> str:
        """The first known value that is made by the same calls: labels may be flattened once per term."""
        return self._firsts.get(value, value)

    def near(self, value: str) -> frozenset[str]:
        """A value and all that it is made of by functions, back to the last modules."""
        found = {value}
        for node in self._behind([value], stop_at_modules=True):
            found |= {*node.reads, *(made.name for made in node.makes)}
        return frozenset(found)

    @property
    def sized(self) -> frozenset[str]:
        """The values whose size the model looked at."""
        return self.record.sized

    def counted_as(self, number: float) -> str:
        """The known value from which a Python number was read; empty if there is none."""
        if self.read is None:
            return ""
        for step in self.record.steps:
            if isinstance(step, Guard) and type(found := self.read(step.expected)) in (int, float) and found == number:
                (value,) = refs(step.args) or ("",)
                if value and self.is_known(value) and self.varies(Ref(value)):
                    return value
        return ""

    # Where samples meet

    @cached_property
    def lengths(self) -> frozenset[int]:
        """How long a first dimension of samples, or of parts of samples, may be."""
        cut = [value.spec.shape for value in self.graph.inputs if value.spec.shape[:1] == (self.batch,)]
        return frozenset(math.prod(shape[:end]) for shape in cut for end in range(1, len(shape) + 1))

    def choices(self, value: str) -> Iterator[str]:
        """The masks, and the numbers of rows, by which the rows of a value were chosen."""
        waiting, seen = [value], set[str]()
        while waiting:
            name = waiting.pop()
            node, call = self.maker(name)
            if name in seen or node is None or call is None or call.is_module:
                continue
            seen.add(name)
            index = _index(node, call)
            if isinstance(index, Ref):
                yield index.value
                continue
            rows = self.graph.spec(name).shape[:1]
            waiting += [read for read in node.reads if self.graph.spec(read).shape[:1] == rows]

    def sample_reducer(self, value: str) -> Node | None:
        """The sum or mean over samples that a value is, up to constant factors and form."""
        while True:
            node, call = self.maker(value)
            if node is None or call is None or call.is_module:
                return None
            if node.kind in ("sum", "mean") and self._mixes(node):
                return node
            varying = [tree for tree in operands(call) if self.varies(tree)]
            is_linear = node.kind in SAME | RESHAPE | DIVIDE | {"mul"}
            if not is_linear or len(varying) != 1 or not isinstance(varying[0], Ref):
                return None
            value = varying[0].value

    def statistics(self, value: str) -> tuple[Node, ...]:
        """The functions near a value, other than a plain sum over samples that it is, that mix samples."""
        reducer = self.sample_reducer(value)
        starts = reducer.reads if reducer else (value,)
        return tuple(node for node in self._behind(starts, stop_at_modules=True) if self._mixes(node))

    def mixing(self, value: str) -> tuple[Node, ...]:
        """All functions that a value depends on and in which samples act on each other."""
        return tuple(node for node in self._behind([value]) if self._mixes(node))

    def _mixes(self, node: Node) -> bool:
        """Whether a function makes of activations something that is no longer, or twice, a row per sample."""
        call = self.calls[node.name]
        is_trained = any(made.spec.requires_grad for made in node.makes)
        active = [tree.value for tree in operands(call) if isinstance(tree, Ref) and self._is_active(tree.value)]
        if call.is_module or not is_trained or not active:
            return False
        shape, made = self.graph.spec(active[0]).shape, self.graph.spec(_result(call, node)).shape
        has_rows = bool(shape) and shape[0] in self.lengths
        if node.kind in _SUMMING:
            # A single sample has rows of length one; several may have become rows of their parts.
            lengths = self.lengths if self.batch > 1 else {1}
            return has_rows and 0 in _dims(call, len(shape)) and not (made and made[0] in lengths)
        if node.kind in _SPREADING:
            return has_rows and 0 in _dims(call, len(shape))
        return node.kind in _MULTIPLYING and len(active) > 1 and self._is_product(active, made)

    def _is_product(self, active: list[str], made: tuple[int, ...]) -> bool:
        """Whether samples are multiplied with each other: a row per sample on both sides, or a sum over samples."""
        one, other = (self.graph.spec(name).shape for name in active[:2])
        if len(made) != 2 or len(one) != 2 or len(other) != 2 or self.batch < 2:
            return False
        is_square = made == (self.batch, self.batch) and self.batch in one and self.batch in other
        return is_square or (one[1] == other[0] == self.batch and self.batch not in made)

    def _is_active(self, value: str) -> bool:
        return value in self._cut and not self.is_known(value)

    # What the above is found by

    def _behind(self, values: Iterable[str], stop_at_modules: bool = False) -> Iterator[Node]:
        waiting, seen = list(values), set[str]()
        while waiting:
            node = self.graph.makers.get(waiting.pop())
            if node is None or node.name in seen or (stop_at_modules and self.calls[node.name].is_module):
                continue
            seen.add(node.name)
            yield node
            waiting += node.reads

    def _reached(self, start: Iterable[str]) -> frozenset[str]:
        found = set(start)
        for node in self.graph.nodes:
            if not found.isdisjoint(node.reads):
                found.update(made.name for made in node.makes)
        return frozenset(found)

    @cached_property
    def _rooted(self) -> frozenset[str]:
        return self._reached(self.record.inputs)

    @cached_property
    def _cut(self) -> frozenset[str]:
        # What the model made is another for every microbatch also where no dimension is the samples any more.
        inputs = self.graph.inputs
        return self._reached(
            v.name for v in inputs if v.spec.shape[:1] == (self.batch,) or v.name not in self.known_inputs
        )

    @cached_property
    def _free(self) -> frozenset[str]:
        found = set(self.known_inputs)
        for node in self.graph.nodes:
            if node.from_inputs and found.issuperset(node.reads):
                found.update(made.name for made in node.makes)
        return frozenset(found)

    @cached_property
    def _firsts(self) -> dict[str, str]:
        firsts: dict[str, str] = {}
        made: dict[object, str] = {}
        for node in self.graph.nodes:
            call = self.calls[node.name]
            if self._free.issuperset(value.name for value in node.makes) and len(node.makes) == 1 and not call.writes:
                key = (call.target, _renamed(call.args, firsts), _renamed(call.kwargs, firsts), call.context)
                firsts[node.makes[0].name] = made.setdefault(key, node.makes[0].name)
        return firsts


def _index(node: Node, call: Call) -> Tree:
    """By what a function chooses rows; None if it chooses none, or by plain numbers."""
    if node.kind == "index_select" and argument(call, 1, "dim") == 0:
        return argument(call, 2, "index")
    return operands(call)[1] if node.kind in ("getitem", "masked_select") else None


def _result(call: Call, node: Node) -> str:
    """What a function returns; what it wrote in place if it returns nothing new."""
    return next((name for name in call.results.values if name), node.makes[0].name)


def _renamed(tree: Tree, names: Mapping[str, str]) -> Tree:
    if isinstance(tree, Ref):
        return Ref(names.get(tree.value, tree.value))
    if isinstance(tree, Container):
        return Container(tree.kind, tree.keys, tuple(_renamed(item, names) for item in tree.items))
    return tree


def operands(call: Call) -> tuple[Tree, ...]:
    """The positional arguments of a call, then those given by name."""
    args = call.args.items if isinstance(call.args, Container) else ()
    kwargs = call.kwargs.items if isinstance(call.kwargs, Container) else ()
    return (*args, *kwargs)


def argument(call: Call, place: int, name: str) -> Tree:
    """An argument by its name or place; None if it is not given. A place below 0: only by name."""
    if isinstance(call.kwargs, Container) and name in call.kwargs.keys:
        return call.kwargs.items[call.kwargs.keys.index(name)]
    args = call.args.items if isinstance(call.args, Container) else ()
    return args[place] if 0 <= place < len(args) else None


def _dims(call: Call, num_dims: int) -> frozenset[int]:
    """The dimensions over which a function goes: all if it names none."""
    found = next((tree for name in ("dim", "axis") if (tree := argument(call, 1, name)) is not None), None)
    listed = found.items if isinstance(found, Container) else (found,)
    dims = [tree for tree in listed if type(tree) is int]
    return frozenset(dim % num_dims for dim in dims) if dims else frozenset(range(num_dims))
