"""Compiles a step: lowers the schedule, and turns the order of each rank into a flat list of calls."""

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from penstock.capture import LruCache, Recording
from penstock.errors import RunError
from penstock.ir import (
    Action,
    ComputeAction,
    Crossing,
    Cuts,
    Forward,
    InputGrad,
    Kind,
    Message,
    Overlap,
    Plan,
    Program,
    Schedule,
    Value,
    WeightGrad,
    prune_gradients,
)
from penstock.passes import DEFAULT_PASSES, AddShardMoves, lower, verify
from penstock.planner import resized_schedule
from penstock.runtime.agreement import Agreement, autocast_dtype
from penstock.runtime.executor import (
    CompiledAction,
    OverlappedPasses,
    PassRunner,
    RankProgram,
    SameRankSlot,
    SlotValues,
    StagePass,
    Thunk,
)
from penstock.runtime.loss_head import LossHead
from penstock.runtime.model_part import ModelPart
from penstock.runtime.transports import MessageKey, RecvSlot, Route, SendSlot, TensorCodec, Transport
from penstock.stages import Ownership

_LOG = logging.getLogger(__name__)
Edges = Mapping[tuple[int, int], Crossing]
"""the values that cross between stages, by producer and consumer, for one microbatch"""
Roots = tuple[str, ...]
"""the values of a microbatch that its loss is computed from"""
_MAX_PROGRAMS = 64
"""lowered programs that are kept; most batches of a model are cut alike and differ in shapes and, with
token budgets, in the number of microbatches"""


@dataclass(frozen=True)
class CompiledStep:
    """A step that is ready to run on any batch of its kind."""

    has_roots: bool
    """whether every microbatch has values to compute a loss from"""
    program: Program
    agreement: Agreement
    rank_programs: tuple[RankProgram, ...]
    """one per rank of this process"""

    def clear(self) -> None:
        """Drop the values and messages of an interrupted step."""
        for program in self.rank_programs:
            program.clear()


class StepCompiler:
    """Compiles the steps of one plan."""

    def __init__(
        self,
        plan: Plan,
        model_part: ModelPart,
        loss_head: LossHead,
        runner: PassRunner,
        transport: Transport,
        max_active_stages: int,
    ) -> None:
        """`max_active_stages` is that of `RunOptions`."""
        self._plan, self._model_part, self._loss_head = plan, model_part, loss_head
        self._runner, self._transport = runner, transport
        moves = AddShardMoves(max_active_stages)
        self._passes = (*DEFAULT_PASSES, moves) if model_part.fsdp.modules else DEFAULT_PASSES
        self._owners = Ownership(plan.graph, plan.partition)
        self._edges: LruCache[tuple[Recording, Roots, bool], Edges] = LruCache()
        self._programs: LruCache[tuple[bool, int, Cuts], Program] = LruCache(_MAX_PROGRAMS)

    def compile(self, is_training: bool, recordings: tuple[Recording, ...]) -> CompiledStep:
        """Lower the schedule for microbatches with these recordings, and compile it for each rank."""
        edges = self.edges(is_training, recordings)
        cuts = self.cuts(edges)
        program = self._programs.get_or_make(
            (is_training, len(edges), cuts), lambda: self._lower(is_training, len(edges), cuts)
        )
        name = f"{'train' if is_training else 'eval'} on {len(edges)} microbatches"
        agreement = self.agreement(program, edges, name, recordings)
        _LOG.info("compiled %s: %d actions on %d ranks", name, len(program.table.codes), program.num_ranks)
        ranks = self._model_part.groups.own_ranks
        rank_programs = compile_ranks(program, edges, ranks, self._runner, self._transport)
        has_roots = all(self._loss_head.roots(recording, is_training) for recording in recordings)
        return CompiledStep(has_roots, program, agreement, rank_programs)

    def agreement(
        self, program: Program, edges: Sequence[Edges], name: str, recordings: Sequence[Recording]
    ) -> Agreement:
        """The facts about a step that all ranks must share. It has the autocast in which the recordings were made."""
        # Recordings made in another autocast are others, so a compiled step is for one autocast. Without recordings
        # there is no forward.
        options = {"autocast": autocast_dtype(self._model_part.device.type)} if recordings else {}
        lines = (*Agreement.of_options(options).lines, *self._model_part.describe(recordings))
        return Agreement.of_step(program, edges, name, lines)

    def edges(self, is_training: bool, recordings: Sequence[Recording]) -> list[Edges]:
        """The values that cross between stages for each microbatch."""
        roots = self._loss_head.roots
        return [self._crossings(recording, roots(recording, is_training), is_training) for recording in recordings]

    def cuts(self, edges: Sequence[Edges]) -> Cuts:
        """The edges of all microbatches together; an edge carries gradients if it does for any microbatch."""
        all_edges = {edge for crossings in edges for edge in crossings}
        with_gradients = {edge for crossings in edges for edge, crossing in crossings.items() if crossing.gradients}
        return Cuts.of(self._plan.num_stages, all_edges, all_edges - with_gradients)

    def _lower(self, is_training: bool, num_microbatches: int, cuts: Cuts) -> Program:
        """The program for all batches that are cut alike, whatever their shapes."""
        orders: Schedule | Program = self._plan.orders
        if num_microbatches <= self._plan.num_microbatches:
            orders = orders.first(num_microbatches)
        else:
            orders = resized_schedule(self._plan, num_microbatches)
        if is_training and orders.is_forward_only:
            hint = "pipe.eval, or a plan with a schedule that has backwards"
            raise RunError("the schedule of the plan has no backward, so it cannot train", hint=hint)
        if is_training:
            program = lower(orders, cuts=cuts, passes=self._passes)
        else:
            program = lower(orders.forwards(), cuts=cuts, passes=("add_transfers", "hoist_receives"))
        verify(program)
        return program

    def _crossings(self, recording: Recording, roots: Roots, is_training: bool) -> Edges:
        def find() -> Edges:
            adding = recording.nodes_adding_loss if is_training else ()
            graph = prune_gradients(recording.graph, roots if is_training else (), adding)
            partition = self._owners.fit(graph)
            # A loss may use only some of the roots: a value that not every root reaches may get no gradient.
            possible = {root for root in roots if graph.spec(root).requires_grad}
            optional = {name for name, reached_by in recording.outputs_reaching.items() if not possible <= reached_by}
            return {
                (crossing.producer, crossing.consumer): replace(
                    crossing,
                    optional_gradients=tuple(value.name for value in crossing.gradients if value.name in optional),
                )
                for crossing in partition.crossings(graph)
            }

        return self._edges.get_or_make((recording, roots, is_training), find)


