"""The instructions of a rank, one class each, and the rules for what an action needs and makes.

The rules are stated over three facts about one (stage, microbatch): its output, its input gradient and its weight
gradient exist. Actions need facts and make facts; it does not matter whether a full or a split backward made them.
`str(action)` is its cell in the grammar of torch's schedule CSV files, see text.py.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, ClassVar, NamedTuple

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.placement import MAX_STAGES, Cuts

MAX_MICROBATCHES = 65536


class Kind(IntEnum):
    """The instruction of an action. The values are part of the integer codes of orders.py, below 16 each."""

    # NumPy looks these up for an operation with an array. Before Python 3.12 an enum answers that with Python code, and
    # NumPy would ignore a KeyboardInterrupt that is raised there: ctrl-c during a long operation would have no effect.
    __array_ufunc__: Any = np.ndarray.__array_ufunc__
    __array_function__: Any = np.ndarray.__array_function__

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRAD = 2
    WEIGHT_GRAD = 3
    OVERLAP = 4
    SEND = 5
    RECV = 6
    REDUCE = 7
    UNSHARD = 8
    RESHARD = 9
    FREE = 10


PASS_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
COMPUTE_KINDS = (*PASS_KINDS, Kind.OVERLAP)


class Fact(IntEnum):
    """A tensor of one (stage, microbatch) exists: its output, its input gradient or its weight gradient."""

    OUTPUT = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2


class Relation(Enum):
    """The stages whose fact is needed, relative to the stage of the action."""

    OWN = "own"
    PRODUCERS = "producers"
    CONSUMERS = "consumers"


class Rule(NamedTuple):
    """The facts that one kind of compute action needs and makes."""

    needs: tuple[tuple[Fact, Relation], ...]
    makes: tuple[Fact, ...]


# A full backward and an input gradient need the same; only what they make differs.
_GRADIENT_NEEDS = ((Fact.OUTPUT, Relation.OWN), (Fact.INPUT_GRADIENT, Relation.CONSUMERS))
RULES: dict[Kind, Rule] = {
    Kind.FORWARD: Rule(needs=((Fact.OUTPUT, Relation.PRODUCERS),), makes=(Fact.OUTPUT,)),
    Kind.BACKWARD: Rule(needs=_GRADIENT_NEEDS, makes=(Fact.INPUT_GRADIENT, Fact.WEIGHT_GRADIENT)),
    Kind.INPUT_GRAD: Rule(needs=_GRADIENT_NEEDS, makes=(Fact.INPUT_GRADIENT,)),
    Kind.WEIGHT_GRAD: Rule(needs=((Fact.INPUT_GRADIENT, Relation.OWN),), makes=(Fact.WEIGHT_GRADIENT,)),
}


class Need(NamedTuple):
    """One fact that must hold before an action runs, or holds after it."""

    fact: Fact
    stage: int
    microbatch: int


class Action:
    """An instruction of one rank."""

    __slots__ = ()
    kind: ClassVar[Kind]
    stage: int


def _check_range(stage: int, microbatch: int = 0) -> None:
    if not 0 <= stage < MAX_STAGES:
        raise ScheduleError("stage out of range", stage=stage, limit=MAX_STAGES)
    if not 0 <= microbatch < MAX_MICROBATCHES:
        raise ScheduleError("microbatch out of range", microbatch=microbatch, limit=MAX_MICROBATCHES)


@dataclass(frozen=True, slots=True)
class ComputeAction(Action):
    """One pass of one stage over one microbatch."""

    stage: int
    microbatch: int
    letter: ClassVar[str]

    def __post_init__(self) -> None:
        _check_range(self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"

    @property
    def parts(self) -> "tuple[ComputeAction, ...]":
        """The single passes of this action: itself."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Forward(ComputeAction):
    """Before: the outputs of every producer have arrived. After: the stage's output exists, activations are kept."""

    kind = Kind.FORWARD
    letter = "F"


@dataclass(frozen=True, slots=True)
class Backward(ComputeAction):
    """Before: own forward ran, every consumer's input gradient has arrived. After: both gradients exist.

    Activations are freed.
    """

    kind = Kind.BACKWARD
    letter = "B"


@dataclass(frozen=True, slots=True)
class InputGrad(ComputeAction):
    """Before: as for Backward. After: the input gradient exists; tensors for the weight gradient are still kept."""

    kind = Kind.INPUT_GRAD
    letter = "I"


