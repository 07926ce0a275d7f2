"""Seconds and bytes per stage, and their computation from a Profile and a Partition.

The cost model is in four places: the costs of stages here (`partitioners/costs.py` has the same for many candidate
stages at once), those of messages and of the machine in `cluster.py` (Link, Overhead, slowness), memory that is not of
one pass in `training_state.py`, and how they add up in time in `timing.py`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostError
from penstock.ir.arguments import is_finite
from penstock.ir.graph import Graph, Node
from penstock.ir.partition import Crossing, Partition
from penstock.ir.placement import MAX_STAGES, Placement
from penstock.ir.profile import Profile
from penstock.ir.training_state import TrainingState

_SECONDS = ("forward", "input_grad", "weight_grad", "backward")
_PER_STAGE = (*_SECONDS, "activation_bytes", "weight_grad_bytes")

StageSeconds: TypeAlias = "float | tuple[float, ...]"
"""seconds of a stage: one number for all microbatches, or a tuple with a number per microbatch"""
StageBytes: TypeAlias = "int | tuple[int, ...]"
"""bytes of a stage, in the same form"""


@dataclass(frozen=True)
class MessageCost:
    """Bytes sent from one stage to another for one microbatch, and the bytes of the gradients sent back."""

    producer: int
    """the stage that sends values"""
    consumer: int
    """the stage that reads them and returns gradients"""
    forward_bytes: int
    """bytes of the values"""
    backward_bytes: int
    """bytes of their gradients"""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a stage holds during the whole step."""

    parameters: int = 0
    """bytes of the parameters"""
    gradients: int = 0
    """bytes of their gradients"""
    optimizer: int = 0
    """bytes of the optimizer's state"""
    stashed: int = 0
    """other versions of the parameters that an asynchronous pipeline keeps"""

    @property
    def total(self) -> int:
        """Parameters, gradients, optimizer state and stashed parameters together."""
        return self.parameters + self.gradients + self.optimizer + self.stashed