def compile_ranks(
    program: Program, edges: Sequence[Edges], ranks: Sequence[int], runner: PassRunner, transport: Transport
) -> tuple[RankProgram, ...]:
    """Compile the orders of some ranks; `edges` has an entry per microbatch.

    The program may be a part of a longer one.
    """
    messages = _StageMessages(program, edges)
    return tuple(_RankCompiler(messages, rank, runner, transport).compile() for rank in ranks)


class _StageMessages:
    """The values and messages between the stages of a program, found once for all ranks of this process."""

    def __init__(self, program: Program, edges: Sequence[Edges]) -> None:
        self.program, self.edges = program, edges
        self.incoming: list[dict[int, list[Crossing]]] = []
        """by microbatch and stage, the values that the stage reads from others"""
        self.outgoing: list[dict[int, list[Crossing]]] = []
        """by microbatch and stage, the values that others read from the stage"""
        for crossings in edges:
            incoming: dict[int, list[Crossing]] = {}
            outgoing: dict[int, list[Crossing]] = {}
            for crossing in crossings.values():
                incoming.setdefault(crossing.consumer, []).append(crossing)
                outgoing.setdefault(crossing.producer, []).append(crossing)
            self.incoming.append(incoming)
            self.outgoing.append(outgoing)
        self._messages_between = _find_messages(program)

    def arrived_sends(self, rank: int) -> dict[int, list[int]]:
        """For positions in the order of a rank at which it waits: the positions of its sends that have arrived by then.

        gloo reports that a send is done only to a wait, which might block. But a message that the other rank sent after
        it had used ours proves that ours arrived: once that message is here, waiting for our send takes no time, and
        the memory of our send can be freed.
        """
        arrived: dict[int, list[int]] = {}
        for peer, ours in sorted(self._messages_between[rank].items()):
            theirs = sorted(self._messages_between[peer].get(rank, []))
            # For each of their messages, the earliest position at which we use it or one that was sent later.
            earliest = list(accumulate((used for _, used in reversed(theirs)), min))[::-1]
            for sent, used in ours:
                first = bisect_right(theirs, used, key=lambda message: message[0])
                if first < len(theirs):
                    arrived.setdefault(earliest[first], []).append(sent)
        return arrived


