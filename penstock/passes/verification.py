"""Accepts orders only if every rank reaches its end, on any transport, with the right result.

Two message semantics are proven. *Rendezvous* (gloo): a Recv posts a buffer and returns; a Send waits until its Recv is
posted; a pass waits for its messages. *In order per pair of ranks* (NCCL): nothing waits at a Send or Recv, but the
k-th message that one rank of a pair issues, sent or received, is matched with the k-th of the other.

One walk proves both. Assume the rendezvous walk finishes, in some sequence L, and both ranks of every pair issue the
same messages in the same order. When L reaches the Send of message m, its Recv is before it in L. The message m' issued
before m on the pair came earlier too: in the same direction both its ends are before the ends of m; in the other
direction its Send is before the Recv of m. So when L is at a Send, all earlier messages of the pair are delivered and
both ends of this one are issued: it is delivered as well, and L is also a run of the in-order semantics.
"""

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import (
    PASS_KINDS,
    Codes,
    Dependencies,
    Fact,
    Ints,
    Kind,
    Needs,
    Program,
    Schedule,
    as_int,
    decode,
    microbatch_of,
    peer_of,
    stage_of,
    walk,
    walk_passes,
)

_FACT_NAMES = {Fact.OUTPUT: "forward", Fact.INPUT_GRADIENT: "input gradient", Fact.WEIGHT_GRADIENT: "weight gradient"}
_MAKERS = {Fact.OUTPUT: "F", Fact.INPUT_GRADIENT: "I", Fact.WEIGHT_GRADIENT: "W"}
_NUM_NAMED = 6
"""missing actions that an error names"""
_USERS = (*PASS_KINDS, Kind.SEND, Kind.RECV)
"""actions that use the tensors of a (stage, microbatch)"""
_CONTEXT = 4
"""actions shown before and after the blocked one"""


def verify(schedule_or_program: Schedule | Program, *, in_flight: int | None = None) -> None:
    """Prove that an order is complete, legal and deadlock-free.

    An order without any backward, which is for evaluation, is complete if it has all forwards.

    Args:
        schedule_or_program: the order of every rank
        in_flight: the most pairs of stage and microbatch that a rank may hold between forward and last gradient;
            None: any number

    Raises:
        ScheduleError: if it is not; it names the actions
    """
    subject = schedule_or_program
    if not isinstance(subject, Schedule | Program):
        raise ScheduleError("verify must be given a Schedule or a Program", got=type(subject).__name__)
    if in_flight is not None and (as_int(in_flight) is None or in_flight < 0):
        raise ScheduleError("in_flight must be a count, 0 or more", in_flight=repr(in_flight))
    program = subject if isinstance(subject, Program) else subject.with_cuts()
    check_complete(program)
    dependencies = program.dependencies()
    _check_own_order(program, dependencies)
    if isinstance(subject, Schedule):
        result = walk_passes(program.table, dependencies)
        if not result.finished:
            raise deadlock_error(program, result.blocked)
    else:
        messages = _Messages(program, dependencies)
        _check_messages(program, messages)
        _check_pairs(program, messages)
        _check_rendezvous(program, messages)
        _check_frees(program)
        _check_reductions(program)
        _check_shards(program)
    if in_flight is not None and not program.is_forward_only:
        _check_in_flight(program, in_flight)


def check_complete(program: Schedule | Program) -> None:
    """Check that every (stage, microbatch) runs forward once and backward once: B, or I and W."""
    for fact, name in _FACT_NAMES.items():
        if fact is not Fact.OUTPUT and program.is_forward_only:
            break
        times = program.makers.times(fact)
        if (times == 1).all():
            continue
        stage, microbatch = (int(place) for place in np.argwhere(times != 1)[0])
        # Without both gradients the full backward is missing.
        has_weights = program.makers.times(Fact.WEIGHT_GRADIENT) > 0
        absent = [
            f"{stage}{'B' if fact is Fact.INPUT_GRADIENT and not has_weights[stage, mb] else _MAKERS[fact]}{mb}"
            for stage, mb in np.argwhere(times == 0).tolist()
        ]
        more = f" and {len(absent) - _NUM_NAMED} more" if len(absent) > _NUM_NAMED else ""
        raise ScheduleError(
            f"every stage must make the {name} of every microbatch exactly once",
            stage=stage,
            microbatch=microbatch,
            rank=program.placement[stage],
            times=int(times[stage, microbatch]),
            **({"missing": ", ".join(absent[:_NUM_NAMED]) + more} if absent else {}),
        )


