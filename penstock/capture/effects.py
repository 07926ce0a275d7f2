"""Detects the side effects of a call: tensors and containers that it changes, random numbers that it draws."""

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from penstock.capture.arguments import FunctionApply
from penstock.capture.function_kinds import GRADIENT_FUNCTIONS, TENSOR_EFFECTS, draws_on_meta, is_random
from penstock.capture.functions import WholeFunction
from penstock.capture.generators import GeneratorStates, module_generators, torch_generators
from penstock.capture.objects import register_class_of, register_containers
from penstock.capture.random_draws import PythonDraw
from penstock.capture.structures import structure_of
from penstock.capture.tensor_table import TensorTable
from penstock.capture.tensors import same_content, storage_id, tensors_in
from penstock.capture.transforms import TransformedCall
from penstock.errors import CaptureError
from penstock.ir import ADDED_LOSS, attributes_of, flatten_one_level, is_attributes_only, leaves


class ObservedCall:
    """A call that is being recorded, and its side effects.

    The constructor, before the call, saves everything that the call may change. While it runs, the recorder passes the
    torch functions inside to `note_function`. `compare`, after it, finds what has changed.
    """

    def __init__(
        self, table: TensorTable, target: Any, where: str, number: int, arguments: list[Any], is_shared_draw: bool
    ) -> None:
        """`target` is the module or function to be called, `arguments` are the leaves of its arguments."""
        self.target = target
        self.where = where
        """the path of the module; of a function, the module in whose forward it is called, and its short name"""
        self.number = number
        """distinguishes the calls of one block"""
        self.is_shared_draw = is_shared_draw
        """whether it draws one number for the whole batch"""
        self.given = set(map(id, arguments))
        """the identities of all leaves among the arguments"""
        self.written_storage: set[int] = set()
        """the storage that it was seen to write in place"""
        self.adds_loss = False
        self.takes_gradients = isinstance(target, TransformedCall) and target.transform != "vmap"
        """whether it runs autograd in its forward"""
        self.changes_arguments = False
        """whether it put other tensors or plain values into a container among its arguments"""
        self.draws = False
        """whether it draws random numbers"""
        # Set by `compare`, which also completes `draws`.
        self.draws_with_python = False
        """whether it draws from the generators of Python or numpy"""
        self.written: list[Tensor] = []
        """the arguments that it wrote into"""
        self.written_state: list[Tensor] = []
        """the parameters and buffers that it wrote into, also through views, or replaced"""

        self._table = table
        # Of a module, itself and all modules inside; found once, because every walk of a block takes time.
        self._parts = list(target.modules()) if isinstance(target, nn.Module) else []
        parameters = [tensor for part in self._parts for tensor in part._parameters.values() if tensor is not None]
        # Held, so that the id() of a replaced buffer is not given to another tensor.
        self._buffers = self._find_buffers()
        attributes = [value for part in self._parts for value in vars(part).values() if isinstance(value, Tensor)]
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        own = {id(tensor): tensor for tensor in (*parameters, *self._buffers.values(), *attributes)}
        # A block must use no state but its own: the stage that runs it may not have any other. A transformed function,
        # and a function of the user that is one call, must use none but its arguments. Other functions get what they
        # use as arguments.
        is_confined = isinstance(target, nn.Module | TransformedCall | WholeFunction)
        self._own_state = set(own) if is_confined else None
        self._has_meta_state = any(tensor.is_meta for tensor in own.values())
        self.is_on_meta = any(tensor.is_meta for tensor in (*tensors, *parameters, *self._buffers.values()))
        # A call may write state through a view that it is given, so state that shares memory with an argument counts
        # too.
        shared = [tensor for argument in tensors for tensor in table.state_sharing(argument)]
        state = {id(tensor): tensor for tensor in (*shared, *own.values()) if id(tensor) in table.state}
        self._state = [
            # Parameters are large and rarely written: they are not copied, and only their versions compared.
            (
                tensor,
                tensor._version,
                None if tensor.is_meta or isinstance(tensor, nn.Parameter) else tensor.detach().clone(),
            )
            for tensor in state.values()
        ]
        is_cuda = any(tensor.is_cuda for tensor in (*tensors, *state.values()))
        self._generators = GeneratorStates([*torch_generators(is_cuda), *module_generators(self._parts)])

    def is_foreign(self, tensor: Tensor) -> bool:
        """Whether a tensor reaches the call other than through its arguments.

        It is then a value, a tensor made in another call, or state of another module.
        """
        if id(tensor) in self.given:
            return False
        if id(tensor) in self._table.state:
            return self._own_state is not None and id(tensor) not in self._own_state
        inside = self._table.made_inside(tensor)
        return self._table.name(tensor) is not None or (inside is not None and inside[1] != self.number)

    def note_function(self, func: Any, args: Any, kwargs: Any, result: Any, has_own_graph: bool) -> None:
        """Note the effects of a torch function inside; `has_own_graph`: in an autograd function that uses autograd."""
        self.draws |= draws_on_meta(func, args, kwargs, result)
        self.adds_loss |= getattr(func, "__name__", "") == ADDED_LOSS
        self.takes_gradients |= func in GRADIENT_FUNCTIONS or has_own_graph

    def compare(self, args: Any, kwargs: Any, result: Any, drew_with_python: Callable[[], bool]) -> None:
        """Find the random draws and writes of the call, before the generators are restored.

        `drew_with_python` returns whether the call drew from the generators of Python or numpy.
        """
        if self._parts:
            # The call may have replaced submodules.
            self._parts = list(self.target.modules())
        have_moved = self._generators.have_moved()
        # After the comparison of the states: it draws itself, and a module may keep one of these generators.
        self.draws_with_python = drew_with_python()
        self.draws = (
            self.draws
            or have_moved
            or self.draws_with_python
            # On the meta device dropout draws nothing, but the real module will.
            or any(isinstance(part, _DropoutNd) and part.training and part.p > 0 for part in self._parts)
            or is_random(self.target, args, kwargs, result)
        )
        if not self._parts and getattr(self.target, "__name__", "") in TENSOR_EFFECTS:
            self.written = [tensor for tensor, _ in self._versions[:1]]
        else:
            self.written = [
                tensor
                for tensor, version in self._versions
                if tensor._version != version or (self.written_storage and storage_id(tensor) in self.written_storage)
            ]
        storage = {storage_id(tensor) for tensor in self.written}
        replaced = self._buffers.keys() - self._find_buffers().keys()
        unseen = self._meta_statistics() if self._has_meta_state else ()
        self.written_state = [
            tensor
            for tensor, version, content in self._state
            if tensor._version != version
            or id(tensor) in replaced
            or id(tensor) in unseen
            or (storage and storage_id(tensor) in storage)
            # Some kernels (batch norm's running statistics) write buffers without increasing the version.
            or (content is not None and not same_content(tensor, content))
        ]

    def _find_buffers(self) -> dict[int, Tensor]:
        buffers = (buffer for part in self._parts for buffer in part._buffers.values())
        return {id(buffer): buffer for buffer in buffers if buffer is not None}

    def _meta_statistics(self) -> set[int]:
        """Running statistics on the meta device: their writes show neither in a version nor in the content."""
        norms = [part for part in self._parts if isinstance(part, _NormBase) and part.training]
        return {id(buffer) for norm in norms for buffer in norm.buffers() if buffer.is_meta}