class _RankCompiler:
    """Compiles the order of one rank."""

    def __init__(self, messages: _StageMessages, rank: int, runner: PassRunner, transport: Transport) -> None:
        self._messages, self._rank = messages, rank
        self._program, self._edges = messages.program, messages.edges
        self._runner, self._transport = runner, transport
        program = messages.program
        self._actions = program.orders[rank]
        self._codes = program.table.rank(rank).tolist()
        self._split = {
            (action.stage, action.microbatch)
            for action, following in pairwise((*self._actions, None))
            if isinstance(action, InputGrad)
            # Not with FSDP, which reduces gradients at the end of backward: that must be the whole backward.
            and action.stage not in runner.fsdp.modules
            # Directly followed by its weight gradient, one full backward does both. With a message in between the
            # split stays, so that the gradient leaves before the weight gradient is computed.
            and following != WeightGrad(action.stage, action.microbatch)
        }
        """the (stage, microbatch) pairs whose backward runs as input gradient and, later, weight gradient"""
        self._codecs: dict[tuple[int, bool], TensorCodec] = {}
        self._sends: dict[MessageKey, SendSlot] = {}
        self._recvs: dict[MessageKey, RecvSlot] = {}
        self._same_rank_slots: dict[MessageKey, SameRankSlot] = {}

    def compile(self) -> RankProgram:
        """Compile all actions of the rank."""
        self._make_message_slots()
        arrived = self._messages.arrived_sends(self._rank)
        actions = [
            self._compile_action(action, code, arrived.get(index, ()))
            for index, (action, code) in enumerate(zip(self._actions, self._codes, strict=True))
        ]
        for index, action in enumerate(self._actions):
            if isinstance(action, Message) and actions[index].run is not None:
                # The first message of a step waits until all ranks are known to take the same step.
                actions[index] = actions[index]._replace(waits=(self._transport.run_check,))
                break
        return RankProgram(
            self._rank,
            tuple(actions),
            self._runner,
            tuple(self._sends.values()),
            tuple(self._recvs.values()),
            tuple(self._same_rank_slots.values()),
        )

    def _make_message_slots(self) -> None:
        """Create a slot for every message that has content."""
        for action, code in zip(self._actions, self._codes, strict=True):
            if not isinstance(action, Message):
                continue
            key = message_key(action)
            source, target, microbatch = key
            crossing = self._edges[microbatch].get((min(source, target), max(source, target)))
            values = () if crossing is None else crossing.gradients if source > target else crossing.values
            if values:
                # One tag per edge and direction is enough: messages of one tag arrive in the order of their sends.
                tag = source * self._program.num_stages + target
                optional = crossing.optional_gradients if action.is_gradient else ()
                codecs = tuple(self._codec(value, action.is_gradient, value.name in optional) for value in values)
                route = Route(code, key, self._program.placement[action.peer], tag, codecs)
                if action.kind is Kind.SEND:
                    self._sends[key] = self._transport.send_slot(route)
                else:
                    self._recvs[key] = self._transport.recv_slot(route)

    def _codec(self, value: Value, is_gradient: bool, is_optional: bool) -> TensorCodec:
        # The codec keeps the value alive, so its id cannot be reused.
        key = (id(value), is_gradient)
        if key not in self._codecs:
            self._codecs[key] = TensorCodec(value, is_gradient, is_optional)
        return self._codecs[key]

    def _compile_action(self, action: Action, code: int, arrived: Sequence[int]) -> CompiledAction:
        runner = self._runner
        if isinstance(action, Message):
            key = message_key(action)
            if action.kind is Kind.SEND:
                return CompiledAction(code, self._sends[key].send if key in self._sends else None)
            return CompiledAction(code, self._recvs[key].post if key in self._recvs else None, is_reported=False)
        if not isinstance(action, ComputeAction | Overlap):
            if action.kind is Kind.FREE or (action.kind is Kind.REDUCE and not runner.has_replicas):
                # Free is a no-op here: activations were released by the last backward.
                return CompiledAction(code)
            runs = {Kind.REDUCE: runner.reduce, Kind.UNSHARD: runner.fsdp.unshard, Kind.RESHARD: runner.fsdp.reshard}
            return CompiledAction(code, partial(runs[action.kind], action.stage))
        methods = {Kind.FORWARD: runner.forward, Kind.WEIGHT_GRAD: runner.weight_grad}
        calls: list[Thunk] = []
        waits: list[tuple[Thunk, ...]] = []
        recvs: list[RecvSlot] = []
        for each in action.parts:
            stage_pass = self._pass(each)
            slots = [slot for _, slot in stage_pass.incoming if isinstance(slot, RecvSlot)]
            calls.append(partial(methods.get(each.kind, runner.backward), stage_pass))
            waits.append(tuple(slot.wait for slot in slots))
            recvs += slots
        # After all waits of the action: one of its messages proves that these sends have arrived.
        sent = [self._sends.get(message_key(self._actions[index])) for index in arrived]
        waits[-1] += tuple(slot.release for slot in sent if slot is not None and slot.is_held)
        run = calls[0] if len(calls) == 1 else OverlappedPasses(calls, waits)
        return CompiledAction(code, run, waits[0], tuple(recvs))

    def _pass(self, action: ComputeAction) -> StagePass:
        stage, microbatch = action.stage, action.microbatch
        incoming = self._messages.incoming[microbatch].get(stage, [])
        outgoing = self._messages.outgoing[microbatch].get(stage, [])
        taken, given = [], []
        if isinstance(action, Forward):
            taken = [(c.values, (c.producer, stage, microbatch)) for c in incoming]
            given = [(c.values, (stage, c.consumer, microbatch)) for c in outgoing]
        elif not isinstance(action, WeightGrad):
            # From the last consumer to the first: autograd adds gradients in that order in the unsplit model.
            outgoing = sorted(outgoing, key=lambda crossing: -crossing.consumer)
            taken = [(c.gradients, (c.consumer, stage, microbatch)) for c in outgoing if c.gradients]
            given = [(c.gradients, (stage, c.producer, microbatch)) for c in incoming if c.gradients]
        sources = [self._slot_values(values, key, self._recvs) for values, key in taken]
        targets = [self._slot_values(values, key, self._sends) for values, key in given]
        received = tuple(name for names, slot in sources if isinstance(slot, RecvSlot) for name in names)
        splits_backward = (stage, microbatch) in self._split
        return StagePass(stage, microbatch, tuple(sources), tuple(targets), splits_backward, received)

    def _slot_values(
        self, values: Sequence[Value], key: MessageKey, slots: Mapping[MessageKey, SendSlot | RecvSlot]
    ) -> SlotValues:
        """The values with the slot of their message; within a rank no message is sent."""
        slot = slots.get(key)
        if slot is None:
            # Both ends use the same slot.
            slot = self._same_rank_slots.setdefault(key, SameRankSlot())
        return SlotValues(tuple(value.name for value in values), slot)