def _check_own_order(program: Program, dependencies: Dependencies) -> None:
    """A rank makes the values that it needs from its own stages before it uses them."""
    rank = program.table.rank_of
    waiter, needed = dependencies.waiter, dependencies.needed
    late = (rank[waiter] == rank[needed]) & (needed >= waiter)
    if late.any():
        row = int(np.argmax(late))
        raise deadlock_error(program, {int(rank[waiter[row]]): (int(waiter[row]), int(needed[row]))})


class _Messages:
    """The messages that the cuts of a program require, by key: where each is sent, received and used.

    A key is (source stage, target stage, microbatch) as one number; `keys` is sorted and the other arrays are parallel
    to it. `maker` is the index of the pass that makes the values, `user` of the one that uses them. `send` and `recv`
    are -1 if missing.
    """

    def __init__(self, program: Program, dependencies: Dependencies) -> None:
        self._sizes = (program.num_stages, program.num_microbatches)
        rank = program.table.rank_of
        crossing = dependencies.where(rank[dependencies.waiter] != rank[dependencies.needed])
        keys = self._key(crossing.source, crossing.target, crossing.microbatch)
        sequence = np.argsort(keys)
        self.keys: Ints = keys[sequence]
        self.maker: Ints = crossing.needed[sequence]
        self.user: Ints = crossing.waiter[sequence]
        self.send = self._find(program, Kind.SEND)
        self.recv = self._find(program, Kind.RECV)

    def _key(self, source: Codes, target: Codes, microbatch: Codes) -> Ints:
        stages, microbatches = self._sizes
        return (source * stages + target) * microbatches + microbatch

    def _find(self, program: Program, kind: Kind) -> Ints:
        """Per key the index of the program's Send or Recv; raises for unknown and repeated ones."""
        table = program.table
        index = np.flatnonzero(table.kinds == kind)
        codes = table.codes[index]
        ends = (stage_of(codes), peer_of(codes))
        source, target = ends if kind is Kind.SEND else ends[::-1]
        found = self._key(source, target, microbatch_of(codes))
        place = np.minimum(np.searchsorted(self.keys, found), max(len(self.keys) - 1, 0))
        known = self.keys[place] == found if len(self.keys) else np.zeros(len(found), dtype=np.bool_)
        if not known.all():
            raise _error("a message must be needed by a stage on another rank", program, int(index[np.argmin(known)]))
        times = np.bincount(place, minlength=len(self.keys))
        if (times > 1).any():
            second = int(index[place == int(np.argmax(times))][1])
            raise _error("a message must be issued once", program, second)
        result = np.full(len(self.keys), -1, dtype=np.int64)
        result[place] = index
        return result


def _check_messages(program: Program, messages: _Messages) -> None:
    """Every value that crosses ranks is sent after it is made, and its receive is posted before it is used."""
    for kind, index in (("Send", messages.send), ("Recv", messages.recv)):
        if (index < 0).any():
            row = int(np.argmax(index < 0))
            raise _error(
                f"an action needs a value that has no {kind}",
                program,
                int(messages.user[row]),
                hint="a program read from CSV is taken for a chain of stages: give its cuts, or save it as JSON",
            )
    if (early := messages.send < messages.maker).any():
        raise _error("a message is sent before its values exist", program, int(messages.send[np.argmax(early)]))
    if (late := messages.recv > messages.user).any():
        raise _error("a message is received after its values are used", program, int(messages.recv[np.argmax(late)]))


