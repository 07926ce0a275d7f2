"""Records every call between blocks during one forward.

A `TorchFunctionMode` sees every torch function that is given a tensor; calls of modules, autograd functions and
scripted functions are intercepted (`hooks.py`). Outside of blocks each of these becomes a `Call` of the record, or a
`Guard` if it reads a Python value from a tensor. Nothing is recorded inside a block; the recorder only checks that no
tensor enters or leaves it other than through arguments and results.

Every call outside of blocks goes through these methods:

    _record                pauses the recorder, and calls:
    _run_and_record        decides what the call becomes in the record: a Call, a Guard or nothing
      _write_arguments     the arguments as trees, before the call can change them
      _run_observed        runs the call, and observes its side effects (`ObservedCall`)
      _add_guard           a Python value that was read from tensors
      _add_call            a call with new values, for which it makes names

If the model must be recorded in another way, they raise one of the exceptions below, and `record_forward.py` starts
again.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.capture.arguments import ArgumentWriter, FunctionApply, short_name
from penstock.capture.call_context import ContextTracker
from penstock.capture.effects import ArgumentContents, ObservedCall, runs_python
from penstock.capture.function_kinds import (
    GRADIENT_FUNCTIONS,
    reads_gradient,
    reads_metadata,
    reads_size,
    sets_requires_grad,
    writes_in_place,
)
from penstock.capture.functions import WholeFunction, WholeFunctions, enclosing_function
from penstock.capture.granularity import Granularity, outer_modules
from penstock.capture.hooks import refuse_backward_hooks
from penstock.capture.objects import reachable_objects, register_containers, user_line
from penstock.capture.random_draws import (
    RANDOMNESS_HINT,
    CallSeeds,
    DrawnArray,
    DrawnNumber,
    DrawSeed,
    PythonDraw,
    exposed_draw,
    hash_name,
    python_seeded,
    recorded_draw,
    seed_torch,
)
from penstock.capture.sharded_logits import ShardedLogits
from penstock.capture.structures import Expected, opaque_leaves, structure_of, structure_with_names
from penstock.capture.tensor_table import TensorTable
from penstock.capture.tensors import has_gradient, storage_id, tensors_in
from penstock.capture.transforms import TransformedCall, held_tensors, with_own_closure
from penstock.errors import CaptureError
from penstock.ir import (
    ADDED_LOSS,
    TENSOR,
    Call,
    Guard,
    Ref,
    Results,
    State,
    Tree,
    bind_state,
    copy_into,
    leaves,
    map_leaves,
    object_keys,
)


class LeakyCall(Exception):  # noqa: N818
    """A tensor may enter or leave a block or function other than through arguments and results: it must be opened."""

    def __init__(self, where: str, maker: str = "") -> None:
        super().__init__(where)
        self.where = where
        """the block, or the function with the module that calls it, as in `ObservedCall`"""
        self.maker = maker
        """where the tensor was made, if inside another call"""


class BypassedBlock(Exception):  # noqa: N818
    """A module inside a block was called while the block was not: the block only holds it, and must be opened."""

    def __init__(self, block: str) -> None:
        super().__init__(block)
        self.block = block


class NewContainer(Exception):  # noqa: N818
    """A class of objects that hold tensors was registered as a container: the forward must be recorded again."""


class NotReplayable(Exception):  # noqa: N818
    """A function of the user contains a call that cannot be replayed by itself: it must be recorded as one call."""

    def __init__(self, function: Callable[..., Any], draws: bool = False) -> None:
        super().__init__(function)
        self.function = function
        self.draws = draws
        """whether it draws with Python's or numpy's generators"""


@dataclass(frozen=True)
class CallNote:
    """Properties of a call that are not part of the record."""

    scope: str
    """the module in whose forward it happened; of a block, the block itself"""
    kind: str
    """the class of a module or the short name of a function"""
    is_random: bool
    written_state: tuple[str, ...]
    """names of the parameters, buffers and plain tensors that it wrote into"""
    adds_loss: bool
    takes_gradients: bool
    """whether it runs autograd in its forward"""
    is_shared_draw: bool
    """whether it draws one number for the whole batch"""
    draws_with_python: bool
    """whether it draws from the generators of Python or numpy"""


class Recorder(TorchFunctionMode):
    """Records the calls of one forward in `steps`, and further properties of each call in `notes`."""

    def __init__(
        self,
        model: nn.Module,
        granularity: Granularity,
        seed: DrawSeed,
        exposed_seed: int,
        functions: WholeFunctions,
        around_calls: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`seed` determines the random numbers of all recorded calls.

        `exposed_seed` determines the numbers that Python code sees where it draws with Python or numpy
        (`random_draws.py`). Every call is run inside of a context that `around_calls` makes.
        """
        super().__init__()
        self.model = model
        self.steps: list[Call | Guard] = []
        self.notes: dict[str, CallNote] = {}
        """by the name of the call"""
        self.lines: list[str] = []
        """the line of the user's code for each step"""
        self.size_reads: dict[str, tuple[str, str]] = {}
        """for each value whose size the model read: the module and the line that read it first"""
        self.returned: dict[str, Any] = {}
        """the structures that calls returned, except single tensors, by the name of the call"""
        self.state_before: dict[int, tuple[Tensor, Tensor]] = {}
        """state that was written in place between blocks, with its content before"""
        self.failure: tuple[BaseException | None, str] = (None, "")
        """an exception and the innermost module that raised it"""
        self.table = TensorTable(model)
        # Weak: a cycle would keep the recorder, and with it the autograd graph of its forward, until Python collects
        # garbage. Then the activations of two forwards would be in memory at once.
        reference = WeakMethod(self._reference)
        self.writer = ArgumentWriter(lambda tensor: reference()(tensor))
        self.context_tracker = ContextTracker()
        self.functions = functions
        self.enclosing: dict[int, Callable[..., Any]] = {}
        """functions of the user around guards and calls that are given unknown tensors, by index of the step"""
        self.has_single_sample = False
        """whether the batch may have one sample only, so that a draw of one element may be one per sample"""
        self._seed, self._exposed_seed = seed, exposed_seed
        self._around_calls = around_calls
        self._rng_state = torch.get_rng_state()
        self._call_seeds = CallSeeds()
        self._rng_was_set = False
        """whether the model set torch's generator between two calls"""
        self._block_names = granularity.find_blocks(model).keys()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._scopes: list[str] = []
        """the opened modules whose forward is running, the innermost last"""
        self._num_uses: Counter[str] = Counter()
        """of every name of a call; later uses are numbered"""
        self._objects_before = reachable_objects(model.modules())
        """objects that modules held before the forward, by identity"""
        self._running: ObservedCall | None = None
        self._num_calls = 0
        self._num_checkpoints = 0
        """of reentrant checkpoints that are running"""
        # While the recorder itself uses torch, nothing must be recorded. Inside __torch_function__ torch disables the
        # mode by itself, but a module's call is intercepted with the mode active.
        self._is_paused = False

    def stop(self) -> None:
        """Record nothing from now on: in backward, a checkpoint calls the intercepted modules again."""
        self._is_paused = True

    # Observing calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if ShardedLogits in types:
            # Their own method calls the shards, with this mode active.
            return NotImplemented
        if self._is_paused:
            return func(*args, **kwargs)
        if sets_requires_grad(func):
            # `x.requires_grad = True` is recorded as the method that does the same, which has a name to replay it by.
            func = Tensor.requires_grad_
        if args and isinstance(args[0], Tensor) and writes_in_place(func):
            written = args[0]
            if self._running is not None:
                self._running.written_storage.add(storage_id(written))
            if id(written) in self.table.state:
                # Restored after the forward.
                self.state_before.setdefault(id(written), (written, written.detach().clone()))
        if self._running is not None:
            return self._inside_call(func, args, kwargs)
        if reads_metadata(func):
            if reads_size(func):
                names = (self.table.name(arg) for arg in args if isinstance(arg, Tensor))
                for name in names:
                    if name and name not in self.size_reads:
                        self.size_reads[name] = self._scope, user_line()
            if reads_gradient(func) and id(args[0]) in self.table.state:
                raise self._refusal("the model reads the gradient of a parameter between its blocks", func)
            return func(*args, **kwargs)
        if func in GRADIENT_FUNCTIONS:
            raise self._refusal(
                "the model takes gradients between its blocks, where a cut would separate them from the forward", func
            )
        return self._record(func, func, args, kwargs)

    def module_called(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle the call of a module: a block is one recorded call, any other module a scope for the calls inside."""
        path = self._paths.get(id(module))
        try:
            is_inside = self._is_paused or self._running is not None
            # A class may override __call__ and call nn.Module's: the second one is the same call.
            if is_inside or path is None or (self._scopes and self._scopes[-1] == path):
                return original(module, *args, **kwargs)
            if path in self._block_names:
                return self._record(lambda *a, **k: original(module, *a, **k), module, args, kwargs)
            return self._open(module, path, original, args, kwargs)
        except Exception as error:
            if path is not None and self.failure[0] is not error:
                self.failure = (error, path)
            raise

    def _open(self, module: nn.Module, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module that is not a block: the calls inside are recorded."""
        if bypassed := next((name for name in outer_modules(path)[1:] if name in self._block_names), None):
            # As with an nn.Sequential that the model iterates over.
            raise BypassedBlock(bypassed)
        refuse_backward_hooks(module, path)
        num_steps = len(self.steps)
        self._scopes.append(path)
        try:
            result = original(module, *args, **kwargs)
            self.refuse_unseen_draws()
        finally:
            self._scopes.pop()
        if path and len(self.steps) == num_steps and next(module.parameters(), None) is None:
            arguments = leaves((args, kwargs))
            is_plain = all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in arguments)
            if is_plain and isinstance(result, Tensor) and any(result is leaf for leaf in arguments):
                # A dropout with p = 0: recorded like a block, so that the module has a node and with it a stage.
                return self._record(lambda *_, **__: result, module, args, kwargs)
        return result

    def autograd_function_called(self, cls: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle an autograd function: one recorded call, because its backward is not that of the calls inside."""
        if self._is_paused:
            return original(*args, **kwargs)
        if self._running is None and cls.__name__ == "CheckpointFunction":
            # A reentrant checkpoint: its first two arguments are the function and a flag. The function is recorded
            # as if there were no checkpoint, without gradients where no input has one, as in the checkpoint.
            needs_gradient = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args[2:])
            self._num_checkpoints += needs_gradient
            try:
                with torch.set_grad_enabled(needs_gradient and torch.is_grad_enabled()):
                    return args[0](*args[2:])
            finally:
                self._num_checkpoints -= needs_gradient
        original = self.context_tracker.counting(original)
        if self._running is not None:
            return self._inside_call(original, args, kwargs)
        return self._record(original, FunctionApply(cls), args, kwargs)

    def transform_called(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Handle one of `TRANSFORMS`, the functions of torch that call a transformed function: one recorded call."""
        if self._is_paused or self._running is not None:
            return original(*args, **kwargs)
        function, *args = args
        # Modes that the model entered inside the recorder, which a replay must enter again.
        modes = torch.overrides._get_current_function_mode_stack()
        name = original.__name__.removesuffix("_impl")
        target = TransformedCall(name, original, with_own_closure(function), tuple(modes[modes.index(self) + 1 :]))
        # In this first run the modes are active, so that it needs only the transform itself.
        return self._record(
            lambda _, *given, **named: original(function, *given, **named),
            target,
            (held_tensors(function), *args),
            kwargs,
        )

    def script_called(self, function: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle a scripted function: one recorded call, because no Python runs inside."""
        if self._is_paused:
            return run(*args, **kwargs)
        if self._running is not None:
            return self._inside_call(run, args, kwargs)
        return self._record(run, function, args, kwargs)

    def draw_called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Handle a draw with Python's or numpy's generators: a recorded call that returns tensors."""
        if self._is_paused or self._running is not None:
            return function(*args, **kwargs)
        drawing, is_inside = enclosing_function(self._paths)
        if is_inside:
            if drawing is not None and drawing not in self.functions.drawing:
                raise NotReplayable(drawing, draws=True)
            # Not recorded: `refuse_unseen_draws` raises an error for it.
            return function(*args, **kwargs)
        if getattr(function, "__name__", "") == "choice" and args and isinstance(args[0], list | tuple):
            # The items may be anything, such as modules: record the draw of their index.
            draw = PythonDraw(function.__self__.randrange)
            index = self._record(draw, draw, (len(args[0]),), {})
            return args[0][int(index)]
        draw = PythonDraw(function)
        recorded = self._record(draw, draw, args, kwargs)
        # The model's Python code gets different numbers in each recording. If they influence anything that is not
        # recorded, the two recordings differ and capture fails.
        with self._paused(), python_seeded(hash_name(f"{self._exposed_seed} {self._num_calls}")):
            exposed = function(*args, **kwargs)
        if not tensors_in(recorded):
            self._refuse_unseen_draw()
        drawn = iter(leaves(recorded))
        return map_leaves(exposed, lambda leaf: exposed_draw(leaf, next(drawn)))

    def whole_function_called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Handle a function of the user that is recorded as one call."""
        if self._is_paused or self._running is not None:
            return function(*args, **kwargs)
        whole = WholeFunction(function)
        return self._record(whole, whole, args, kwargs)

    def _enclosing_function(self) -> Callable[..., Any] | None:
        """The function of the user that is running and could be recorded as one call."""
        function, _ = enclosing_function(self._paths)
        known = (*self.functions.drawing, *self.functions.reading, *self.functions.opened)
        return None if any(function is other for other in known) else function

    def refuse_unseen_draws(self) -> None:
        """Raise a CaptureError if Python's or numpy's global generators moved outside of recorded calls."""
        if self._running is None and not self._is_paused and self._call_seeds.have_moved():
            self._refuse_unseen_draw()

    def _refuse_unseen_draw(self) -> None:
        raise CaptureError(
            "the model draws random numbers with Python's or numpy's generators between its blocks, which cannot be "
            "recorded as a call",
            module=self._scope or "the model",
            line=user_line(),
            hint=RANDOMNESS_HINT,
        )

    @property
    def _scope(self) -> str:
        return self._scopes[-1] if self._scopes else ""

    def _checkpointed_write(self, where: str, buffer: Tensor) -> CaptureError:
        """The error for a write that plain PyTorch would do twice: in the forward, and when backward recomputes it."""
        hint = "move the checkpoint into a submodule, and keep that whole (basic_blocks)"
        if self._scope:
            kind = type(self.model.get_submodule(self._scope)).__name__
            hint = f'basic_blocks=["{kind}"], which keeps the module with the checkpoint whole'
        return CaptureError(
            "a checkpoint between blocks contains a call that writes buffers, which plain PyTorch makes twice",
            module=self._scope or "the model",
            line=user_line(),
            call=where,
            buffer=self.table.state[id(buffer)],
            hint=hint,
        )

    def _refusal(self, problem: str, func: Any) -> CaptureError:
        return CaptureError(
            problem,
            module=self._scope or "the model",
            line=user_line(),
            function=short_name(func),
            hint="keep the module that does so whole (basic_blocks)",
        )

    # Recording calls

    def _record(self, run: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call and record it. `target` is the module or function, `run` calls it."""
        self.context_tracker.refuse_unsupported(self._scope)
        with self._paused():
            return self._run_and_record(run, target, args, kwargs)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Record nothing in the body, which uses torch for the recorder itself."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _run_and_record(self, run: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call; add it to the record if it returns new tensors, changes something, or reads a Python value."""
        is_module = isinstance(target, nn.Module)
        where = self._paths[id(target)] if is_module else f"{self._scope}/{short_name(target)}"
        # Before the call: it may change the containers that it is given, and rename the values in them.
        trees = self._write_arguments(where, args, kwargs)
        # Torch's own functions put nothing into their arguments.
        contents = ArgumentContents(args, kwargs, self._objects_before) if runs_python(target) else None
        self._num_calls += 1
        call, result = self._run_observed(run, target, where, args, kwargs)
        returned = result
        if contents is not None:
            self._check_containers(call, contents, result)
            if call.changes_arguments:
                # A replay gives the call copies of its containers, and takes their contents from the result.
                result = (result, tuple(args), dict(kwargs))
            if opaque_leaves(result, lambda leaf: id(leaf) in call.given or id(leaf) in self._objects_before):
                # A replay compares only the class of such an object.
                raise LeakyCall(where)
        if isinstance(target, WholeFunction) and result is None:
            # It may raise or print depending on the values that it reads: open it, to record its calls with guards.
            raise LeakyCall(where)
        if call.written_state and (self._num_checkpoints or self.context_tracker.in_checkpoint()):
            raise self._checkpointed_write(where, call.written_state[0])
        if not (is_module or call.written or call.written_state or call.changes_arguments):
            made = tensors_in(result)
            if made and all(map(self.table.is_known, made)):
                # A call that returned its argument, as `to` and `contiguous` do where there is nothing to change.
                return result
            if not made:
                if result is not None and tensors_in((args, kwargs)):
                    self._add_guard(target, trees, result)
                return result
        self._add_call(call, trees, result)
        return returned

    def _check_containers(self, call: ObservedCall, contents: ArgumentContents, result: Any) -> None:
        """Find out whether a call changed containers among its arguments; raise if the model must be recorded again."""
        # Checked first: NewContainer and LeakyCall record again, and an object of a module that this call has changed
        # would then hold tensors of this recording. `have_changed` raises an error for it.
        call.changes_arguments = contents.have_changed(call.where)
        if contents.register_containers(result):
            raise NewContainer
        if call.changes_arguments and contents.are_shared():
            raise LeakyCall(call.where)

    def _write_arguments(self, where: str, args: Any, kwargs: Any) -> tuple[Tree, Tree]:
        """The arguments of a call as trees."""
        if register_containers((args, kwargs)):
            raise NewContainer
        if where in self._block_names and any(isinstance(leaf, nn.Module) for leaf in leaves((args, kwargs))):
            # As with a module of position biases that every layer is given: only its calls show whose parameters it is.
            raise LeakyCall(where)
        try:
            return self.writer.write(tuple(args), where), self.writer.write(dict(kwargs), where)
        except CaptureError:
            if function := self._enclosing_function():
                raise NotReplayable(function) from None
            raise

    def _add_guard(self, target: Any, trees: tuple[Tree, Tree], result: Any) -> None:
        """Record a Python value that was read from tensors: the record holds only while it is the same."""
        expected, key = self.writer.key(Expected(result)), self.writer.key(target)
        if function := self._enclosing_function():
            self.enclosing[len(self.steps)] = function
        self.steps.append(Guard(short_name(target), key, *trees, expected, self._scope))
        self.lines.append(user_line())

    def _add_call(self, call: ObservedCall, trees: tuple[Tree, Tree], result: Any) -> None:
        """Record a call, with names for all tensors that it returned or wrote."""
        is_module, name = isinstance(call.target, nn.Module), self._call_name(call.where)
        self._num_uses[call.where] += 1
        # A buffer that the call writes is referred to as the buffer, even if other calls refer to a value instead.
        bound = {own: self.table.state[id(tensor)] for tensor in call.written_state if (own := self.table.name(tensor))}
        if bound:
            trees = bind_state(trees[0], bound), bind_state(trees[1], bound)
        writes = self.table.rename_written(name, call.written)
        updates = self.table.name_updates(name, call.written_state, len(writes))
        target_key = call.where if is_module else self.writer.key(call.target)
        made = tensors_in(result)
        results = Results(self.table.name_results(name, made), structure_of(result), updates)
        if results.structure != TENSOR:
            self.returned[name] = structure_with_names(result, lambda tensor, _: self.table.name_or_empty(tensor))
        keys = (*object_keys(trees[0]), *object_keys(trees[1]))
        has_constant = any(isinstance(self.writer.live[key], Tensor) for key in keys)
        if has_constant and (function := self._enclosing_function()):
            self.enclosing[len(self.steps)] = function
        context = self.context_tracker.current()
        self.steps.append(Call(name, target_key, is_module, *trees, results, writes, context, call.changes_arguments))
        self.lines.append(user_line())
        if call.draws and self._rng_was_set:
            problem = "the model sets torch's generator between its blocks, before it draws from it"
            raise self._refusal(problem, call.target)
        kind = type(call.target).__name__ if is_module else short_name(call.target)
        self.notes[name] = CallNote(
            scope=call.where if is_module else self._scope,
            kind=kind,
            is_random=call.draws,
            written_state=tuple(self.table.state[id(tensor)] for tensor in call.written_state),
            adds_loss=call.adds_loss or kind == ADDED_LOSS,
            takes_gradients=call.takes_gradients,
            is_shared_draw=call.is_shared_draw,
            draws_with_python=call.draws_with_python,
        )

    def _call_name(self, where: str) -> str:
        """The name of the next call, with a number from the second one on."""
        return f"{where}@{self._num_uses[where] + 1}" if self._num_uses[where] else where

    def _run_observed(
        self, run: Callable[..., Any], target: Any, where: str, args: Any, kwargs: Any
    ) -> tuple[ObservedCall, Any]:
        """Run a call with the random numbers of its name; returns its observed effects and the result."""
        arguments = leaves((args, kwargs))
        # The first run shows whether one number is drawn for the whole batch. Such a call runs again, with the random
        # numbers that all microbatches share; it has no tensors or generators as arguments, so this changes nothing.
        has_source = any(isinstance(leaf, Tensor | torch.Generator) for leaf in arguments)
        can_be_shared = not isinstance(target, nn.Module) and not has_source
        for is_shared in (False, True):
            name_hash = hash_name(self._call_name(where))
            with self._seeded(name_hash, is_shared, runs_python(target)) as drew_with_python:
                call = ObservedCall(self.table, target, where, self._num_calls, arguments, is_shared)
                result = self._run(run, call, args, kwargs)
                call.compare(args, kwargs, result, drew_with_python)
            # A single element is drawn once for a batch of any size; unless the batch has one sample, and the element
            # may be one per sample.
            is_for_batch = all(
                isinstance(leaf, Tensor) and leaf.numel() == 1 and (leaf.dim() == 0 or not self.has_single_sample)
                for leaf in leaves(result)
            )
            if not (can_be_shared and call.draws and is_for_batch):
                break
        return call, result

    @contextmanager
    def _seeded(self, name_hash: int, is_shared: bool, is_python: bool) -> Iterator[Callable[[], bool]]:
        """Seed the generators for one call, in the same way as a replay does, and restore them after it.

        Those of Python and numpy only if `is_python`: a call of torch does not draw from them. Yields a function that
        returns whether the call drew from the generators of Python or numpy.
        """
        state = torch.get_rng_state()
        # A state other than the one after the last call was set by code between calls, such as manual_seed.
        self._rng_was_set |= not torch.equal(state, self._rng_state)
        seed = self._seed.of_call(name_hash, is_shared)
        seed_torch(seed, torch.cuda.is_initialized())
        try:
            seeded = self._call_seeds.seeded(seed) if is_python else nullcontext(lambda: False)
            with seeded as drew_with_python, self._around_calls():
                yield drew_with_python
        finally:
            torch.set_rng_state(state)
            self._rng_state = state

    def _run(self, run: Callable[..., Any], call: ObservedCall, args: Any, kwargs: Any) -> Any:
        """Run a call on the tensors that were recorded for drawn numbers, and on the meta device if its weights are."""
        arguments = leaves((args, kwargs))
        if any(isinstance(leaf, DrawnNumber | DrawnArray) for leaf in arguments):
            args, kwargs = map_leaves(tuple(args), recorded_draw), map_leaves(dict(kwargs), recorded_draw)
        # A model on the meta device gets a real batch. Calls without weights run on real tensors, as the model may
        # read values from them (masks, lengths); with weights, arguments go to the meta device.
        original = moved = (tuple(args), dict(kwargs))
        if call.is_on_meta:
            moved = map_leaves(original, lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf)
        elif any(map(_is_meta_device, arguments)):
            moved = map_leaves(original, lambda leaf: torch.device("cpu") if _is_meta_device(leaf) else leaf)
        copies = leaves(moved)
        call.given |= set(map(id, copies))
        self._running, self._is_paused = call, False
        try:
            result = run(*moved[0], **moved[1])
        finally:
            self._running, self._is_paused = None, True
        if moved is not original:
            # The call may have changed the copies of containers: the model continues with the originals.
            originals = {id(copy): leaf for copy, leaf in zip(copies, arguments, strict=True)}
            copy_into(original, map_leaves(moved, lambda leaf: originals.get(id(leaf), leaf)))
        return result

    # Names

    def _reference(self, tensor: Tensor) -> Ref | State | None:
        """The reference to a tensor in a tree; None if it is neither a value nor state."""
        name = self.table.name(tensor)
        if name is not None:
            if has_gradient(tensor) != self.table.specs[name].requires_grad:
                raise CaptureError(
                    "the requires_grad of a tensor changed outside of any recorded call",
                    value=name,
                    module=self._scope or "the model",
                    hint="call `Function.apply` itself, not a reference to it that was taken earlier, or keep the "
                    "module whole (basic_blocks)",
                )
            return Ref(name)
        if id(tensor) in self.table.state:
            return State(self.table.state[id(tensor)])
        if inside := self.table.made_inside(tensor):
            raise LeakyCall(inside[0])
        return None

    # Inside a call

    def _inside_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function inside a recorded call, and note its side effects."""
        call = self._running
        arguments = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        for tensor in arguments.values():
            if call.is_foreign(tensor):
                inside = self.table.made_inside(tensor)
                raise LeakyCall(call.where, inside[0] if inside else "")
        result = func(*args, **kwargs)
        call.note_function(func, args, kwargs, result, self.context_tracker.in_function_with_own_graph())
        for tensor in tensors_in(result):
            if id(tensor) not in arguments and self.table.name(tensor) is None:
                self.table.add_inside(tensor, call.where, call.number)
        return result


def _is_meta_device(leaf: object) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "meta"
