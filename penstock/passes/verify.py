"""verify: accepts orders only if every rank gets to its end, whatever the transport, with the right result.

Two message semantics are proven. *Rendezvous* (gloo): a Recv posts a buffer and goes on; a Send waits until its Recv is
posted; a pass waits for its messages. *In order per pair of ranks* (NCCL): nothing waits at a Send or Recv, but the
k-th message that one rank of a pair issues, sent or received, meets the k-th of the other.

One walk proves both. Say the rendezvous walk finishes, in some sequence L, and both ranks of every pair issue the same
messages in the same order. When L reaches the Send of message m, its Recv stands before it in L. The message m' issued
before m on the pair came earlier too: in the same direction both its ends stand above the ends of m; in the other
direction its Send stands above the Recv of m. So when L is at a Send, all earlier messages of the pair are delivered
and both ends of this one are issued: it is delivered as well, and L is also a run of the in-order semantics.
"""

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import (
    Cuts,
    Dependencies,
    Fact,
    Makers,
    Needs,
    Program,
    Schedule,
    as_int,
    find_dependencies,
    walk,
    walk_passes,
)
from penstock.passes.deadlock import deadlock
from penstock.passes.verify_holdings import check_frees, check_in_flight, check_reductions, check_shards
from penstock.passes.verify_messages import Messages, check_messages, check_pairs

_NAMES = {Fact.OUTPUT: "forward", Fact.INPUT_GRADIENT: "input gradient", Fact.WEIGHT_GRADIENT: "weight gradient"}


def verify(subject: Schedule | Program, *, in_flight: int | None = None) -> None:
    """Raise a ScheduleError that names the actions, unless the orders are complete, lawful and free of deadlock.

    `in_flight`: at most so many (stage, microbatch) may be held by one rank between forward and last gradient.
    """
    if not isinstance(subject, Schedule | Program):
        raise ScheduleError("verify takes a Schedule or a Program", given=type(subject).__name__)
    if in_flight is not None and (as_int(in_flight) is None or in_flight < 0):
        raise ScheduleError("in_flight must be a count, 0 or more", in_flight=repr(in_flight))
    program = _as_program(subject)
    passes = program.table.passes
    makers = Makers(passes, program.num_stages, program.num_microbatches)
    _check_once_each(program, makers)
    links = find_dependencies(passes, makers, program.cuts)
    _check_own_order(program, links)
    if isinstance(subject, Schedule):
        _check_schedule_ends(program, links)
    else:
        messages = Messages(program, links)
        check_messages(program, messages, links)
        check_pairs(program, messages)
        _check_program_ends(program, messages)
        check_frees(program, passes)
        check_reductions(program, makers)
        check_shards(program, passes)
    check_in_flight(program, makers, in_flight)


def _as_program(subject: Schedule | Program) -> Program:
    if isinstance(subject, Program):
        return subject
    return Program(subject.placement, subject.num_microbatches, Cuts.chain(subject.num_stages), subject.table)


def _check_once_each(program: Program, makers: Makers) -> None:
    """Every (stage, microbatch) runs forward once and backward once: B, or I and W."""
    for fact, name in _NAMES.items():
        times = makers.times(fact)
        if (times == 1).all():
            continue
        stage, microbatch = (int(place) for place in np.argwhere(times != 1)[0])
        raise ScheduleError(
            f"every stage makes the {name} of every microbatch exactly once",
            stage=stage,
            microbatch=microbatch,
            rank=program.placement[stage],
            times=int(times[stage, microbatch]),
        )


def _check_own_order(program: Program, links: Dependencies) -> None:
    """What a rank needs from itself it has done before."""
    rank = program.table.rank_of
    late = (rank[links.waiter] == rank[links.needed]) & (links.needed >= links.waiter)
    if late.any():
        row = int(np.argmax(late))
        waiter, needed = int(links.waiter[row]), int(links.needed[row])
        raise deadlock(program, {int(rank[waiter]): (waiter, needed)})


def _check_schedule_ends(program: Program, links: Dependencies) -> None:
    result = walk_passes(program.table, links)
    if not result.finished:
        raise deadlock(program, result.blocked)


def _check_program_ends(program: Program, messages: Messages) -> None:
    """The rendezvous walk, over the actions that wait: Sends, and the passes that use messages."""
    waits = np.zeros(len(program.table.codes), dtype=np.bool_)
    waits[messages.send] = waits[messages.user] = True
    reached = np.concatenate(([0], np.cumsum(waits)))
    # A Recv never waits: it is posted once its rank is done with the last item above it, if there is any.
    posted = reached[messages.recv] - 1
    is_late = posted >= reached[program.table.starts[program.table.rank_of[messages.recv]]]
    waiter = np.concatenate((reached[messages.send][is_late], reached[messages.user]))
    needed = np.concatenate((posted[is_late], reached[messages.send]))
    result = walk(reached[program.table.starts].tolist(), Needs.of(int(reached[-1]), waiter, needed))
    if not result.finished:
        index = np.flatnonzero(waits).tolist()
        needed_by = dict(zip(messages.send.tolist(), messages.recv.tolist(), strict=True))
        stands = {rank: (index[at], index[lacking]) for rank, (at, lacking) in result.blocked.items()}
        raise deadlock(program, {rank: (at, needed_by.get(at, lacking)) for rank, (at, lacking) in stands.items()})
