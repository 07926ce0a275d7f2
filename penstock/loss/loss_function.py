"""Evaluates a loss function on parts of a batch, and leaves everything as it was."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.batches import Microbatch
from penstock.capture import (
    GeneratorStates,
    coarsest,
    code_origin,
    in_precision,
    isolated,
    object_items,
    tensors_in,
    uncompiled,
)
from penstock.errors import PenstockError, RunError
from penstock.ir import flatten_one_level, leaves, listed, map_leaves, named_leaves
from penstock.loss.find_losses import SINGLE, losses_of_function
from penstock.loss.probe import ConstantRandomness, Evaluate, Evaluation, FunctionTracker, ProbeError
from penstock.loss.samples import LARGE, SMALL_SCALE, SampleRange, artificial_output, join, sample_dims

T = TypeVar("T")
LossFn = Callable[[Any, Any], Any]
_MAX_DEPTH = 4
"""references that are followed from a loss function to find its modules and tensors"""
_MAX_ITEMS = 64
"""items of a container that is searched; a longer one is taken for data"""


def loss_module(loss_fn: object) -> nn.Module | None:
    """The module that a loss function is, or is a method, a partial or a wrapper of; None for a plain function."""
    while not isinstance(loss_fn, nn.Module):
        wrapped = (getattr(loss_fn, name, None) for name in ("__self__", "func", "__wrapped__"))
        loss_fn = next((candidate for candidate in wrapped if callable(candidate)), None)
        if loss_fn is None:
            return None
    return loss_fn


def has_parameters(loss_fn: object) -> bool:
    """Whether a loss function has parameters of its own."""
    module = loss_module(loss_fn)
    return module is not None and next(module.parameters(), None) is not None


class LossFunction:
    """A loss function that can be evaluated on samples of a batch, once one real output is known."""

    def __init__(self, loss_fn: LossFn, remote_parameters: Mapping[int, str], name: str = SINGLE) -> None:
        """`remote_parameters`: names of the parameters that are trained on other ranks, by their id.

        `name` is that of the loss, if the function returns several.
        """
        self._loss_fn, self._remote, self._name = loss_fn, remote_parameters, name
        self.microbatches: Sequence[Microbatch] = ()
        self._output: Any = None
        """the output of one microbatch, of `_size` samples"""
        self._size = 0
        self._is_random = False
        """whether the function draws random numbers"""
        self._dtypes: tuple[torch.dtype | None, ...] = (torch.float64, torch.float32, None)
        """those in which it may be evaluated, the first one preferred; None is that of the real outputs"""
        self.dtype = torch.float64
        """the lowest precision that it computed in"""
        self._state: _ReferencedState
        self._generators: GeneratorStates
        # A compiled function has one of these attributes; it would be compiled again for every number of samples.
        self.is_plain = not hasattr(loss_fn, "_torchdynamo_orig_callable") and not hasattr(loss_fn, "_orig_mod")
        """whether it can be called without precautions: it draws no random numbers, has no state that a call changes,
        does not write into its arguments and is not compiled"""

    def begin(self, microbatches: Sequence[Microbatch], output: Any, size: int) -> None:
        """Set the microbatches of a step, and the output of one of them, which has `size` samples."""
        self.microbatches, self._output, self._size = microbatches, output, size

    def end(self) -> None:
        """Release the tensors of the step."""
        self.microbatches, self._output = (), None

    @property
    def sample_size(self) -> int:
        """The number of entries that the largest tensor of the output has for each sample."""
        tensors = tensors_in(self._output)
        return max((leaf.numel() // self._size for leaf in tensors), default=1)

    def tensors(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The tensors of the target, by name."""
        named = named_leaves(microbatch.target, "target")
        return microbatch.countable({name: leaf for name, leaf in named if isinstance(leaf, Tensor)})

    def refuse_remote_parameters(self) -> None:
        """Raise a RunError if the function uses parameters whose values are out of date in this process."""
        try:
            with self.evaluator([SampleRange(0, 0, self.microbatches[0].size)], 0) as evaluate:
                evaluate([0])
        except PenstockError:
            raise
        except Exception:  # the evaluation has another problem, which `decide` turns into a warning
            pass

    @contextmanager
    def evaluator(self, parts: Sequence[SampleRange], draw: int) -> Iterator[Evaluate]:
        """Evaluate on artificial outputs, which differ in every `draw`, and the real targets."""
        # If several dimensions of the output could hold the samples, it is the one that holds them in the inputs.
        given = (axis.dim for axis in self.microbatches[0].axes.values() if axis.dim is not None)
        dims = sample_dims(self._output, self._size, preferred=next(given, 0))
        taken = [self.microbatches[part.microbatch].take(part.start, part.length) for part in parts]
        outputs: dict[torch.dtype | None, list[Any]] = {}

        def evaluate_in(chosen: Sequence[int], dtype: torch.dtype | None) -> Evaluation:
            if dtype not in outputs:
                scales = [SMALL_SCALE if (draw + index) % 2 else 1.0 for index in range(len(parts))]
                outputs[dtype] = [
                    artificial_output(self._output, dims, self._size, part.length, 100 * draw + index, scale, dtype)
                    for index, (part, scale) in enumerate(zip(parts, scales, strict=True))
                ]
            inputs = {
                (number, str(index)): leaf
                for number in chosen
                for index, leaf in enumerate(leaves(outputs[dtype][number]))
                if isinstance(leaf, Tensor) and leaf.requires_grad
            }
            output = join([outputs[dtype][number] for number in chosen], dims)
            target = Microbatch.join([taken[number] for number in chosen]).target
            target = map_leaves(target, lambda leaf: in_precision(leaf, dtype) if isinstance(leaf, Tensor) else leaf)
            result = self._call(output, target, inputs)
            if any(dims[int(name)] is None for name in result.gradients[chosen[0]]):
                # Such an output depends on the whole batch, and differs between microbatches.
                raise ProbeError("it uses an output of the model that has no batch dimension")
            return result

        def evaluate(chosen: Sequence[int]) -> Evaluation:
            num_entries = self.sample_size * sum(part.length for part in parts)
            return self.in_accepted_dtype(lambda dtype: evaluate_in(chosen, dtype), num_entries)

        with self._isolated():
            yield evaluate

    def in_accepted_dtype(self, call: Callable[[torch.dtype | None], T], num_entries: int) -> T:
        """The result of `call(dtype)` for the best dtype that the function accepts; None is that of the real outputs.

        It may need the dtype of a tensor of its own, such as class weights or a bfloat16 parameter. float64 is best, as
        weights that are not counted are only as exact as the gradients, but costs too much for many entries.
        """
        failed: list[torch.dtype | None] = []
        for dtype in self._dtypes:
            if num_entries > LARGE and dtype is torch.float64:
                continue
            try:
                result = call(dtype)
            except PenstockError:
                raise
            except (RuntimeError, TypeError, ValueError):
                if dtype is None:
                    raise
                failed.append(dtype)
            else:
                self._dtypes = tuple(each for each in self._dtypes if each not in failed)
                return result
        raise AssertionError("unreachable: the last dtype works or raises")

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Restore everything that the function changes inside the context."""
        self._state = state = _ReferencedState(self._loss_fn)
        # Modules of the user may count their calls.
        origins = [code_origin(type(module).__module__) for module in state.referenced_modules]
        self.is_plain &= all(origin == "torch" for origin in origins)
        with (
            warnings.catch_warnings(action="ignore"),
            isolated(state, None, ()) if state.referenced_modules else nullcontext(),
            uncompiled(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            self._generators = GeneratorStates.of_process()
            yield

    def _call(self, output: Any, target: Any, inputs: Mapping[tuple[int, str], Tensor]) -> Evaluation:
        """Call the loss function, undo its changes to state and generators, and take the gradients of its loss."""
        tracker = FunctionTracker(self._remote)
        tensors = [*self._state.buffers(), *self._state.tensors]
        before = [(tensor, tensor.detach().clone()) for tensor in tensors]
        # Copies: the function may write into them, and is called again below if it draws random numbers.
        arguments = map_leaves((output, target), lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
        with tracker, ConstantRandomness() if self._is_random else nullcontext():
            loss = losses_of_function(self._loss_fn(*arguments))[self._name]
        self.dtype = tracker.dtype
        self.is_plain &= not any(isinstance(leaf, Tensor) and leaf._version for leaf in leaves(arguments))
        # Losses that keep state, or draw one random number for all samples, must start every call from the same state.
        for tensor, content in before:
            if not torch.equal(tensor.detach(), content):
                tensor.data.copy_(content)
                self.is_plain = False
        if self._generators.have_moved():
            self._generators.restore()
            # It draws random numbers: evaluate it with constant ones from now on.
            if not self._is_random:
                self._is_random, self.is_plain = True, False
                return self._call(output, target, inputs)
        if tracker.used_parameters:
            raise RunError(
                "the loss function uses parameters of the model that are on another rank: their values are out of "
                "date here, and their gradients would be lost",
                parameters=listed(sorted(tracker.used_parameters)),
                hint="penstock.add_loss(...) in the forward of the module that has them, or weight_decay=... of the "
                "optimizer",
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ProbeError("it does not return a single number")
        leaf_tensors = enumerate([*self._state.parameters(), *self._state.tensors])
        shared = {str(index): leaf for index, leaf in leaf_tensors if leaf.requires_grad and leaf.is_leaf}
        # Gradients are rounded to the dtype of the outputs.
        dtype = coarsest((tracker.dtype, *(leaf.real.dtype for leaf in inputs.values())))
        return Evaluation.of(loss, inputs, shared, dtype)


class _ReferencedState(nn.Module):
    """The modules and tensors that a function refers to, as one module, so that their state can be restored."""

    def __init__(self, loss_fn: LossFn) -> None:
        super().__init__()
        objects = {id(value): value for value in _referenced(loss_fn, _MAX_DEPTH)}
        self.referenced_modules = nn.ModuleList(value for value in objects.values() if isinstance(value, nn.Module))
        self.tensors = [value for value in objects.values() if isinstance(value, Tensor)]


def _referenced(value: Any, depth: int) -> Iterator[Any]:
    """Modules and tensors in closures, globals, attributes and bound arguments of a function, with repetitions."""
    if isinstance(value, Tensor | nn.Module):
        yield value
    elif depth and not isinstance(value, type) and not inspect.ismodule(value):
        if flatten_one_level(value) is not None:
            inner = leaves(value) if len(leaves(value)) <= _MAX_ITEMS else []
        else:
            inner = [item for _, item in object_items(value)]
        if inspect.isfunction(value):
            named = inspect.getclosurevars(value).globals.values()
            # Functions of other files, such as those of libraries, are not followed.
            inner += [item for item in named if not inspect.isroutine(item) or item.__module__ == value.__module__]
        for item in inner:
            if item is not value:
                yield from _referenced(item, depth - 1)
