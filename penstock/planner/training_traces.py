"""RecordedTraining: the passes of a training run of any framework, with their times, and their simulation.

It holds some steps of one or more replicas. Its costs are per stage and microbatch, so that the simulation of a step
differs from the measurement only by what passes and messages do not explain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import fmean
from typing import Any, NamedTuple

from penstock.errors import FormatError, ScheduleError
from penstock.ir import (
    PASS_ACTIONS,
    PASS_NAMES,
    Cluster,
    ComputeAction,
    Kind,
    MessageCost,
    Placement,
    Program,
    Schedule,
    StageCosts,
    Trace,
)
from penstock.passes import lower
from penstock.planner.synthesis import ScheduleProblem
from penstock.planner.synthesis.evaluate import evaluate
from penstock.planner.synthesis.problem import RankOrders, rank_orders, to_schedule
from penstock.simulate import simulate

_MAX_SECONDS = 1e10
"""more than the seconds since 1970, which starts may be counted from"""
_HINT = (
    "ranges such as PP:2F0, which torch's multi-stage schedules record, a parquet file with optype and mb_id, a log of "
    "Megatron with timers, or run.json"
)


class RecordedPass(NamedTuple):
    """One pass, and when it ran."""

    rank: int
    kind: str
    """a letter of PASS_ACTIONS"""
    stage: int
    microbatch: int
    start: float
    seconds: float


@dataclass(frozen=True)
class RecordedStep:
    """The passes of one pipeline in one step."""

    step: int
    replica: int
    passes: tuple[RecordedPass, ...]

    @cached_property
    def schedule(self) -> Schedule:
        """The order in which every rank ran its passes.

        Raises FormatError if passes are missing, repeated, or on other ranks than the rest of their stage.
        """
        rank_of: dict[int, int] = {}
        for each in self.passes:
            if rank_of.setdefault(each.stage, each.rank) != each.rank:
                ranks = sorted({rank_of[each.stage], each.rank})
                hint = "the traces of one replica, or for the trace.json.gz of penstock train the run.json beside it"
                raise FormatError("the passes of a stage must be on one rank", stage=each.stage, ranks=ranks, hint=hint)
        stages, ranks = range(len(rank_of)), sorted(set(rank_of.values()))
        if set(rank_of) != set(stages):
            missing = next(stage for stage in range(len(rank_of) + 1) if stage not in rank_of)
            hint = "the traces of all ranks: penstock what-if rank0.json rank1.json"
            raise FormatError("a stage has no passes", step=self.step, stage=missing, hint=hint)
        orders: list[list[Any]] = [[] for _ in ranks]
        count = 1 + max(each.microbatch for each in self.passes)
        try:
            for each in sorted(self.passes, key=lambda recorded: recorded.start):
                orders[ranks.index(each.rank)].append(PASS_ACTIONS[each.kind](each.stage, each.microbatch))
            made = Schedule.of(Placement(tuple(ranks.index(rank_of[s]) for s in stages)), count, orders)
            _program(made)
        except ScheduleError as error:
            values: dict[str, Any] = error.values
            raise FormatError(
                f"the passes of step {self.step} do not form a schedule: {error.problem}", **values
            ) from None
        return made

    @cached_property
    def costs(self) -> StageCosts:
        """The seconds of every pass, per stage and microbatch."""
        return costs_of({(each.kind, each.stage, each.microbatch): each.seconds for each in self.passes})

    @property
    def start(self) -> float:
        """Start of the first pass."""
        return min(each.start for each in self.passes)

    @property
    def seconds(self) -> float:
        """From the start of the first pass to the end of the last, as measured."""
        return max(each.start + each.seconds for each in self.passes) - self.start


def without_waiting(passes: Iterable[RecordedPass]) -> tuple[RecordedPass, ...]:
    """The passes, each from when its input existed: until then it waited for the message of the stage beside it.

    A pass that ended earlier is left as it is: the clocks of the ranks differ, or it does not read that stage.
    """
    passes = tuple(passes)
    ends = {
        (each.kind == "F", each.stage, each.microbatch): each.start + each.seconds
        for each in passes
        if each.kind != "W"
    }
    found = []
    for each in passes:
        is_forward, end = each.kind == "F", each.start + each.seconds
        beside = each.stage - 1 if is_forward else each.stage + 1
        ready = ends.get((is_forward, beside, each.microbatch), each.start) if each.kind != "W" else each.start
        found.append(each._replace(start=ready, seconds=end - ready) if each.start < ready <= end else each)
    return tuple(found)


def costs_of(seconds: Mapping[tuple[str, int, int], float]) -> StageCosts:
    """Costs from the seconds of passes by kind, stage and microbatch.

    Where only full backwards are known, half of each counts as input gradient and half as weight gradient.
    """
    num_stages = 1 + max(stage for _, stage, _ in seconds)
    count = 1 + max(microbatch for *_, microbatch in seconds)
    table = {
        kind: [[seconds.get((kind, stage, m), 0.0) for m in range(count)] for stage in range(num_stages)]
        for kind in PASS_ACTIONS
    }
    for stage in range(num_stages):
        for m in range(count):
            if ("I", stage, m) in seconds:
                table["B"][stage][m] = table["I"][stage][m] + table["W"][stage][m]
            else:
                table["I"][stage][m] = table["W"][stage][m] = table["B"][stage][m] / 2
    columns: dict[str, Any] = {
        PASS_NAMES[PASS_ACTIONS[letter].kind]: tuple(map(tuple, rows)) for letter, rows in table.items()
    }
    # Messages of one byte: a latency is all that is known of them.
    messages = tuple(MessageCost(stage, stage + 1, 1, 1) for stage in range(num_stages - 1))
    return StageCosts(**columns, messages=messages)


@dataclass(frozen=True)
class RecordedTraining:
    """Recorded steps of one or more replicas of a pipeline."""

    source: str
    """the files that were read"""
    steps: tuple[RecordedStep, ...]
    """in order of step and replica"""
    latency: float = 0.0
    """seconds of a message between ranks, without waiting"""
    outside: float = 0.0
    """seconds of a step besides its passes: gathering, reductions, optimizer, without waiting"""
    step_seconds: tuple[float, ...] = ()
    """measured seconds of each whole step; empty: that of its passes"""

    def __post_init__(self) -> None:
        if not self.steps:
            raise FormatError("no passes of a pipeline were found", source=self.source, hint=_HINT)
        for step in self.steps:
            for recorded in step.passes:
                if not (0 <= recorded.seconds <= _MAX_SECONDS and abs(recorded.start) <= _MAX_SECONDS):
                    raise FormatError(
                        "start and seconds of a pass must be finite, and seconds 0 or more",
                        step=step.step,
                        range=f"{recorded.stage}{recorded.kind}{recorded.microbatch}",
                        start=recorded.start,
                        seconds=recorded.seconds,
                    )
            if not any(recorded.seconds for recorded in step.passes):
                raise FormatError("the passes of a step must take time", source=self.source, step=step.step)
        shapes = {(step.schedule.num_stages, step.schedule.num_microbatches) for step in self.steps}
        if len(shapes) > 1:
            hint = "a recording of steps of one size"
            raise FormatError(
                "all steps must have the same numbers of stages and microbatches", found=sorted(shapes), hint=hint
            )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.steps[0].schedule.num_stages

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks of a replica."""
        return self.steps[0].schedule.num_ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step of one replica."""
        return self.steps[0].schedule.num_microbatches

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The replicas that were recorded."""
        return tuple(sorted({each.replica for each in self.steps}))

    @cached_property
    def by_step(self) -> dict[int, tuple[RecordedStep, ...]]:
        """The recorded pipelines of every step."""
        found: dict[int, list[RecordedStep]] = {}
        for each in self.steps:
            found.setdefault(each.step, []).append(each)
        return {step: tuple(pipelines) for step, pipelines in sorted(found.items())}

    @cached_property
    def measured(self) -> float:
        """Mean seconds of a step."""
        if self.step_seconds:
            return fmean(self.step_seconds)
        return self.outside + fmean(max(each.seconds for each in pipelines) for pipelines in self.by_step.values())

    @cached_property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients were recorded apart."""
        return any(each.kind == "I" for each in self.steps[0].passes)

    def run(self, schedule: Schedule, costs: StageCosts) -> Trace:
        """Simulates any order with the messages of the recording."""
        return simulate(_program(schedule), costs, Cluster(schedule.num_ranks, latency=self.latency))

    def seconds(self, schedule: Schedule, costs: StageCosts) -> float:
        """The makespan of `run`, computed without a trace where possible, which is faster."""
        orders = _orders_in_turn(schedule)
        if orders is None:
            return self.run(schedule, costs).makespan
        cluster = Cluster(schedule.num_ranks, latency=self.latency)
        problem = ScheduleProblem.of(costs, schedule.placement, schedule.num_microbatches, cluster)
        return evaluate(problem, orders).length

    @cached_property
    def simulated(self) -> dict[tuple[int, int], float]:
        """The simulated length of every recorded pipeline, given its own passes, by step and replica."""
        return {(each.step, each.replica): self.seconds(each.schedule, each.costs) for each in self.steps}

    @cached_property
    def errors(self) -> tuple[float, ...]:
        """Relative difference between simulated and measured length of every pipeline, given its own passes."""
        return tuple(self.simulated[each.step, each.replica] / each.seconds - 1 for each in self.steps)

    def mean_costs(self, steps: Iterable[RecordedStep] | None = None) -> StageCosts:
        """The mean seconds of every stage, over microbatches and pipelines; one number per stage."""
        sums: dict[tuple[str, int, int], list[float]] = {}
        for step in self.steps if steps is None else steps:
            for recorded in step.passes:
                # As of a single microbatch: `mean` then turns the entry of each stage into one number.
                sums.setdefault((recorded.kind, recorded.stage, 0), []).append(recorded.seconds)
        return costs_of({key: fmean(values) for key, values in sums.items()}).mean()

    @cached_property
    def equal_costs(self) -> StageCosts:
        """The costs if every pass of a kind took the mean seconds of its kind, over all stages."""
        sums: dict[str, list[float]] = {}
        for step in self.steps:
            for recorded in step.passes:
                sums.setdefault(recorded.kind, []).append(recorded.seconds)
        means = {kind: fmean(values) for kind, values in sums.items()}
        return costs_of({(kind, s, 0): mean for kind, mean in means.items() for s in range(self.num_stages)}).mean()


@lru_cache(maxsize=4096)
def _program(schedule: Schedule) -> Program:
    return lower(schedule)


@lru_cache(maxsize=4096)
def _orders_in_turn(schedule: Schedule) -> RankOrders | None:
    """The pass ids of a schedule; None if a stage does not take its microbatches in turn.

    Pass ids do not have the number of the microbatch: `evaluate` gives each stage the microbatches in order.
    """
    orders = rank_orders(schedule)
    plain = ScheduleProblem.of(StageCosts.uniform(schedule.num_stages), schedule.placement, schedule.num_microbatches)
    return orders if to_schedule(plain, orders) == schedule else None


def recording_of_traces(source: str, traces: Iterable[Trace]) -> RecordedTraining:
    """The recording of traces, each a step."""
    steps, delays = [], list[float]()
    for number, trace in enumerate(traces):
        passes = []
        for rank, action, start, end in trace.spans:
            if action.kind is Kind.OVERLAP:
                raise FormatError("overlapped pairs of passes cannot be taken apart", action=str(action))
            if isinstance(action, ComputeAction):
                passes.append(RecordedPass(rank, action.letter, action.stage, action.microbatch, start, end - start))
        steps.append(RecordedStep(number, 0, tuple(passes)))
        delays += [each.end - each.start for each in trace.transfers]
    # The shortest: others may include waiting for the receiver.
    return RecordedTraining(source, tuple(steps), min(delays, default=0.0))
