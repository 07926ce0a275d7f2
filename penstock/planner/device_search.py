"""Divides devices into replicas, pipeline ranks and tensor-parallel ranks, for a batch of fixed size.

Closed-form bounds (the work of the busiest rank, the state of a rank) exclude some divisions. The rest are simulated,
those with the shortest estimated step first, and the best are searched like a plan for one pipeline. Replicas are
equal, so one pipeline is simulated; they average their gradients as the runtime does, stage by stage from the last
backward on. With many microbatches the step is extrapolated from shorter ones, as the steady state of a schedule
repeats.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.errors import FitError, PenstockError, PlanError
from penstock.ir import (
    Cluster,
    DeviceLayout,
    Floats,
    Kind,
    LinkSpeed,
    Plan,
    Replicas,
    Search,
    StateBytes,
    bytes_text,
    node_cluster,
    percent_text,
    seconds_text,
)
from penstock.planner.candidates import LIGHT, LayoutPlan, Measured, excess_bytes, layouts, table_plans
from penstock.planner.options import AUTO, PlanOptions
from penstock.planner.plan_search import OnProgress, search
from penstock.planner.tensor_parallel_costs import TensorParallel, split_tensors
from penstock.schedules import build_on, find

_FIRST_SCHEDULE, _FIRST_INTERLEAVED = "1f1b", "interleaved"
"""the schedules with which divisions are compared, if the schedule is left open"""
_STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 8)
"""numbers of stages per rank that are compared, if they are left open; more than `candidates.py` tries, as only one
schedule is simulated for each"""
_REFINED = 3
"""divisions that are planned with all schedules, as far as the budget allows"""
_SIMULATION_SHARE = 0.5
"""share of the budget for simulating divisions; the rest is for planning the best ones"""
_MIN_SIMULATED = 16
"""divisions that are simulated even if the budget is spent"""
_EXACT = 1e-9
"""difference of two periods of a schedule, as a share, that counts as none"""


@dataclass(frozen=True)
class DevicePool:
    """Equal devices on nodes. Tensor-parallel ranks are next to each other, then pipeline ranks, then replicas."""

    devices: int
    memory: int | None = None
    """bytes of a device; None: no limit"""
    within: LinkSpeed | None = None
    """the link between devices of a node; None: messages take no time"""
    across: LinkSpeed | None = None
    """the link between nodes, per device; None: as within"""
    per_node: int = 8
    peak_flops: float | None = None
    """the datasheet's flop/s of a device, for MFU; None: unknown"""

    def link(self, ranks: int) -> LinkSpeed | None:
        """The slowest link between that many neighbouring devices."""
        return self.within if ranks <= self.per_node or self.across is None else self.across

    def replicas(self, ranks: int, tensor_parallel: int) -> Replicas:
        """The copies of pipelines of that size, and the links between them."""
        size = ranks * tensor_parallel
        count = self.devices // size
        outer = self.link(self.devices)
        if self.within is None or outer is None:
            return Replicas(count)
        return Replicas.over(count, outer, self.within, max(1, self.per_node // size))

    def pipeline(self, ranks: int, tensor_parallel: int) -> Cluster:
        """The pipeline ranks of one replica, and the links to the others."""
        replicas = self.replicas(ranks, tensor_parallel)
        if self.within is None:
            return Cluster(ranks, self.memory, replicas=replicas)
        per_node = max(1, self.per_node // tensor_parallel)
        cluster = node_cluster(ranks, self.within, self.across, per_node)
        return replace(cluster, memory=self.memory, replicas=replicas)


class DeviceSearch:
    """The layouts of devices for one batch: all of them, those that are simulated, and the best, which are planned.

    Args:
        measured: the model, by the samples of a microbatch
        options: those of the plan; ranks, memory and microbatches are not used, as every layout has its own
        pool: the devices
        samples: the samples of the whole batch, of all replicas
        tensor_parallel: the degrees of tensor parallelism that are compared
        on_progress: called with the milliseconds spent and those of the budget
    """

    def __init__(
        self,
        measured: Mapping[int, Measured],
        options: PlanOptions,
        pool: DevicePool,
        samples: int,
        tensor_parallel: TensorParallel = TensorParallel(),  # noqa: B008
        on_progress: OnProgress | None = None,
    ) -> None:
        if not isinstance(options.schedule, str):
            hint = 'a name such as "1f1b", or "auto"'
            raise PlanError("schedule must be a name if devices are searched", got="orders of passes", hint=hint)
        self._measured, self._options, self._pool, self._samples = measured, options, pool, samples
        self._tensor_parallel, self._on_progress = tensor_parallel, on_progress
        self._models: dict[tuple[int, int], _RankModel] = {}
        self._start = time.monotonic()

    def best(self) -> Plan:
        """The plan of the best layout; its `search.layouts` has all of them, with the reason why each lost.

        The best layouts of some divisions are planned with all schedules. Raises FitError if no division fits, and
        PlanError if none suits the batch.
        """
        fitting, lost = self.compared()
        best_of_division: dict[tuple[int, ...], DeviceLayout] = {}
        for layout in fitting:
            sizes = (layout.replicas, layout.ranks, layout.tensor_parallel, layout.samples)
            best_of_division.setdefault(sizes, layout)
        refined = list(best_of_division.values())[:_REFINED]
        found: list[tuple[Plan, DeviceLayout]] = []
        end = self._start + self._options.budget_seconds
        for nth, layout in enumerate(refined):
            left = max(end - time.monotonic(), 0.0)
            if found and not left:
                break
            plan = self._planned(layout, left / (len(refined) - nth))
            predicted = self._with_prediction(layout, plan, plan.predicted.makespan, plan.predicted.bubble)
            found.append((plan, replace(predicted, schedule=plan.choices.schedule)))
        refined = refined[: len(found)]  # the others were not planned, as the budget was spent
        plan, chosen = min(found, key=lambda pair: pair[0].predicted.makespan)
        others = [layout for _, layout in found if layout is not chosen]
        others += [layout for layout in fitting if layout not in refined]
        others = [replace(each, lost=_why_slower(each, chosen)) for each in sorted(others, key=_seconds)]
        # The names of a plan are those of the whole model; its costs are those of one rank.
        whole = self._measured[chosen.samples].graph
        return replace(plan, graph=whole, search=replace(plan.search, layouts=(chosen, *others, *lost)))

    def compared(self) -> tuple[list[DeviceLayout], list[DeviceLayout]]:
        """The layouts that fit, simulated and the fastest first, and those that lost; none is planned further."""
        candidates = list(self._divisions())
        if not any(layout.microbatches for layout in candidates):
            hint = "a batch that is a multiple of the replicas"
            sizes = {"devices": self._pool.devices, "samples": self._samples}
            raise PlanError("no division of the devices suits the batch", hint=hint, **sizes)
        fitting: list[DeviceLayout] = []
        lost = [layout for layout in candidates if layout.lost]
        possible = [layout for layout in candidates if not layout.lost]
        # Those that are too large by estimate are the last, the smallest first: they count only if no other fits.
        estimates = sorted((self._excess(layout), self._estimate(layout), nth) for nth, layout in enumerate(possible))
        end = self._start + _SIMULATION_SHARE * self._options.budget_seconds
        for number, (excess, estimate, nth) in enumerate(estimates):
            layout = possible[nth]
            least = self._model(layout).load(layout.ranks) * layout.microbatches
            if fitting and least >= min(map(_seconds, fitting)):
                lost.append(replace(layout, lost=f"work alone takes {seconds_text(least)}"))
            elif fitting and excess:
                lost.append(replace(layout, lost=f"about {bytes_text(int(excess))} per rank too large by estimate"))
            elif fitting and number >= _MIN_SIMULATED and time.monotonic() > end:
                lost.append(replace(layout, lost=f"not simulated: about {seconds_text(estimate)} by estimate"))
            else:
                if self._on_progress is not None:
                    whole = 1000 * self._options.budget_seconds
                    self._on_progress(round(min(whole, 1000 * (time.monotonic() - self._start))), round(whole))
                layout = self.simulated(layout)
                (lost if layout.lost else fitting).append(layout)
        if not fitting:
            raise self._no_fit(lost)
        # Those with a prediction first, then those that suit the batch.
        lost.sort(key=lambda each: (each.makespan is None, not each.microbatches, -each.replicas))
        return sorted(fitting, key=_seconds), lost

    # All layouts

    def _divisions(self) -> Iterator[DeviceLayout]:
        """Every layout; with a reason in `lost` if it is excluded without a simulation."""
        for degree in self._tensor_parallel.degrees:
            if self._pool.devices % degree:
                continue
            left = self._pool.devices // degree
            for ranks in (each for each in range(1, left + 1) if left % each == 0):
                replicas = left // ranks
                sizes = [size for size in self._measured if self._samples % (replicas * size) == 0]
                if not sizes:
                    why = f"{self._samples} samples are not a multiple of {replicas} replicas"
                    yield DeviceLayout(replicas, ranks, degree, 0, 0, lost=why)
                for nth, size in enumerate(sizes):
                    plain = DeviceLayout(replicas, ranks, degree, size, self._samples // (replicas * size))
                    model, limit = self._model(plain), self._pool.memory
                    state, most = int(model.state_bytes(replicas) / ranks), model.most_stages(ranks)
                    if limit is not None and state > limit:
                        why = f"parameters, gradients and optimizer take {bytes_text(state)} of {bytes_text(limit)}"
                        # The same for all sizes.
                        yield from [replace(plain, lost=f"{why} per rank")] if not nth else []
                    elif most < ranks:
                        yield replace(plain, lost=f"only {most} stages would have work")
                    else:
                        for schedule, per_rank in self._orders():
                            if per_rank == 1 or (ranks > 1 and model.most_stages(ranks * per_rank) >= ranks * per_rank):
                                yield replace(plain, schedule=schedule, stages_per_rank=per_rank)

    def _orders(self) -> Iterator[tuple[str, int]]:
        """The schedules and stages per rank that are compared."""
        asked, per_rank = str(self._options.schedule), self._options.stages_per_rank
        allowed = _STAGES_PER_RANK if asked == AUTO else find(asked).allowed_stages_per_rank or _STAGES_PER_RANK
        for each in allowed if per_rank is None else (per_rank,):
            open_schedule = _FIRST_SCHEDULE if each == 1 else _FIRST_INTERLEAVED
            yield (open_schedule if asked == AUTO else asked), each

    def _model(self, layout: DeviceLayout) -> "_RankModel":
        """The model of one tensor-parallel rank, for the microbatches of the layout."""
        key = layout.samples, layout.tensor_parallel
        if key not in self._models:
            link = self._pool.link(layout.tensor_parallel)
            measured = self._measured[layout.samples]
            split = split_tensors(measured, layout.tensor_parallel, link, self._tensor_parallel)
            self._models[key] = _RankModel(split, self._options)
        return self._models[key]

    # Estimates, by which layouts are ordered

    def _least_peak(self, layout: DeviceLayout) -> float:
        """Bytes of the fullest rank if none recomputes and cuts are made for memory; exact for equal layers.

        A rank holds state once and activations for every microbatch in flight. Of schedules other than the two that are
        compared first, one microbatch counts.
        """
        model, ranks, per_rank = self._model(layout), layout.ranks, layout.stages_per_rank
        in_flight, rank = np.ones(ranks), np.arange(ranks)
        if layout.schedule == _FIRST_SCHEDULE:
            in_flight = np.minimum(ranks - rank, layout.microbatches)
        elif layout.schedule == _FIRST_INTERLEAVED:
            chunks = 2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1
            in_flight = np.minimum(chunks, layout.microbatches * per_rank) / per_rank
        # Each rank holds the same bytes if its share of the layers is 1 / (bytes that all layers would take there).
        whole = model.state_bytes(layout.replicas) + in_flight * model.activation_bytes
        return float(1 / (1 / whole).sum()) if whole.min() > 0 else 0.0

    def _excess(self, layout: DeviceLayout) -> float:
        """Bytes that a rank lacks by estimate; 0 if it fits, or may recompute."""
        if self._pool.memory is None or self._options.recompute != "none":
            return 0.0
        return max(0.0, self._least_peak(layout) - self._pool.memory)

    def _estimate(self, layout: DeviceLayout) -> float:
        """Seconds of a step by a formula: work, filling and draining, and the reduction of one stage."""
        model, ranks, per_rank = self._model(layout), layout.ranks, layout.stages_per_rank
        # Ranks with equal loads still wait for each other if their stages are unequal: about half of the difference.
        load = (model.load(ranks) + per_rank * model.load(ranks * per_rank)) / 2
        if self._options.recompute == AUTO and self._pool.memory and self._least_peak(layout) > self._pool.memory:
            load += sum(each.seconds_of(Kind.FORWARD) for each in model.measured.profile.costs) / ranks
        fill = (ranks - 1) * model.total / ranks / per_rank
        replicas = self._pool.replicas(ranks, layout.tensor_parallel)
        return load * layout.microbatches + fill + replicas.reduction_seconds(model.state.gradients / ranks / per_rank)

    # Simulated layouts

    def simulated(self, layout: DeviceLayout) -> DeviceLayout:
        """The layout with its predicted step; `lost` says why it has none, or does not fit."""
        # Two periods of the schedule more than the shortest step that has a steady state.
        period, count = layout.ranks, layout.microbatches
        counts = [2 * period + count % period + each * period for each in range(3)]
        if counts[-1] >= count:
            counts = [count]
        try:
            best = self._compared_plan(layout, counts[0], is_certified=False)
            if best is None:
                return replace(layout, lost="the schedule does not support that many stages")
            plans = [best.plan, *(_plan_for(best, number) for number in counts[1:])]
        except PenstockError as error:
            return replace(layout, lost=error.problem)
        plan = plans[-1]
        step = plan.predicted.makespan
        if len(plans) > 1:
            first, second = np.diff([each.predicted.makespan for each in plans])
            if abs(second - first) <= _EXACT * step and plans[1].predicted.peaks == plan.predicted.peaks:
                step += (count - counts[-1]) / period * float(second)
            else:
                plan = _plan_for(best, count)
                step = plan.predicted.makespan
        # Work of all ranks is proportional to the microbatches.
        busy = (1 - plan.predicted.bubble) * plan.predicted.makespan * count / plan.num_microbatches
        layout = self._with_prediction(layout, plan, step, 1 - busy / step if step else 0.0)
        if excess_bytes(plan) > 0:
            limit = bytes_text(self._pool.memory or 0)
            return replace(layout, lost=f"needs {bytes_text(layout.peak)} of {limit} per rank")
        return layout

    def _compared_plan(self, layout: DeviceLayout, count: int, is_certified: bool) -> LayoutPlan | None:
        """The best plan with the schedule of the layout, for `count` microbatches.

        None if the schedule does not support the stages of the layout.
        """
        asked = self._options_of(layout, count)
        best: LayoutPlan | None = None
        for cut in layouts({count: self._model(layout).measured}, asked):
            for found in table_plans(replace(cut, is_certified=is_certified), asked):
                best = found if best is None else min(best, found, key=_fit_and_seconds)
            # The first cut is for time, with even stages; others help only if it lacks memory, and take long.
            if best is not None and excess_bytes(best.plan) <= 0 and not any(best.plan.choices.recompute):
                break
        return best

    def _options_of(self, layout: DeviceLayout, count: int) -> PlanOptions:
        """The options for the pipeline of a layout, with `count` microbatches."""
        return replace(
            self._options,
            ranks=self._pool.pipeline(layout.ranks, layout.tensor_parallel),
            memory=None,
            microbatches=count,
            schedule=layout.schedule,
            stages_per_rank=layout.stages_per_rank,
            budget_seconds=0.0,
        )

    # Planned layouts

    def _planned(self, layout: DeviceLayout, budget_seconds: float) -> Plan:
        """The plan of a layout, with all schedules that the options allow."""
        asked = self._options_of(layout, layout.microbatches)
        asked = replace(asked, schedule=self._options.schedule, budget_seconds=budget_seconds)
        plan = search({layout.microbatches: self._model(layout).measured}, asked, self._on_progress)
        if plan.predicted.makespan <= _seconds(layout):
            return plan
        # Without time for more cuts, the search may end with a slower plan than the one that was compared.
        compared = self._compared_plan(layout, layout.microbatches, is_certified=True)
        if compared is None or _fit_and_seconds(compared) >= (False, plan.predicted.makespan):
            return plan
        return replace(compared.plan, search=Search(asked=plan.search.asked))

    def _with_prediction(self, layout: DeviceLayout, plan: Plan, step: float, bubble: float) -> DeviceLayout:
        """The layout with the recomputation and memory of its plan, and a step of that many seconds."""
        mfu = None
        flops = self._measured[layout.samples].profile.model_flops * layout.microbatches * layout.replicas
        if flops and step and self._pool.peak_flops is not None:
            mfu = flops / (step * self._pool.peak_flops * self._pool.devices)
        return replace(
            layout,
            recomputed=sum(plan.choices.recompute),
            makespan=step,
            bubble=max(0.0, bubble),
            peak=max(plan.predicted.peaks),
            mfu=mfu,
        )

    def _no_fit(self, lost: Sequence[DeviceLayout]) -> FitError:
        """The error, with the layout that lacks the least memory."""
        suited = [layout for layout in lost if layout.microbatches]
        nearest = min(suited, key=lambda layout: layout.peak or self._least_peak(layout))
        where = f"{nearest.replicas} replicas x {nearest.ranks} ranks x {nearest.tensor_parallel}"
        options = self._options
        ways = ["more devices or memory", "a larger tensor_parallel"]
        ways += ['recompute="auto"'] if options.recompute != AUTO else []
        ways += ["shard_optimizer=True"] if options.training.optimizer != "none" and not options.shard_optimizer else []
        problem = f"no division of {self._pool.devices} devices fits; nearest, {where}: {nearest.lost}"
        return FitError(problem, hint=f"{', '.join(ways[:-1])}, or {ways[-1]}")


@dataclass(frozen=True)
class _RankModel:
    """The model of one tensor-parallel rank for one microbatch size, and bounds of its divisions before it is cut."""

    measured: Measured
    options: PlanOptions

    @cached_property
    def node_seconds(self) -> Floats:
        """Forward and backward of the nodes that compute, the longest first; recomputation included if it is full."""
        again = 1.0 if self.options.recompute == "full" else 0.0
        found = [
            (1 + again) * each.seconds_of(Kind.FORWARD) + each.seconds_of(Kind.BACKWARD)
            for each in self.measured.profile.costs
        ]
        return np.sort(np.array(found))[::-1]

    @cached_property
    def total(self) -> float:
        """Seconds of all nodes."""
        return float(self.node_seconds.sum())

    def load(self, ranks: int) -> float:
        """Seconds of a microbatch that the busiest rank has at least.

        It has the mean; and of any k nodes some rank has k / ranks, rounded up.
        """
        count = -(-np.arange(1, len(self.node_seconds) + 1) // ranks)
        return max(self.total / ranks, float((count * self.node_seconds).max()))

    def most_stages(self, stages: int) -> int:
        """The largest number of stages that are not LIGHT of a model cut into `stages`; a node is at most one."""
        limit = LIGHT * self.total / stages
        return int(np.minimum(self.node_seconds / limit, 1.0).sum()) if limit else len(self.node_seconds)

    @cached_property
    def state(self) -> StateBytes:
        """Parameters, gradients and optimizer state of all ranks of a pipeline, without shards."""
        whole = replace(self.options.training, optimizer_shards=1)
        return whole.state_bytes(value.spec for value in self.measured.graph.parameters)

    def state_bytes(self, replicas: int) -> float:
        """The same in a pipeline that has that many replicas, over which the optimizer's state may be sharded."""
        optimizer = self.state.optimizer / (replicas if self.options.shard_optimizer else 1)
        return self.state.parameters + self.state.gradients + optimizer

    @cached_property
    def activation_bytes(self) -> int:
        """Activations of one microbatch on all ranks of a pipeline, without recomputation."""
        profile = self.measured.profile
        if not profile.held:
            return sum(each.memory.kept for each in profile.costs)
        sizes, saved = dict(profile.held), {name for each in profile.costs for name in each.saved.values}
        return sum(each.saved.own for each in profile.costs) + sum(sizes.get(name, 0) for name in saved)


def _seconds(layout: DeviceLayout) -> float:
    assert layout.makespan is not None
    return layout.makespan


def _fit_and_seconds(found: LayoutPlan) -> tuple[bool, float]:
    return excess_bytes(found.plan) > 0, found.plan.predicted.makespan


def _plan_for(found: LayoutPlan, count: int) -> Plan:
    """The plan with the same cuts, recomputation and schedule for another number of microbatches."""
    layout, name = replace(found.layout, num_microbatches=count), found.plan.choices.schedule
    orders = build_on(layout.placement, name, count, layout.costs)
    assert orders is not None
    return layout.plan(orders, name)


def _why_slower(layout: DeviceLayout, chosen: DeviceLayout) -> str:
    """How much longer the step is, and whether because of idle time or because of more work."""
    step, least = _seconds(layout), _seconds(chosen)
    idle = step * layout.bubble - least * chosen.bubble
    work = step - least - idle
    shares = [each.recomputed / (each.ranks * each.stages_per_rank) for each in (layout, chosen)]
    if idle >= work:
        why = "more idle time"
    elif shares[0] > shares[1]:
        why = "more recomputation"
    elif layout.tensor_parallel > chosen.tensor_parallel:
        why = "more collectives"
    else:
        why = "more work"
    return f"{percent_text(step / least - 1)} slower: {why}" if step > least else "as fast"
