"""Recorder: sees one forward happen and writes down every call between leaves."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.capture.attributes import kept_objects
from penstock.capture.book import Book, memory_of
from penstock.capture.expected import Expected
from penstock.capture.hooks import refuse_backward_hooks
from penstock.capture.metadata import is_gradient, is_metadata, is_size, is_writing
from penstock.capture.moods import Moods
from penstock.capture.structure import TENSOR, answer_of, opaque_leaves, structure_of
from penstock.capture.trees import Apply, Trees, short_name
from penstock.capture.watch import Watch, draws_without_numbers, is_given_generator
from penstock.errors import CaptureError
from penstock.ir import ADDED_LOSS, Call, Guard, Ref, Results, State, bind_state, leaves, transform

_EFFECTS = frozenset(
    ("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "detach_", "requires_grad_")
)
"""calls that make nothing and matter all the same: like a write, they belong to the tensor"""
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class OpenLeaf(Exception):  # noqa: N818
    """A tensor entered or left a leaf other than by arguments and results: the leaf must be opened."""

    def __init__(self, leaf: str, maker: str = "") -> None:
        super().__init__(leaf)
        self.leaf = leaf
        self.maker = maker
        """the leaf in which the tensor was made, if it is another one"""


@dataclass(frozen=True)
class Note:
    """What is known of a call besides the call itself."""

    scope: str
    kind: str
    is_random: bool
    written_state: tuple[str, ...]
    adds_loss: bool = False
    takes_gradients: bool = False


@dataclass
class Leaf:
    """The call that runs now: the leaf's name, the tensors that it was given, and its own state if it is a module."""

    name: str
    given: set[int]
    own: set[int] | None = None
    draws: bool = False
    adds_loss: bool = False
    takes_gradients: bool = False
    wrote: set[int] = field(default_factory=set)
    """the memory of what it wrote in place"""
    number: int = field(default_factory=count().__next__)
    """tells apart the calls of one leaf"""


_WRITING = Leaf("", set())
"""in place of a leaf while the recorder itself uses torch"""


@dataclass
class Page:
    """What a recorder has written so far."""

    steps: list[Call | Guard] = field(default_factory=list)
    notes: dict[str, Note] = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)
    sized: set[str] = field(default_factory=set)
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    failed: tuple[BaseException | None, str] = (None, "")
    """what went wrong and the innermost module in whose forward it did"""
    objects: dict[int, Any] = field(default_factory=dict)
    """those that modules held before the forward, by identity"""
    answers: dict[str, Any] = field(default_factory=dict)
    """what the calls returned that returned no single tensor, by name"""

    def fresh(self, name: str) -> str:
        """The name, or the name with a number if it was used before."""
        self.used[name] += 1
        return name if self.used[name] == 1 else f"{name}@{self.used[name]}"


