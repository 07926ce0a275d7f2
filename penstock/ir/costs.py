"""StageCosts: seconds and bytes per stage, a Profile folded over a Partition."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostError
from penstock.ir.cuts import MAX_STAGES
from penstock.ir.figures import is_finite

_FIGURES = ("forward", "input_grad", "weight_grad", "backward", "activation_bytes", "weight_grad_bytes")


@dataclass(frozen=True)
class MessageCost:
    """Bytes that cross from one stage to another for one microbatch, and the bytes of the gradients that return."""

    producer: int
    consumer: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a stage holds during the whole step."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class StageCosts:
    """Seconds of every kind of pass and bytes of everything held, per stage and for one microbatch.

    Left out: `backward` is input_grad + weight_grad, bytes are 0, and the weight gradient still needs all activations.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...] = ()
    """seconds of a full backward"""
    activation_bytes: tuple[int, ...] = ()
    """kept from the forward until the backward, received inputs included"""
    weight_grad_bytes: tuple[int, ...] = ()
    """the part of activation_bytes that stays between an input gradient and its weight gradient"""
    messages: tuple[MessageCost, ...] = ()
    state: tuple[StateBytes, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(value := getattr(self, field.name), Iterable):
                hint = f"{field.name}=({value!r},) * num_stages"
                raise CostError(f"{field.name} needs one entry per stage", given=repr(value), hint=hint)
            object.__setattr__(self, field.name, tuple(value))
        self._check_figures()
        sums = tuple(i + w for i, w in zip(self.input_grad, self.weight_grad, strict=False))
        defaults = {
            "backward": sums,
            "activation_bytes": (0,) * self.num_stages,
            "weight_grad_bytes": self.activation_bytes or (0,) * self.num_stages,
            "state": (StateBytes(),) * self.num_stages,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        self._check()

    def _check_figures(self) -> None:
        for name in _FIGURES:
            for stage, value in enumerate(getattr(self, name)):
                if not is_finite(value) or value < 0:
                    raise CostError(f"{name} must be a finite number, 0 or more", stage=stage, value=repr(value))

    def _check(self) -> None:
        if not 1 <= self.num_stages <= MAX_STAGES:
            raise CostError("number of stages out of range", stages=self.num_stages, limit=MAX_STAGES)
        for name in _FIGURES:
            if (figures := len(getattr(self, name))) != self.num_stages:
                raise CostError(f"{name} needs one figure per stage", figures=figures, stages=self.num_stages)
        if len(self.state) != self.num_stages:
            raise CostError("state needs one entry per stage", entries=len(self.state), stages=self.num_stages)
        for message in self.messages:
            if not isinstance(message, MessageCost):
                raise CostError("messages are MessageCost records", given=repr(message))
            if not 0 <= message.producer < message.consumer < self.num_stages:
                raise CostError("a message must lead from a stage to a later one", message=message)
            if not _are_bytes(message.forward_bytes, message.backward_bytes):
                raise CostError("a message needs bytes of 0 or more", message=message)
        for stage, state in enumerate(self.state):
            if not isinstance(state, StateBytes):
                raise CostError("state is a StateBytes record per stage", stage=stage, given=repr(state))
            if not _are_bytes(state.parameters, state.gradients, state.optimizer):
                raise CostError("state needs bytes of 0 or more", stage=stage, state=state)

    @classmethod
    def uniform(
        cls, num_stages: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0
    ) -> "StageCosts":
        """Equal stages; by default each pass takes one second and a full backward two."""
        return cls((forward,) * num_stages, (input_grad,) * num_stages, (weight_grad,) * num_stages)

    def times(self, factors: Sequence[float]) -> "StageCosts":
        """The same with passes that take so many times longer, a factor per stage; bytes stay."""
        if len(factors) != self.num_stages:
            raise CostError("costs are for another number of stages", costs=self.num_stages, factors=len(factors))
        return replace(
            self,
            **{
                name: tuple(value * factor for value, factor in zip(getattr(self, name), factors, strict=True))
                for name in ("forward", "input_grad", "weight_grad", "backward")
            },
        )

    def message_bytes(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.float64]:
        """Bytes of each message from a source stage to a target stage; 0 where no message cost is named."""
        sizes: dict[tuple[int, int], int] = {}
        for message in self.messages:
            sizes[message.producer, message.consumer] = message.forward_bytes
            sizes[message.consumer, message.producer] = message.backward_bytes
        if not sizes:
            return np.zeros(len(source))
        pairs, which = np.unique(source * self.num_stages + target, return_inverse=True)
        found = [sizes.get(divmod(int(pair), self.num_stages), 0) for pair in pairs]
        return np.asarray(found, dtype=np.float64)[which]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.forward)


def _are_bytes(*sizes: float) -> bool:
    return all(is_finite(size) and size >= 0 for size in sizes)
