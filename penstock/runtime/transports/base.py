"""The interface of a transport: a send slot or receive slot on this rank for every message of a program.

`make_transport` in `__init__.py` chooses a transport.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.capture import dtype_name, dtype_named, from_real_entries, is_dtensor, real_entries
from penstock.errors import RunError
from penstock.ir import Value
from penstock.runtime.host_memory import host_buffer

Tensors = Sequence[Tensor | None]
MessageKey = tuple[int, int, int]
"""source stage, target stage and microbatch; a gradient goes to an earlier stage"""


class TensorCodec:
    """Prepares one value of a message, or its gradient, for sending, and restores it after receiving.

    Dimensions are sent in memory order, so that a channels-last tensor needs no copy and arrives as one. Complex
    numbers are sent as pairs of real ones. Every tensor is checked against the agreed shape and dtype before it is
    sent, because gloo would not notice a difference.
    """

    # fmt: off
    __slots__ = (
        "_dtype", "_inverse", "_order", "_requires_grad", "_sent_shape", "_shape", "is_empty", "is_optional",
        "num_bytes", "value",
    )
    # fmt: on

    def __init__(self, value: Value, is_gradient: bool = False, is_optional: bool = False) -> None:
        """`is_optional`: a gradient that does not exist arrives as None, not as zeros."""
        self.value, self.is_optional = value, is_optional
        spec = value.spec
        self.is_empty = math.prod(spec.shape) == 0
        self._requires_grad = spec.requires_grad and not is_gradient
        self._shape, self._dtype = torch.Size(spec.shape), dtype_named(spec.dtype)
        self.num_bytes = math.prod(spec.shape) * self._dtype.itemsize
        self._order = spec.order or None
        self._sent_shape = [spec.shape[dim] for dim in self._order] if self._order else spec.shape
        self._inverse = [self._order.index(dim) for dim in range(len(self._order))] if self._order else None

    def pack(self, tensor: Tensor | None, device: torch.device) -> Tensor:
        """The tensor as it is sent; None, a gradient that was not computed, becomes zeros."""
        # A negated view is contiguous, but its memory has the other sign.
        return self.prepare(tensor, device).contiguous().resolve_neg()

    def prepare(self, tensor: Tensor | None, device: torch.device) -> Tensor:
        """The tensor as `pack` returns it, except that it need not be contiguous: to be copied to where it is sent."""
        if tensor is None:
            tensor = torch.zeros(self._shape, dtype=self._dtype, device=device)
        elif is_dtensor(tensor):
            raise RunError(
                "a value that crosses between stages must be a plain tensor, got a DTensor",
                value=self.value.name,
                placements=tensor.placements,
                hint="use_local_output=True in the plan of the module that returns it, with whole outputs (Replicate)",
            )
        elif tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise RunError(
                "a value must have the shape and dtype that the stages agreed on",
                value=self.value.name,
                agreed=self.value.spec,
                found=f"{dtype_name(tensor.dtype)}{list(tensor.shape)}",
                hint="if its size depends on values in the batch, as after a boolean mask, other cuts (partitioner=), "
                "or basic_blocks= around the modules that use it; otherwise correct the hook or block that returns it",
            )
        # The packed tensor is kept until it has arrived: it must not keep the autograd graph alive.
        if tensor.requires_grad:
            tensor = tensor.detach()
        if self._order:
            tensor = tensor.permute(self._order)
        return real_entries(tensor)

    def buffer(self, device: torch.device, is_pinned: bool = False) -> Tensor:
        """Memory to receive into: on the device, or pinned memory of the host."""
        if is_pinned:
            buffer = host_buffer(self._sent_shape, self._dtype)
        else:
            buffer = torch.empty(self._sent_shape, dtype=self._dtype, device=device)
        return real_entries(buffer)

    def view(self, memory: Tensor) -> Tensor:
        """The beginning of some bytes as a buffer to receive into or to copy to."""
        buffer = memory[: self.num_bytes].view(self._dtype).view(self._sent_shape)
        return real_entries(buffer)

    def unpack(self, buffer: Tensor) -> Tensor:
        """The value in a received buffer, with the sender's memory layout and requires_grad."""
        value = from_real_entries(buffer, self._dtype)
        if self._inverse:
            value = value.permute(self._inverse)
        return value.requires_grad_() if self._requires_grad else value