@dataclass(frozen=True, slots=True)
class WeightGrad(ComputeAction):
    """Before: own InputGrad ran. After: the weight gradient is accumulated, the remaining activations are freed."""

    kind = Kind.WEIGHT_GRAD
    letter = "W"


PASS_ACTIONS: dict[str, type[ComputeAction]] = {
    action.letter: action for action in (Forward, Backward, InputGrad, WeightGrad)
}
"""the single passes by their letter"""


@dataclass(frozen=True, slots=True)
class Overlap(Action):
    """A forward and a full backward of one rank, run together. Before, after: as for each; neither needs the other."""

    forward: Forward
    backward: Backward
    kind = Kind.OVERLAP

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def stage(self) -> int:  # type: ignore[override]
        """The stage of the forward half."""
        return self.forward.stage

    @property
    def parts(self) -> tuple[ComputeAction, ...]:
        """The forward half and the backward half."""
        return (self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class Message(Action):
    """One end of a bundle of values between two stages; values go to a later stage, gradients to an earlier one."""

    stage: int
    microbatch: int
    peer: int
    verb: ClassVar[str]
    arrow: ClassVar[str]

    def __post_init__(self) -> None:
        _check_range(self.stage, self.microbatch)
        _check_range(self.peer)
        if self.stage == self.peer:
            raise ScheduleError("a stage cannot exchange messages with itself", stage=self.stage)

    @property
    def is_gradient(self) -> bool:
        """Whether gradients travel (from the later stage back to the earlier one)."""
        return (self.peer < self.stage) == (self.kind is Kind.SEND)

    def __str__(self) -> str:
        text = f"{self.stage}{self.verb}_{'B' if self.is_gradient else 'F'}{self.microbatch}"
        return text if abs(self.stage - self.peer) == 1 else f"{text}{self.arrow}{self.peer}"


@dataclass(frozen=True, slots=True)
class Send(Message):
    """Before: the stage made the values. After: they are being sent, and the peer's rank has posted the receive."""

    kind = Kind.SEND
    verb = "SEND"
    arrow = ">"


@dataclass(frozen=True, slots=True)
class Recv(Message):
    """Before: nothing. After: a buffer is posted for the peer's message; the pass that uses the values waits for it."""

    kind = Kind.RECV
    verb = "RECV"
    arrow = "<"


@dataclass(frozen=True, slots=True)
class StageAction(Action):
    """Something done once to a whole stage."""

    stage: int
    word: ClassVar[str]

    def __post_init__(self) -> None:
        _check_range(self.stage)

    def __str__(self) -> str:
        return f"{self.stage}{self.word}"


@dataclass(frozen=True, slots=True)
class Reduce(StageAction):
    """Before: every microbatch's weight gradient of the stage exists. After: they are reduced over the replicas."""

    kind = Kind.REDUCE
    word = "REDUCE_GRAD"


@dataclass(frozen=True, slots=True)
class Unshard(StageAction):
    """Before: the stage's parameters are sharded. After: they are gathered and the stage may compute."""

    kind = Kind.UNSHARD
    word = "UNSHARD"


@dataclass(frozen=True, slots=True)
class Reshard(StageAction):
    """Before: the stage's parameters are gathered. After: only this rank's shard is kept."""

    kind = Kind.RESHARD
    word = "RESHARD"


@dataclass(frozen=True, slots=True)
class Free(Action):
    """Before: the microbatch's weight gradient exists and all its messages are sent. After: nothing is held for it.

    Values for another stage of the same rank are handed over as soon as they are made and are not freed by this.
    """

    stage: int
    microbatch: int
    kind = Kind.FREE

    def __post_init__(self) -> None:
        _check_range(self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}FREE{self.microbatch}"


def needs(action: ComputeAction, cuts: Cuts) -> tuple[Need, ...]:
    """The facts that must hold before the action runs."""
    stages = {
        Relation.OWN: (action.stage,),
        Relation.PRODUCERS: cuts.producers[action.stage],
        Relation.CONSUMERS: cuts.gradient_consumers[action.stage],
    }
    return tuple(
        Need(fact, stage, action.microbatch)
        for fact, relation in RULES[action.kind].needs
        for stage in stages[relation]
    )


def makes(action: ComputeAction) -> tuple[Need, ...]:
    """The facts that hold after the action ran."""
    return tuple(Need(fact, action.stage, action.microbatch) for fact in RULES[action.kind].makes)
