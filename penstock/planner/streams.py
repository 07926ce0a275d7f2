"""Pipelines without a flush between batches: their order, and the staleness and bytes of their weights.

A stream is one long 1F1B order over the microbatches of all batches: stage s of S runs `S - 1 - s` forwards ahead and
then alternates forwards and backwards. `Stream` cuts that order into one chunk per batch, so that each rank can run a
batch as soon as it is given, and a last chunk that drains the stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import (
    Backward,
    Cluster,
    Codes,
    ComputeAction,
    Cuts,
    Forward,
    Kind,
    Message,
    Orders,
    Placement,
    Plan,
    Program,
    StageCosts,
    Trace,
    align_columns,
    bytes_text,
    is_count,
    pack,
)
from penstock.passes import HoistReceives, lower, verify
from penstock.schedules import build
from penstock.simulate import simulate

STALENESS = ("stash", "2bw", "predict")


class Stream:
    """The order of every rank over an endless sequence of microbatches, one stage per rank."""

    def __init__(self, cuts: Cuts) -> None:
        """`cuts` are the edges between the stages; gradients may only return to the stage directly before."""
        self.cuts, self.num_ranks = cuts, cuts.num_stages
        skipping = [
            (producer, consumer)
            for producer, consumer in cuts.edges
            if consumer - producer > 1 and (producer, consumer) not in cuts.without_gradient
        ]
        if skipping:
            raise ScheduleError(
                "stages of an asynchronous pipeline that exchange values with gradients must be neighbours",
                edge=skipping[0],
                hint="a partition whose cuts no skip connection crosses, or no staleness",
            )
        self._placement = Placement.loop(self.num_ranks)
        self.num_distinct = 2 * self.num_ranks
        """number of microbatches after which all chunks of one size are the same order, shifted"""
        self._chunks = lru_cache(maxsize=64)(self._cut)

    def warmup(self, stage: int) -> int:
        """The number of forwards that the stage runs ahead of its backwards."""
        return self.num_ranks - 1 - stage

    def chunk(self, before: int, count: int) -> Program:
        """The actions of the next `count` microbatches, after `before` earlier ones; 0 drains the stream.

        Microbatch m of the result is microbatch `m + before - start` of the stream, where `start` is `before`, but at
        most `num_distinct`.
        """
        return self._chunks(min(before, self.num_distinct), count)

    def unrolled(self, counts: Sequence[int]) -> Program:
        """The whole order over batches with these numbers of microbatches, drained at the end."""
        if not counts or min(counts) < 1:
            raise ScheduleError("every batch of a stream must have microbatches", microbatches=tuple(counts))
        parts: list[list[Codes]] = [[] for _ in range(self.num_ranks)]
        before = 0
        for count in (*counts, 0):
            shift = pack(0, 0, before - min(before, self.num_distinct))
            table = self.chunk(before, count).table
            for rank, part in enumerate(parts):
                part.append(table.rank(rank) + shift)
            before += count
        return Program(self._placement, before, self.cuts, Orders([np.concatenate(part) for part in parts]))

    def _cut(self, start: int, count: int) -> Program:
        """The actions between those of the first `start` microbatches and those of all after the next `count`."""
        end = start + count
        # Microbatches that follow do not change the order before them, except that a drained stream has none.
        total = end + self.num_ranks if count else end
        program = lower(build("1f1b", self.num_ranks, total), cuts=self.cuts, passes=("add_transfers",))
        part_of: dict[ComputeAction, int] = {}
        """by compute action, whether it belongs to an earlier part (0), this one (1) or a later one (2)"""
        for rank, order in enumerate(program.orders):
            ends = [self._num_passes(rank, start), self._num_passes(rank, end) if count else len(order)]
            passes = [action for action in order if isinstance(action, ComputeAction)]
            part_of.update((action, sum(index >= limit for limit in ends)) for index, action in enumerate(passes))
        chosen = []
        for order in program.orders:
            first: list[Message] = []
            actions: list[ComputeAction | Message] = []
            part = 0
            for action in order:
                if isinstance(action, Message):
                    # The pass that produces the values, and the pass that reads them.
                    kind = Backward if action.is_gradient else Forward
                    stages = (action.stage, action.peer) if action.kind is Kind.SEND else (action.peer, action.stage)
                    producer, consumer = (kind(stage, action.microbatch) for stage in stages)
                    if action.kind is Kind.SEND and part_of[producer] == 1:
                        actions.append(action)
                    if action.kind is Kind.RECV and part_of[consumer] == 1:
                        # A message from an earlier part is received first, and none before its microbatch is given.
                        (actions if part_of[producer] == 1 and part == 1 else first).append(action)
                elif isinstance(action, ComputeAction):
                    part = part_of[action]
                    if part == 1:
                        actions.append(action)
            chosen.append([*first, *actions])
        partial = Program(self._placement, max(end, 1), self.cuts, Orders.of(chosen))
        return HoistReceives()(partial)

    def _num_passes(self, rank: int, microbatches: int) -> int:
        """The number of passes that the rank runs before the forward with this index."""
        return microbatches + max(0, microbatches - self.warmup(rank))


@dataclass(frozen=True)
class StageStaleness:
    """The staleness of the weights of one stage, and the versions that it keeps."""

    stage: int
    longest: int
    """the most updates that the weights of a forward lack, compared with those that its gradient is applied to"""
    mean: float
    """the mean over the microbatches of a batch"""
    versions: int
    """the most sets of weights that the stage keeps beside its present ones"""
    stashed_bytes: int


def stream_staleness(staleness: str, warmups: Sequence[int], microbatches: int) -> tuple[tuple[int, float, int], ...]:
    """Per stage the largest and the mean staleness, and the number of versions kept, in a long stream.

    `warmups` are the numbers of forwards that each stage runs ahead.
    """
    if staleness == "2bw":
        return ((1, 1.0, 1),) * len(warmups)
    found = []
    for ahead in warmups:
        versions = longest = -(-ahead // microbatches)
        if staleness == "predict":
            # A prediction depends on the version that it starts from and on the batch that it is for.
            windows = (range(last - ahead, last + 1) for last in range(2 * ahead, 2 * ahead + microbatches))
            pairs = ({(k // microbatches, (k - ahead) // microbatches) for k in window} for window in windows)
            versions = max(sum(batch > version for batch, version in each) for each in pairs)
        found.append((longest, ahead / microbatches, versions))
    return tuple(found)


def plan_staleness(plan: Plan, staleness: str) -> tuple[StageStaleness, ...]:
    """The staleness of every stage if the plan is run without flushes."""
    check_stream(plan, staleness)
    warmups = range(plan.num_stages - 1, -1, -1)
    found = stream_staleness(staleness, warmups, plan.num_microbatches)
    return tuple(
        StageStaleness(stage, longest, mean, versions, versions * plan.costs.state[stage].parameters)
        for stage, (longest, mean, versions) in enumerate(found)
    )


def staleness_table(plan: Plan, staleness: str) -> tuple[tuple[str, ...], ...]:
    """The staleness and the stashed bytes of every stage: the names of the columns, then a row per stage."""
    rows = []
    for entry in plan_staleness(plan, staleness):
        # One stage per rank, so both have the same number.
        numbers = (entry.stage, entry.stage, entry.longest, f"{entry.mean:.2f}", entry.versions)
        rows.append((*map(str, numbers), bytes_text(entry.stashed_bytes)))
    return ("stage", "rank", "longest", "mean", "versions", "stashed"), *rows


def staleness_lines(plan: Plan, staleness: str) -> list[str]:
    """`staleness_table` as text, line by line."""
    head = (
        f"asynchronous, staleness {staleness!r}: updates that the weights of a forward lack, and versions that are kept"
    )
    return [head, *align_columns(staleness_table(plan, staleness))]


def simulate_stream(
    plan: Plan,
    staleness: str,
    batches: int,
    costs: StageCosts | None = None,
    cluster: Cluster | None = None,
) -> Trace:
    """The predicted Trace of a number of batches without a flush between them; the order is verified first."""
    if not is_count(batches):
        raise ScheduleError("batches must be a whole number, 1 or more", got=repr(batches))
    program = Stream(plan.cuts).unrolled([plan.num_microbatches] * batches)
    verify(program)
    cluster = cluster or plan.cluster
    stashed = [entry.versions for entry in plan_staleness(plan, staleness)]
    costs = plan.costs_on(cluster) if costs is None else costs
    state = tuple(
        replace(entry, stashed=versions * entry.parameters)
        for entry, versions in zip(costs.state, stashed, strict=True)
    )
    return simulate(program, replace(costs, state=state), cluster)


def check_stream(plan: Plan, staleness: str) -> None:
    """Refuse an unknown mode, and a plan that cannot run without flushes."""
    if staleness not in STALENESS:
        hint = 'staleness="stash", "2bw" or "predict"'
        raise ScheduleError("staleness must be one of the three modes", got=repr(staleness), hint=hint)
    if plan.program is not None or plan.schedule != build("1f1b", plan.num_ranks, plan.num_microbatches):
        raise ScheduleError(
            "an asynchronous pipeline must have a plan with one stage per rank and the schedule 1f1b",
            schedule=plan.choices.schedule,
            stages=plan.num_stages,
            ranks=plan.num_ranks,
            hint='penstock.plan(..., schedule="1f1b")',
        )
    if staleness == "2bw" and plan.num_microbatches < plan.num_ranks - 1:
        raise ScheduleError(
            'with staleness="2bw" a batch must have at least ranks - 1 microbatches, so that two versions are enough',
            ranks=plan.num_ranks,
            microbatches=plan.num_microbatches,
            hint=f'microbatches={plan.num_ranks - 1}, or staleness="stash"',
        )