@dataclass(frozen=True)
class StageCosts:
    """Seconds of every kind of pass and bytes of everything held, per stage and for one microbatch.

    An entry is a number, or a tuple with one number per microbatch if microbatches differ, as they do with sequences of
    unequal lengths. If left out, `backward` is input_grad + weight_grad, bytes are 0, and the weight gradient needs all
    activations.
    """

    forward: tuple[StageSeconds, ...]
    """seconds of the forward, one entry per stage"""
    input_grad: tuple[StageSeconds, ...]
    """seconds of the gradient of the stage's inputs"""
    weight_grad: tuple[StageSeconds, ...]
    """seconds of the gradient of its parameters"""
    backward: tuple[StageSeconds, ...] = ()
    """seconds of a full backward"""
    activation_bytes: tuple[StageBytes, ...] = ()
    """kept from the forward until the backward, received inputs included"""
    weight_grad_bytes: tuple[StageBytes, ...] = ()
    """the part of activation_bytes that is held between an input gradient and its weight gradient"""
    messages: tuple[MessageCost, ...] = ()
    """bytes sent between stages; without them messages take no time"""
    state: tuple[StateBytes, ...] = ()
    """bytes that each stage holds during the whole step"""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(value := getattr(self, field.name), Iterable):
                hint = f"{field.name}=({value!r},) * num_stages"
                raise CostError(f"{field.name} must have one entry per stage", got=repr(value), hint=hint)
            object.__setattr__(self, field.name, tuple(value))
        for name in _PER_STAGE:
            object.__setattr__(self, name, tuple(_entry(name, *each) for each in enumerate(getattr(self, name))))
        counts = {len(each) for name in _PER_STAGE for each in getattr(self, name) if isinstance(each, tuple)}
        if len(counts) > 1:
            hint = "one number, or one per microbatch"
            raise CostError("costs must have the same number of microbatches", found=sorted(counts), hint=hint)
        sums = tuple(map(_sum, self.input_grad, self.weight_grad))
        defaults = {
            "backward": sums,
            "activation_bytes": (0,) * self.num_stages,
            "weight_grad_bytes": self.activation_bytes or (0,) * self.num_stages,
            "state": (StateBytes(),) * self.num_stages,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        if not 1 <= self.num_stages <= MAX_STAGES:
            raise CostError("number of stages out of range", stages=self.num_stages, limit=MAX_STAGES)
        for name in _PER_STAGE:
            if (entries := len(getattr(self, name))) != self.num_stages:
                raise CostError(f"{name} must have one entry per stage", entries=entries, stages=self.num_stages)
        if len(self.state) != self.num_stages:
            raise CostError("state must have one entry per stage", entries=len(self.state), stages=self.num_stages)
        for message in self.messages:
            if not isinstance(message, MessageCost):
                raise CostError("messages must be MessageCost records", got=repr(message))
            if not 0 <= message.producer < message.consumer < self.num_stages:
                raise CostError("a message must lead from a stage to a later one", message=message)
            if not _are_bytes(message.forward_bytes, message.backward_bytes):
                raise CostError("bytes of a message must be 0 or more", message=message)
        for stage, state in enumerate(self.state):
            if not isinstance(state, StateBytes):
                raise CostError("state must be a StateBytes record per stage", stage=stage, got=repr(state))
            if not _are_bytes(state.parameters, state.gradients, state.optimizer, state.stashed):
                raise CostError("bytes of state must be 0 or more", stage=stage, state=state)

    @classmethod
    def uniform(
        cls, num_stages: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0
    ) -> "StageCosts":
        """Equal stages; by default each pass takes one second and a full backward two.

        Args:
            num_stages: number of stages
            forward: seconds of a forward
            input_grad: seconds of an input gradient
            weight_grad: seconds of a weight gradient
        """
        return cls((forward,) * num_stages, (input_grad,) * num_stages, (weight_grad,) * num_stages)

    def times(self, factors: Sequence[float]) -> "StageCosts":
        """The costs with the seconds of each stage multiplied by its factor; bytes stay."""
        if len(factors) != self.num_stages:
            raise CostError("costs must have the same number of stages", costs=self.num_stages, factors=len(factors))
        changed: dict[str, Any] = {
            name: tuple(
                tuple(each * factor for each in value) if isinstance(value, tuple) else value * factor
                for value, factor in zip(getattr(self, name), factors, strict=True)
            )
            for name in _SECONDS
        }
        return replace(self, **changed)

    def plus(self, forward: Sequence[float], backward: Sequence[float]) -> "StageCosts":
        """The costs with seconds added to the forwards of each stage and to its backwards, split or not; none below 0.

        A split backward gets them in its input gradient.
        """
        added = {"forward": forward, "input_grad": backward, "backward": backward}
        if not any(map(any, added.values())):
            return self
        changed: dict[str, Any] = {
            name: tuple(
                tuple(max(each + more, 0.0) for each in value) if isinstance(value, tuple) else max(value + more, 0.0)
                for value, more in zip(getattr(self, name), seconds, strict=True)
            )
            for name, seconds in added.items()
        }
        return replace(self, **changed)

    @cached_property
    def num_microbatches(self) -> int | None:
        """Number of microbatches that the costs are for; None if every entry is one number, for any number of them."""
        entries = (each for name in _PER_STAGE for each in getattr(self, name))
        return next((len(each) for each in entries if isinstance(each, tuple)), None)

    def check_microbatches(self, num_microbatches: int) -> None:
        """Raise CostError if the costs are for another number of microbatches."""
        if self.num_microbatches not in (None, num_microbatches):
            raise CostError(
                "costs must have one number per microbatch",
                costs=self.num_microbatches,
                microbatches=num_microbatches,
                hint="one number per stage fits any number of microbatches",
            )

    def by_microbatch(self, name: str) -> NDArray[np.float64]:
        """One of the fields as an array of a row per stage; a column per microbatch, or one if all entries are one."""
        entries = getattr(self, name)
        if self.num_microbatches is None:
            return np.asarray(entries, dtype=np.float64)[:, None]
        width = self.num_microbatches
        return np.array([each if isinstance(each, tuple) else (each,) * width for each in entries], dtype=np.float64)

    def mean(self, name: str) -> tuple[float, ...]:
        """One of the fields, with the mean over microbatches of every stage."""
        return tuple(sum(each) / len(each) if isinstance(each, tuple) else each for each in getattr(self, name))

    def most(self, name: str) -> tuple[float, ...]:
        """One of the fields, with the largest number of every stage."""
        return tuple(max(each) if isinstance(each, tuple) else each for each in getattr(self, name))

    def least(self) -> "StageCosts":
        """The costs with the smallest number over microbatches in every entry."""
        if self.num_microbatches is None:
            return self
        changed: dict[str, Any] = {
            name: tuple(min(each) if isinstance(each, tuple) else each for each in getattr(self, name))
            for name in _PER_STAGE
        }
        return replace(self, **changed)

    def message_bytes(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.float64]:
        """Bytes of each message from a source stage to a target stage; 0 for a pair that is not in `messages`."""
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
        """Number of stages."""
        return len(self.forward)


def _entry(name: str, stage: int, value: Any) -> Any:
    """An entry of a field: a number, or a tuple of numbers, one per microbatch."""
    values: tuple[Any, ...] = (value,)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        values = value = tuple(value)
    for each in values:
        if not is_finite(each) or each < 0:
            raise CostError(f"{name} must be a finite number, 0 or more", stage=stage, value=repr(each))
    if not values:
        raise CostError(f"{name} must have a number per microbatch, or one for all", stage=stage, got="()")
    return value


def _sum(first: StageSeconds, second: StageSeconds) -> StageSeconds:
    """The sum of two entries, per microbatch if one of them is."""
    if not isinstance(first, tuple) and not isinstance(second, tuple):
        return first + second
    width = len(first) if isinstance(first, tuple) else len(second) if isinstance(second, tuple) else 1
    one, other = (each if isinstance(each, tuple) else (each,) * width for each in (first, second))
    return tuple(i + w for i, w in zip(one, other, strict=True))


def _are_bytes(*sizes: float) -> bool:
    return all(is_finite(size) and size >= 0 for size in sizes)


def compute_stage_costs(
    graph: Graph,
    profile: Profile,
    partition: Partition,
    training: TrainingState = TrainingState(),  # noqa: B008
    placement: Placement | None = None,
    recomputed: Collection[int] = (),
) -> StageCosts:
    """Seconds and bytes of every stage for one microbatch.

    A node that several stages recompute is charged to each of them. A tensor with several tied names is held once per
    stage that uses it; `training` states what gradients and optimizer add to it. With a placement, storage that stages
    of one rank share counts once. The blocks of a `recomputed` stage run once more at the beginning of its backward.
    """
    profile.check(graph)
    crossings, runs = partition.crossings(graph), partition.runs(graph)
    kept, late = _held_bytes(graph, profile, runs, crossings, placement, recomputed)
    costs = [[profile[node.name] for node in nodes] for nodes in runs]
    again = _recomputable_nodes(graph) if recomputed else frozenset()
    for stage in recomputed:
        costs[stage] = [
            replace(cost, backward=cost.forward + cost.backward, input_grad=cost.forward + cost.input_grad)
            if cost.node in again
            else cost
            for cost in costs[stage]
        ]
    forward = [sum(cost.forward for cost in nodes) for nodes in costs]
    backward = [sum(cost.backward for cost in nodes) for nodes in costs]
    input_grad = [sum(cost.input_grad for cost in nodes) for nodes in costs]
    weight_grad = [sum(cost.weight_grad for cost in nodes) for nodes in costs]
    returning = {crossing.consumer for crossing in crossings if crossing.gradients}
    for stage in set(range(len(costs))) - returning:
        # A stage that returns no gradient does its whole backward as weight gradient, and keeps everything until then,
        # the gradients that it receives included.
        input_grad[stage], weight_grad[stage] = 0.0, backward[stage]
        received = sum(crossing.backward_bytes for crossing in crossings if crossing.producer == stage)
        late[stage] = kept[stage] + received
    state = []
    for nodes in runs:
        names = {graph.tensor_of(name) for node in nodes for name in (*node.parameters, *node.buffers)}
        specs = [value.spec for value in (*graph.parameters, *graph.buffers) if value.name in names]
        gradients, optimizer = (sum(map(each, specs)) for each in (training.gradient_bytes, training.optimizer_bytes))
        state.append(StateBytes(sum(spec.bytes for spec in specs), gradients, optimizer))
    return StageCosts(
        forward=tuple(forward),
        input_grad=tuple(input_grad),
        weight_grad=tuple(weight_grad),
        backward=tuple(backward),
        activation_bytes=tuple(kept),
        weight_grad_bytes=tuple(late),
        messages=tuple(MessageCost(c.producer, c.consumer, c.forward_bytes, c.backward_bytes) for c in crossings),
        state=tuple(state),
    )


def _held_bytes(
    graph: Graph,
    profile: Profile,
    runs: Sequence[Sequence[Node]],
    crossings: Sequence[Crossing],
    placement: Placement | None,
    recomputed: Collection[int],
) -> tuple[list[int], list[int]]:
    """Bytes that every stage holds for a microbatch: until the backward, and between input and weight gradient.

    `runs` are the nodes of each stage. A block of a recomputed stage holds only its inputs and copies of the buffers
    that it writes until it runs again in the backward. Without saved tensors in the profile, a stage is taken to hold
    everything that it receives, and nothing else if it is recomputed.
    """
    stages = range(len(runs))
    if not profile.held:
        memory = [[profile[node.name].memory for node in runs[s] if s not in recomputed] for s in stages]
        arriving = [sum(c.forward_bytes for c in crossings if c.consumer == stage) for stage in stages]
        kept = [sum(each.kept for each in memory[s]) + arriving[s] for s in stages]
        return kept, [sum(each.kept_for_weight_grad for each in memory[s]) + arriving[s] for s in stages]
    saved = [[profile[node.name].saved for node in nodes] for nodes in runs]
    if recomputed:
        buffer_bytes = {value.name: value.spec.bytes for value in graph.buffers}
        copies = Counter[str]()
        for update in graph.updates:
            copies[update.node] += sum(buffer_bytes.get(name, 0) for name in update.names)
        again = _recomputable_nodes(graph)
        for stage in recomputed:
            saved[stage] = [
                replace(each, own=copies[node.name], values=node.reads) if node.name in again else each
                for node, each in zip(runs[stage], saved[stage], strict=True)
            ]
    # Saved values go by the first name of their storage group.
    first = {name: group.values[0] for group in graph.storage for name in group.values}
    received: list[Counter[str]] = [Counter() for _ in stages]
    """by stage and value the bytes received from other ranks"""
    local_producer: list[dict[str, int]] = [{} for _ in stages]
    """by stage and value the stage of the same rank that made it"""
    for crossing in crossings:
        is_local = placement is not None and placement[crossing.producer] == placement[crossing.consumer]
        for value in crossing.values:
            name = first.get(value.name, value.name)
            if is_local:
                local_producer[crossing.consumer][name] = crossing.producer
            else:
                received[crossing.consumer][name] += value.spec.bytes
    sizes = dict(profile.held)

    def value_bytes(stage: int, held: Sequence[set[str]]) -> int:
        """Bytes of the saved values of a stage, without those that a stage of the same rank made and holds as well."""
        producer = local_producer[stage]
        own = (name for name in held[stage] if name not in producer or name not in held[producer[name]])
        return sum(received[stage].get(name, sizes.get(name, 0)) for name in own)

    values = [{first.get(name, name) for each in stage for name in each.values} for stage in saved]
    late_values = [{first.get(name, name) for each in stage for name in each.late_values} for stage in saved]
    kept, late = [], []
    for stage, each_saved in enumerate(saved):
        gradients = {name for each in each_saved for name in each.late_gradients}
        kept.append(sum(each.own for each in each_saved) + value_bytes(stage, values))
        late_own = sum(each.late_own for each in each_saved) + sum(graph.spec(name).bytes for name in gradients)
        late.append(late_own + value_bytes(stage, late_values))
    return kept, late


def _recomputable_nodes(graph: Graph) -> frozenset[str]:
    """The nodes that a recomputed stage runs again: leaf modules that write nothing but buffers."""
    buffers = {value.name for value in graph.buffers}
    writers = {writer for group in graph.storage for writer in group.writers}
    writers |= {update.node for update in graph.updates if not buffers.issuperset(update.names)}
    return frozenset(node.name for node in graph.nodes if node.is_leaf and node.name not in writers)