class Route(NamedTuple):
    """One message of the program."""

    code: int
    """of its action"""
    key: MessageKey
    peer: int
    """the rank at the other end"""
    tag: int
    codecs: tuple[TensorCodec, ...]
    """one per tensor"""

    @property
    def has_flags(self) -> bool:
        """Whether flags are sent before the tensors, one for each of them: 0 for an optional one that is None."""
        return any(codec.is_optional for codec in self.codecs)


def flags_of(tensors: Tensors) -> Tensor:
    """The flags of a message: which of its tensors exist."""
    return torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8)


def apply_flags(codecs: Sequence[TensorCodec], tensors: Tensors, flags: Sequence[int]) -> list[Tensor | None]:
    """The tensors of a received message, with None for each optional one that the sender did not have."""
    triples = zip(codecs, tensors, flags, strict=True)
    return [None if codec.is_optional and not flag else tensor for codec, tensor, flag in triples]


class SendSlot(ABC):
    """The sending end of a message, prepared once and used in every step: `put`, `send`, then `release` or `finish`."""

    __slots__ = ("_tensors", "route")
    is_held = True
    """whether the message stays in this rank's memory after `send`, so that `release` has something to free"""

    def __init__(self, route: Route) -> None:
        self.route = route
        self._tensors: Tensors = ()

    def put(self, tensors: Tensors) -> None:
        """Store the tensors that `send` will send."""
        self._tensors = tensors

    @abstractmethod
    def send(self) -> None:
        """Start sending, without waiting."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory of a message that is known to have arrived."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the message has arrived, unless it was released."""

    def clear(self) -> None:
        """Drop the message without waiting, after a failure."""
        self._tensors = ()


class RecvSlot(ABC):
    """The receiving end of a message, prepared once and used in every step: `post`, `wait`, `take`."""

    __slots__ = ("received", "route")

    def __init__(self, route: Route) -> None:
        self.route = route
        self.received: Tensors | None = None
        """the tensors, from `wait` until `take`"""

    @abstractmethod
    def post(self) -> None:
        """Start receiving, without waiting."""

    @property
    def is_ready(self) -> bool:
        """Whether `wait` may be called; False only if the sender is a rank of this process that must run first."""
        return True

    @abstractmethod
    def wait(self) -> None:
        """Wait until the message has arrived."""

    def take(self) -> Tensors:
        """The received tensors, once they were waited for; the slot keeps no reference."""
        received, self.received = self.received, None
        return received or ()

    def clear(self) -> None:
        """Drop the message, after a failure."""
        self.received = None


class Transport(ABC):
    """Creates the slots of messages.

    `begin_step` sets a check that runs once, before the first message: the ranks exchange votes at the start of a step,
    and compute until the first message needs the result.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """of the tensors that are sent and received"""
        self._check: Callable[[], object] | None = None
        self.problem: Exception | None = None
        """why the check of this step failed: then no rank has sent a message in it"""

    @abstractmethod
    def send_slot(self, route: Route) -> SendSlot:
        """The sending end of a message."""

    @abstractmethod
    def recv_slot(self, route: Route) -> RecvSlot:
        """The receiving end of a message."""

    def begin_step(self, check: Callable[[], object] | None = None) -> None:
        """Begin a step; `check` will be called before its first message is sent or received."""
        self._check, self.problem = check, None

    def run_check(self) -> None:
        """Run the check if it has not run yet; the program calls this before its first message."""
        check, self._check = self._check, None
        if check is not None:
            try:
                check()
            except Exception as error:
                self.problem = error
                raise

    def clear(self) -> None:
        """Drop messages in transit, after a failure."""
        self._check = None