class Recorder(TorchFunctionMode):
    """A mode that sees torch functions, and a handler that sees calls of modules."""

    def __init__(self, model: nn.Module, leaf_names: set[str]) -> None:
        super().__init__()
        self.book = Book(model)
        self.trees = Trees(self._named)
        self.page = Page(objects=kept_objects(model.modules()))
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.leaf_names = leaf_names
        self.scopes: list[str] = []
        self.leaf: Leaf | None = None
        self.moods = Moods()

    # What is seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.leaf is _WRITING:
            return func(*args, **kwargs)
        self._keep_state(func, args)
        if self.leaf is not None:
            return self._inside_leaf(func, args, kwargs)
        if is_metadata(func):
            self._note_size(func, args)
            if is_gradient(func) and id(args[0]) in self.book.state:
                raise self._refused("the model reads the gradient of a parameter between its blocks", func)
            return func(*args, **kwargs)
        if func in _GRADIENTS:
            raise self._refused("the model takes gradients between its blocks, where a cut would take them apart", func)
        return self._outside(func, func, args, kwargs)

    def _refused(self, problem: str, func: Any) -> CaptureError:
        return CaptureError(
            problem,
            module=(self.scopes[-1] if self.scopes else "") or "the model",
            function=short_name(func),
            hint="keep the module that does so whole (basic_blocks)",
        )

    def _keep_state(self, func: Any, args: Any) -> None:
        """Before a parameter or plain tensor of the model is written in place, keep what it held."""
        if not is_writing(func) or not args or not isinstance(args[0], Tensor):
            return
        if self.leaf is not None:
            self.leaf.wrote.add(memory_of(args[0]))
        if id(args[0]) in self.book.state:
            self.page.kept.setdefault(id(args[0]), (args[0], args[0].detach().clone()))

    def _note_size(self, func: Any, args: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)] if is_size(func) else ()
        self.page.sized.update(name for tensor in tensors if (name := self.book.name(tensor)))

    def module_called(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is called: a leaf is one call, any other module is a scope. The innermost that fails is noted."""
        path = self.paths.get(id(module))
        try:
            return self._module_called(path, module, original, args, kwargs)
        except Exception as error:
            if path is not None and self.page.failed[0] is not error:
                self.page.failed = (error, path)
            raise

    def _module_called(
        self, path: str | None, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self.leaf is not None or path is None or (self.scopes and self.scopes[-1] == path):
            return original(module, *args, **kwargs)
        if path not in self.leaf_names:
            refuse_backward_hooks(module, path)
            self.scopes.append(path)
            try:
                return original(module, *args, **kwargs)
            finally:
                self.scopes.pop()

        def run(*given: Any, **named: Any) -> Any:
            return original(module, *given, **named)

        return self._outside(run, module, args, kwargs)

    def apply_called(self, cls: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An autograd function is applied: one call; a recomputation is only looked through."""
        if self.leaf is not None:
            return self._inside_leaf(self.moods.within(original), args, kwargs)
        if cls.__name__ == "CheckpointFunction":
            # Where nothing that goes in needs a gradient, nothing that comes out has one.
            needs_gradient = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args[2:])
            with torch.set_grad_enabled(needs_gradient and torch.is_grad_enabled()):
                return args[0](*args[2:])
        original = self.moods.within(original)
        return self._outside(original, Apply(cls), args, kwargs)

    def script_called(self, function: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A scripted function is called: one call."""
        if self.leaf is not None:
            return self._inside_leaf(run, args, kwargs)
        return self._outside(run, function, args, kwargs)

    # What is written down

    def _outside(self, run: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        self.moods.refuse_others(self.scopes[-1] if self.scopes else "")
        self.leaf = _WRITING
        try:
            return self._written(run, target, args, kwargs)
        finally:
            self.leaf = None

    def _written(self, run: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        is_module = isinstance(target, nn.Module)
        name, scope = self._call_name(target), self.scopes[-1] if self.scopes else ""
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        where = self.paths[id(target)] if is_module else f"{scope}/{short_name(target)}"
        tree = self.trees.write(tuple(args), where), self.trees.write(dict(kwargs), where)
        watch = Watch(self.book, target, tensors)
        leaf = Leaf(where, set(), set(watch.own) if is_module else None)
        result = self._run(run, leaf, _is_meta(target, tensors), args, kwargs)
        if isinstance(target, nn.Module | Apply):
            self._open_if_opaque(leaf, result)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        is_effect = not is_module and getattr(target, "__name__", "") in _EFFECTS
        touched = tensors[:1] if is_effect else watch.touched(leaf.wrote)
        written = watch.written(touched)
        if not is_module and not touched and not written:
            if not made:
                return self._nothing_made(target, tree, result, bool(tensors))
            if all(map(self._is_known, made)):
                # Such as `to` and `contiguous` where there is nothing to do.
                return result
        name = self.page.fresh(name)
        tree = self._with_state(tree, written)
        writes = self._rename_written(name, touched)
        updates = self._rename_updated(name, written, len(writes))
        key = where if is_module else self.trees.key(target)
        values = self._name_results(name, made)
        results = Results(values, structure_of(result), updates)
        if results.structure != TENSOR:
            self.page.answers[name] = answer_of(result, self._label)
        self.page.steps.append(Call(name, key, is_module, tree[0], tree[1], results, writes, self.moods.now()))
        kind = type(target).__name__ if is_module else short_name(target)
        names = tuple(self.book.state[id(tensor)] for tensor in written)
        draws = draws_without_numbers(target, args, kwargs, result) or is_given_generator(args, kwargs)
        is_random = leaf.draws or watch.has_drawn() or draws
        if is_random and self.moods.generator_was_set(watch.generator):
            raise self._refused("the model sets torch's generator between its blocks, before it draws from it", target)
        adds = leaf.adds_loss or kind == ADDED_LOSS
        self.page.notes[name] = Note(where if is_module else scope, kind, is_random, names, adds, leaf.takes_gradients)
        return result

    def _run(self, run: Callable[..., Any], leaf: Leaf, is_meta: bool, args: Any, kwargs: Any) -> Any:
        """Run the call; inside only what enters and leaves it is watched."""
        given = leaves((args, kwargs))
        # Without weights, what depends on the inputs only is still computed for real: the model may look at it.
        change = _to_meta if is_meta else _off_meta
        if is_meta or any(isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in given):
            args, kwargs = transform(tuple(args), change), transform(dict(kwargs), change)
            given += leaves((args, kwargs))
        leaf.given |= set(map(id, given))
        self.leaf = leaf
        try:
            return run(*args, **kwargs)
        finally:
            self.leaf = _WRITING

    def _open_if_opaque(self, leaf: Leaf, result: Any) -> None:
        """An object that a leaf made is compared by its class alone: what it holds shows when the leaf is opened."""
        if opaque_leaves(result, lambda thing: id(thing) in leaf.given or id(thing) in self.page.objects):
            raise OpenLeaf(leaf.name)

    def _nothing_made(self, target: Any, tree: Any, result: Any, has_tensors: bool) -> Any:
        """A function that made no tensor: a Python value read from tensors is a guard."""
        if not has_tensors or result is None:
            return result
        scope = self.scopes[-1] if self.scopes else ""
        expected = self.trees.key(Expected(result))
        self.page.steps.append(Guard(short_name(target), self.trees.key(target), tree[0], tree[1], expected, scope))
        return result

    def _call_name(self, target: Any) -> str:
        if isinstance(target, nn.Module):
            return str(self.paths[id(target)])
        return f"{self.scopes[-1] if self.scopes else ''}/{short_name(target)}"

    def _rename_written(self, name: str, touched: list[Tensor]) -> tuple[tuple[str, str], ...]:
        """What was written in place, and all that shares its memory, goes by new names from now on."""
        writes: list[tuple[str, str]] = []
        for tensor in {id(alias): alias for t in touched for alias in self.book.sharing(t)}.values():
            old, new = self.book.name(tensor), f"{name}!{len(writes)}"
            if old is not None and id(tensor) not in self.book.state:
                self.book.add(tensor, new)
                writes.append((new, old))
        return tuple(writes)

    def _with_state(self, tree: Any, written: list[Tensor]) -> Any:
        """Whoever writes a buffer is given the buffer itself, also where others read a value in its place."""
        names = {name: self.book.state[id(tensor)] for tensor in written if (name := self.book.name(tensor))}
        return tuple(bind_state(part, names) for part in tree) if names else tree

    def _rename_updated(self, name: str, written: list[Tensor], taken: int) -> tuple[tuple[str, str], ...]:
        """A buffer that was written is read as a value from now on, so that it can go to other stages."""
        buffers = [tensor for tensor in written if self._is_buffer(tensor)]
        updates = tuple((f"{name}!{taken + n}", self.book.state[id(tensor)]) for n, tensor in enumerate(buffers))
        for tensor, (new, _) in zip(buffers, updates, strict=True):
            self.book.add(tensor, new)
        return updates

    def _name_results(self, name: str, made: list[Tensor]) -> tuple[str, ...]:
        fresh = {id(tensor): tensor for tensor in made if not self._is_known(tensor)}
        for place, tensor in enumerate(fresh.values()):
            self.book.add(tensor, name if len(fresh) == 1 else f"{name}:{place}")
        return tuple(self._label(tensor) for tensor in made)

    def _is_known(self, tensor: Tensor) -> bool:
        return self.book.name(tensor) is not None or id(tensor) in self.book.state

    def _is_buffer(self, tensor: Tensor) -> bool:
        return id(tensor) in self.book.state and not isinstance(tensor, nn.Parameter)

    def _label(self, tensor: Tensor) -> str:
        return self.book.name(tensor) or ""

    def _named(self, tensor: Tensor) -> Ref | State | None:
        name = self.book.name(tensor)
        if name is not None:
            if tensor.requires_grad != self.book.specs[name].requires_grad:
                raise CaptureError(
                    "a tensor got or lost its gradient by something that no call shows",
                    value=name,
                    module=(self.scopes[-1] if self.scopes else "") or "the model",
                    hint="call `Function.apply` rather than an `apply` kept from before, and requires_grad_() rather "
                    "than setting requires_grad; or keep the module whole (basic_blocks)",
                )
            return Ref(name)
        if id(tensor) in self.book.state:
            return State(self.book.state[id(tensor)])
        if leaf := self.book.leaf_of(tensor):
            raise OpenLeaf(leaf)
        return None

    def _inside_leaf(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self.leaf is not None
        if self.leaf is _WRITING:
            return func(*args, **kwargs)
        given = {id(leaf): leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in given.values():
            if self._is_foreign(tensor):
                raise OpenLeaf(self.leaf.name, self.book.leaf_of(tensor) or "")
        result = func(*args, **kwargs)
        self.leaf.draws |= draws_without_numbers(func, args, kwargs, result)
        self.leaf.adds_loss |= getattr(func, "__name__", "") == ADDED_LOSS
        # An autograd function that turns gradients on has a graph of its own, which its backward walks.
        self.leaf.takes_gradients |= func in _GRADIENTS or self.moods.has_own_graph()
        for leaf in leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in given and self.book.name(leaf) is None:
                self.book.note_inside(leaf, self.leaf.name, self.leaf.number)
        return result

    def _is_foreign(self, tensor: Tensor) -> bool:
        """Whether the leaf that runs uses a value, or something of another leaf, that it neither was given nor has."""
        assert self.leaf is not None
        if id(tensor) in self.leaf.given:
            return False
        if id(tensor) in self.book.state:
            return self.leaf.own is not None and id(tensor) not in self.leaf.own
        return self.book.name(tensor) is not None or self.book.call_of(tensor) not in (None, self.leaf.number)


def _is_meta(target: Any, tensors: list[Tensor]) -> bool:
    """Whether a call has no real numbers: some tensor, or some state of the module, is on the meta device."""
    state = (*target.parameters(), *target.buffers()) if isinstance(target, nn.Module) else ()
    return any(tensor.is_meta for tensor in (*tensors, *state))


def _off_meta(leaf: object) -> object:
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


def _to_meta(leaf: object) -> object:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf
