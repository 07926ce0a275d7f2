"""Seconds and bytes per stage, and their computation from a Profile and a Partition.

The cost model is in five places: the costs of stages here, those of messages and of the machine in `cluster.py` (Link,
slowness), the CPU time of the runtime in `overhead.py`, memory that is not of one pass in `training_state.py`, and how
they add up in time in `order_times.py`.

A time that every pass, message or step takes, whatever the model, is a field of Overhead. A term that depends on the
nodes, such as the seconds of a collective inside them, is a field of NodeCost and a field of the same name of
StageCosts, with the metadata SECONDS, by which code that treats all seconds alike finds it (checks, sums over nodes,
scaling, means). Its effect is stated in `NodeCost.seconds_of` and in `StageCosts.seconds`. Bytes of nodes are fields of
NodeBytes or SavedTensors; `compute_stage_costs` adds them up to a field of StageCosts with the metadata BYTES, whose
effect is stated in `StageCosts.allocated`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from penstock.errors import CostError
from penstock.ir.action import Kind
from penstock.ir.arguments import is_finite
from penstock.ir.graph import Graph, Node
from penstock.ir.orders import Floats, Ints
from penstock.ir.partition import Crossing, Partition
from penstock.ir.placement import MAX_STAGES, Placement
from penstock.ir.profile import BYTES, NODE_SECONDS, PASS_NAMES, SECONDS, Profile, term_names
from penstock.ir.training_state import StateBytes, TrainingState

LARGEST = 1e100
"""sums and products of seconds and bytes up to this are finite"""
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
class StageCosts:
    """Seconds of every kind of pass and bytes of everything held, per stage and for one microbatch.

    An entry is a number, or a tuple with one number per microbatch if microbatches differ, as they do with sequences of
    unequal lengths. If left out, `backward` is input_grad + weight_grad, bytes are 0, and the weight gradient needs all
    activations.
    """

    forward: tuple[StageSeconds, ...] = field(metadata=SECONDS)
    """seconds of the forward, one entry per stage"""
    input_grad: tuple[StageSeconds, ...] = field(metadata=SECONDS)
    """seconds of the gradient of the stage's inputs"""
    weight_grad: tuple[StageSeconds, ...] = field(metadata=SECONDS)
    """seconds of the gradient of its parameters"""
    backward: tuple[StageSeconds, ...] = field(default=(), metadata=SECONDS)
    """seconds of a full backward"""
    activation_bytes: tuple[StageBytes, ...] = field(default=(), metadata=BYTES)
    """kept from the forward until the backward, received inputs included"""
    weight_grad_bytes: tuple[StageBytes, ...] = field(default=(), metadata=BYTES)
    """the part of activation_bytes that is held between an input gradient and its weight gradient"""
    messages: tuple[MessageCost, ...] = ()
    """bytes sent between stages; without them messages take no time"""
    state: tuple[StateBytes, ...] = ()
    """bytes that each stage holds during the whole step"""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not isinstance(value := getattr(self, each.name), Iterable):
                hint = f"{each.name}=({value!r},) * num_stages"
                raise CostError(f"{each.name} must have one entry per stage", got=repr(value), hint=hint)
            object.__setattr__(self, each.name, tuple(value))
        for name in _PER_STAGE:
            object.__setattr__(self, name, tuple(_entry(name, *each) for each in enumerate(getattr(self, name))))
        counts = {len(each) for name in _PER_STAGE for each in getattr(self, name) if isinstance(each, tuple)}
        if len(counts) > 1:
            hint = "one number, or one per microbatch"
            raise CostError("costs must have the same number of microbatches", found=sorted(counts), hint=hint)
        nothing = (0,) * self.num_stages
        defaults: dict[str, Any] = {each.name: nothing for each in fields(self) if each.metadata and each.default == ()}
        defaults |= {
            "backward": tuple(map(_sum, self.input_grad, self.weight_grad)),
            "weight_grad_bytes": self.activation_bytes or nothing,
            "state": (StateBytes(),) * self.num_stages,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        if not 1 <= self.num_stages <= MAX_STAGES:
            raise CostError(f"the number of stages must be from 1 to {MAX_STAGES}", got=self.num_stages)
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
        return self._mapped(_SECONDS, lambda stage, seconds: seconds * factors[stage])

    def plus(self, forward: Sequence[float], backward: Sequence[float]) -> "StageCosts":
        """The costs with seconds added to the forwards of each stage and to its backwards, split or not; none below 0.

        A split backward gets them in its input gradient.
        """
        if not any(forward) and not any(backward):
            return self
        more = self._mapped(("forward",), lambda stage, seconds: max(seconds + forward[stage], 0.0))
        return more._mapped(("input_grad", "backward"), lambda stage, seconds: max(seconds + backward[stage], 0.0))

    def scaled(self, factor: float) -> "StageCosts":
        """The costs of microbatches of `factor` times the size; state that is held for the whole step stays."""
        sized = self.times([factor] * self.num_stages)._mapped(_BYTES, lambda _, size: int(size * factor))
        messages = (
            replace(
                each, forward_bytes=int(factor * each.forward_bytes), backward_bytes=int(factor * each.backward_bytes)
            )
            for each in self.messages
        )
        return replace(sized, messages=tuple(messages))

    def _mapped(self, names: Iterable[str], change: Callable[[int, float], float]) -> "StageCosts":
        """The costs with `change(stage, number)` in place of every number of some fields."""
        changed: dict[str, Any] = {
            name: tuple(
                tuple(change(stage, each) for each in entry) if isinstance(entry, tuple) else change(stage, entry)
                for stage, entry in enumerate(getattr(self, name))
            )
            for name in names
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

    def seconds(self, kind: Kind) -> Floats:
        """Seconds of a kind of pass: a row per stage, and a column per microbatch, or one for all of them.

        Whatever adds to the time of a pass is added here: simulation, synthesis and views ask for it.
        """
        return self._by_microbatch(PASS_NAMES[kind])

    def allocated(self, kind: Kind) -> Floats:
        """Bytes that a kind of pass allocates, freed ones below 0, in the shape of `seconds`."""
        kept, late = (self._by_microbatch(name) for name in ("activation_bytes", "weight_grad_bytes"))
        changes = {Kind.FORWARD: kept, Kind.BACKWARD: -kept, Kind.INPUT_GRAD: late - kept, Kind.WEIGHT_GRAD: -late}
        return changes[kind]

    def _by_microbatch(self, name: str) -> Floats:
        entries = getattr(self, name)
        if self.num_microbatches is None:
            return np.asarray(entries, dtype=np.float64)[:, None]
        width = self.num_microbatches
        return np.array([each if isinstance(each, tuple) else (each,) * width for each in entries], dtype=np.float64)

    def mean_seconds(self, kind: Kind) -> tuple[float, ...]:
        """Seconds of a kind of pass of every stage, the mean over microbatches."""
        return tuple(self.mean().seconds(kind)[:, 0].tolist())

    @property
    def work(self) -> tuple[float, ...]:
        """Seconds of a forward and a full backward of every stage, the mean over microbatches."""
        both = zip(self.mean_seconds(Kind.FORWARD), self.mean_seconds(Kind.BACKWARD), strict=True)
        return tuple(forward + backward for forward, backward in both)

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes that the forward of every stage keeps, the most over microbatches."""
        return tuple(int(size) for size in self.most().allocated(Kind.FORWARD)[:, 0])

    def mean(self) -> "StageCosts":
        """The costs with the mean over microbatches in every entry."""
        return self._reduced(lambda entry: sum(entry) / len(entry))

    def most(self) -> "StageCosts":
        """The costs with the largest number over microbatches in every entry."""
        return self._reduced(max)

    def least(self) -> "StageCosts":
        """The costs with the smallest number over microbatches in every entry."""
        return self._reduced(min)

    def _reduced(self, reduce: Callable[[tuple[float, ...]], float]) -> "StageCosts":
        if self.num_microbatches is None:
            return self
        changed: dict[str, Any] = {
            name: tuple(reduce(each) if isinstance(each, tuple) else each for each in getattr(self, name))
            for name in _PER_STAGE
        }
        return replace(self, **changed)

    def message_bytes(self, source: Ints, target: Ints) -> Floats:
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


_SECONDS, _BYTES = term_names(StageCosts, SECONDS), term_names(StageCosts, BYTES)
_PER_STAGE = (*_SECONDS, *_BYTES)


def _entry(name: str, stage: int, value: Any) -> Any:
    """An entry of a field: a number, or a tuple of numbers, one per microbatch."""
    values: tuple[Any, ...] = (value,)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        values = value = tuple(value)
    for each in values:
        if not is_finite(each) or each < 0:
            raise CostError(f"{name} must be a finite number, 0 or more", stage=stage, value=repr(each))
        if each > LARGEST:
            raise CostError(f"{name} must be at most {LARGEST:g}", stage=stage, value=repr(each))
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
        for index, cost in enumerate(costs[stage]):
            if cost.node in again:
                forward = cost.seconds_of(Kind.FORWARD)
                backward, input_grad = forward + cost.backward, forward + cost.input_grad
                costs[stage][index] = replace(cost, backward=backward, input_grad=input_grad)
    seconds: dict[str, Any] = {
        name: [sum(getattr(cost, name) for cost in nodes) for nodes in costs] for name in NODE_SECONDS
    }
    returning = {crossing.consumer for crossing in crossings if crossing.gradients}
    for stage in set(range(len(costs))) - returning:
        # A stage that returns no gradient does its whole backward as weight gradient, and keeps everything until then,
        # the gradients that it receives included.
        seconds["input_grad"][stage], seconds["weight_grad"][stage] = 0.0, seconds["backward"][stage]
        received = sum(crossing.backward_bytes for crossing in crossings if crossing.producer == stage)
        late[stage] = kept[stage] + received
    state = []
    for nodes in runs:
        names = {graph.tensor_of(name) for node in nodes for name in (*node.parameters, *node.buffers)}
        specs = [value.spec for value in (*graph.parameters, *graph.buffers) if value.name in names]
        state.append(training.state_bytes(specs))
    return StageCosts(
        **seconds,
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
    received: list[Counter[str]] = [Counter() for _ in stages]
    """by stage and value the bytes received from other ranks"""
    local_producer: list[dict[str, int]] = [{} for _ in stages]
    """by stage and value the stage of the same rank that made it"""
    for crossing in crossings:
        is_local = placement is not None and placement[crossing.producer] == placement[crossing.consumer]
        for value in crossing.values:
            name = graph.storage_of(value.name)
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

    values = [{graph.storage_of(name) for each in stage for name in each.values} for stage in saved]
    late_values = [{graph.storage_of(name) for each in stage for name in each.late_values} for stage in saved]
    kept, late = [], []
    for stage, each_saved in enumerate(saved):
        gradients = {name for each in each_saved for name in each.late_gradients}
        kept.append(sum(each.own for each in each_saved) + value_bytes(stage, values))
        late_own = sum(each.late_own for each in each_saved) + sum(graph.spec(name).bytes for name in gradients)
        late.append(late_own + value_bytes(stage, late_values))
    return kept, late


def _recomputable_nodes(graph: Graph) -> frozenset[str]:
    """The nodes that a recomputed stage runs again: blocks that write nothing but buffers."""
    buffers = {value.name for value in graph.buffers}
    writers = {writer for group in graph.storage for writer in group.writers}
    writers |= {update.node for update in graph.updates if not buffers.issuperset(update.names)}
    return frozenset(node.name for node in graph.nodes if node.is_block and node.name not in writers)