def _check_pairs(program: Program, messages: _Messages) -> None:
    """Both ranks of a pair issue their common messages in the same order."""
    table, rank = program.table, program.table.rank_of
    sender, receiver = rank[messages.send], rank[messages.recv]
    low = np.where(sender < receiver, messages.send, messages.recv)
    high = np.where(sender < receiver, messages.recv, messages.send)
    pair = np.minimum(sender, receiver) * program.num_ranks + np.maximum(sender, receiver)
    sequence = np.argsort(pair * len(rank) + low)
    low, high, pair = low[sequence], high[sequence], pair[sequence]
    crossed = (pair[1:] == pair[:-1]) & (high[1:] < high[:-1])
    if not crossed.any():
        return
    row = int(np.argmax(crossed))
    raise ScheduleError(
        "two ranks issue their messages in different orders, which deadlocks or swaps them on transports without tags",
        ranks=(int(rank[low[row]]), int(rank[high[row]])),
        first=f"{table.action(int(low[row]))}, then {table.action(int(low[row + 1]))}",
        second=f"{table.action(int(high[row + 1]))}, then {table.action(int(high[row]))}",
    )


def _check_rendezvous(program: Program, messages: _Messages) -> None:
    """The rendezvous walk, over the actions that wait: Sends, and passes that use messages."""
    waits = np.zeros(len(program.table.codes), dtype=np.bool_)
    waits[messages.send] = waits[messages.user] = True
    reached = np.concatenate(([0], np.cumsum(waits)))
    # A Recv never waits: it is posted once its rank is done with the last waiting action before it, if there is any.
    posted = reached[messages.recv] - 1
    is_late = posted >= reached[program.table.starts[program.table.rank_of[messages.recv]]]
    waiter = np.concatenate((reached[messages.send][is_late], reached[messages.user]))
    needed = np.concatenate((posted[is_late], reached[messages.send]))
    result = walk(reached[program.table.starts].tolist(), Needs.of(int(reached[-1]), waiter, needed))
    if not result.finished:
        index = np.flatnonzero(waits).tolist()
        recv_of = dict(zip(messages.send.tolist(), messages.recv.tolist(), strict=True))
        # The walk blocks a Send at the action before its Recv; the error names the Recv itself.
        blocked = {rank: (index[at], index[lacking]) for rank, (at, lacking) in result.blocked.items()}
        raise deadlock_error(program, {rank: (at, recv_of.get(at, lacking)) for rank, (at, lacking) in blocked.items()})


def _check_frees(program: Program) -> None:
    """Nothing is used after it is freed, nothing is freed twice."""
    passes = program.table.passes
    freed = np.flatnonzero(program.table.kinds == Kind.FREE)
    codes = program.table.codes[freed]
    gone = np.full((program.num_stages, program.num_microbatches), np.iinfo(np.int64).max)
    gone[stage_of(codes), microbatch_of(codes)] = freed
    # Of several frees of the same values, `gone` has the last.
    if (again := gone[stage_of(codes), microbatch_of(codes)] != freed).any():
        repeated = codes == codes[np.argmax(again)]
        raise _error("a stage's values are freed twice", program, int(freed[repeated][1]))
    uses = np.isin(passes.kind, _USERS)
    late = passes.index[uses] > gone[passes.stage[uses], passes.microbatch[uses]]
    if late.any():
        index = int(passes.index[uses][np.argmax(late)])
        raise _error("an action uses values after they are freed", program, index)


def _check_reductions(program: Program) -> None:
    """If any stage is reduced, every stage is, once, after its last weight gradient."""
    index = np.flatnonzero(program.table.kinds == Kind.REDUCE)
    if not len(index):
        return
    stage = stage_of(program.table.codes[index])
    times = np.bincount(stage, minlength=program.num_stages)
    if (times != 1).any():
        odd = int(np.argmax(times != 1))
        raise ScheduleError("every stage must be reduced exactly once", stage=odd, times=int(times[odd]))
    early = index < program.makers[Fact.WEIGHT_GRADIENT].max(axis=1)[stage]
    if early.any():
        raise _error("a stage is reduced before its last weight gradient", program, int(index[np.argmax(early)]))