def runs_python(target: Any) -> bool:
    """Whether a call runs Python code: a torch function cannot draw from the generators of Python and numpy."""
    return isinstance(target, nn.Module | FunctionApply | PythonDraw | WholeFunction)


class ArgumentContents:
    """The contents of the containers among the arguments of a call, compared before and after it."""

    def __init__(self, args: Any, kwargs: Any, held: Collection[int]) -> None:
        """`held` has the identities of the objects that modules hold."""
        self._given = (tuple(args), dict(kwargs))
        self._tensors, self._structure = tensors_in(self._given), structure_of(self._given)
        # Objects that are not containers, and are passed as they are: if the call changes one, its class becomes a
        # container.
        objects = [leaf for leaf in leaves(self._given) if is_attributes_only(type(leaf))]
        self._passed_objects = [(leaf, structure_of(attributes_of(leaf))) for leaf in objects if id(leaf) not in held]
        self._held_objects = [
            (thing, _content(thing)) for thing in (*_containers(self._given), *objects) if id(thing) in held
        ]

    def register_containers(self, result: Any) -> bool:
        """Register the classes of objects that the call returned or changed; returns whether some were new."""
        changed = [leaf for leaf, before in self._passed_objects if structure_of(attributes_of(leaf)) != before]
        # A list, not a generator: every class must be registered.
        return any([register_containers((result, self._given)), *map(register_class_of, changed)])

    def have_changed(self, where: str) -> bool:
        """Whether a container holds other tensors or other plain values than before the call.

        Raises a CaptureError, which names `where`, if the call changed an object that a module holds.
        """
        for container, before in self._held_objects:
            if _content(container) != before:
                raise CaptureError(
                    "a block changes an object that a module of the model holds, which other stages would not see",
                    object=type(container).__name__,
                    where=where,
                    hint="make the object in the forward, or keep the module around both whole (basic_blocks)",
                )
        # Tensors by identity, everything else by its text.
        tensors = tensors_in(self._given)
        is_same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return not is_same or structure_of(self._given) != self._structure

    def are_shared(self) -> bool:
        """Whether two arguments are, or hold, the same list, dict or object: a replay would pass two different ones."""
        ids = [id(container) for container in _containers(self._given) if not isinstance(container, tuple | slice)]
        return len(set(ids)) < len(ids)


def _containers(structure: object) -> Iterator[object]:
    parts = flatten_one_level(structure)
    if parts is not None:
        yield structure
        for item in parts.items:
            yield from _containers(item)


def _content(thing: object) -> tuple[str, list[int]]:
    # The class of an object may become that of a container between two calls.
    parts = flatten_one_level(thing) or attributes_of(thing)
    return structure_of(parts), list(map(id, tensors_in(parts)))