def message_key(message: Message) -> MessageKey:
    """Source stage, target stage and microbatch of a message, the same at both ends."""
    if message.kind is Kind.SEND:
        return message.stage, message.peer, message.microbatch
    return message.peer, message.stage, message.microbatch


def _find_messages(program: Program) -> list[dict[int, list[tuple[int, int]]]]:
    """By rank and other rank, the messages to it: where the rank sends each one, and where the other waits for it."""
    users, placement = [_user_positions(order) for order in program.orders], program.placement.ranks
    messages: list[dict[int, list[tuple[int, int]]]] = [{} for _ in program.orders]
    for source, order in enumerate(program.orders):
        for index, action in enumerate(order):
            if isinstance(action, Message) and action.kind is Kind.SEND:
                target = placement[action.peer]
                used = users[target].get((action.peer, action.microbatch, action.is_gradient))
                if used is not None and target != source:
                    messages[source].setdefault(target, []).append((index, used))
    return messages


def _user_positions(order: Sequence[Action]) -> dict[tuple[int, int, bool], int]:
    """Where a rank waits for the values (False) or gradients (True) of each stage and microbatch."""
    positions = {}
    for index, action in enumerate(order):
        if isinstance(action, ComputeAction | Overlap):
            for each in action.parts:
                if each.kind is not Kind.WEIGHT_GRAD:
                    positions[each.stage, each.microbatch, each.kind is not Kind.FORWARD] = index
    return positions