def _check_shards(program: Program) -> None:
    """If any parameters are sharded, a stage computes only while its own are gathered, and moves alternate."""
    passes = program.table.passes
    moves = np.isin(passes.kind, (Kind.UNSHARD, Kind.RESHARD))
    if not moves.any():
        return
    chosen = np.flatnonzero(moves | np.isin(passes.kind, PASS_KINDS))
    chosen = chosen[np.lexsort((passes.index[chosen], passes.stage[chosen]))]
    kind, stage = passes.kind[chosen], passes.stage[chosen]
    change = np.where(kind == Kind.UNSHARD, 1, np.where(kind == Kind.RESHARD, -1, 0))
    # Per row 1 if its stage is gathered after it, else 0: a running sum that restarts with every stage.
    opens = np.concatenate(([True], stage[1:] != stage[:-1]))
    total = np.cumsum(change)
    gathered = total - np.repeat((total - change)[opens], np.diff(np.append(np.flatnonzero(opens), len(stage))))
    wrong = np.where(change == 0, gathered != 1, gathered != (change == 1))
    if wrong.any():
        index = int(passes.index[chosen][np.argmax(wrong)])
        raise _error("parameters are not sharded or gathered as the action needs", program, index)


def _check_in_flight(program: Program, limit: int) -> None:
    """No rank holds more (stage, microbatch) at once than the limit."""
    change = np.zeros(len(program.table.codes) + 1, dtype=np.int64)
    np.add.at(change, program.makers[Fact.OUTPUT].ravel(), 1)
    np.add.at(change, program.makers[Fact.WEIGHT_GRADIENT].ravel() + 1, -1)
    # A rank ends with as many as it began with, so one running sum over all ranks starts every rank at zero.
    held = np.cumsum(change)[:-1]
    if held.max() > limit:
        index = int(np.argmax(held > limit))
        raise _error("more microbatches in flight than allowed", program, index, most=int(held.max()), limit=limit)


def _error(problem: str, program: Program, index: int, hint: str = "", **values: object) -> ScheduleError:
    """The error for the action at an index."""
    table = program.table
    action, rank, position = table.action(index), int(table.rank_of[index]), table.position(index)
    return ScheduleError(problem, hint=hint, action=action, rank=rank, position=position, **values)


def deadlock_error(program: Program, blocked: dict[int, tuple[int, int]]) -> ScheduleError:
    """The error for blocked ranks, given by rank as (index of its next action, index that this waits for)."""
    cycle = _find_cycle(program, blocked)
    lines = [_blocked_rank(program, rank, *blocked[rank]) for rank in cycle or sorted(blocked)]
    route = " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0])) if cycle else "no rank can continue"
    return ScheduleError(f"the orders deadlock: {route}\n" + "\n".join(lines))


def _find_cycle(program: Program, blocked: dict[int, tuple[int, int]]) -> list[int]:
    """Ranks that wait for each other in a cycle; empty if there is none."""
    seen: list[int] = []
    rank = min(blocked)
    while rank in blocked and rank not in seen:
        seen.append(rank)
        rank = int(program.table.rank_of[blocked[rank][1]])
    return seen[seen.index(rank) :] if rank in seen else []


def _blocked_rank(program: Program, rank: int, at: int, waits_for: int) -> str:
    table = program.table
    position = table.position(at)
    order = decode(table.rank(rank)[max(0, position - _CONTEXT) : position + _CONTEXT + 1])
    here = min(position, _CONTEXT)
    shown = " ".join(f"[{action}]" if place == here else str(action) for place, action in enumerate(order))
    needed, other = table.action(waits_for), int(table.rank_of[waits_for])
    where = f"{needed} of rank {other}" if other != rank else f"{needed}, which comes later in its own order"
    if waits_for == at:
        where = "its own other half"
    return (
        f"  rank {rank} is blocked at {order[here]} (position {position}), which needs {where}\n      ... {shown} ..."
    )
