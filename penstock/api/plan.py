"""plan: search for the best plan of a model, from one example batch."""

import logging
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.api.arguments import LossFn, check_loss_fn, check_split
from penstock.api.local_ranks import local_ranks, shared_cores
from penstock.api.measuring import BUDGET_SECONDS, measure, measured_model
from penstock.api.progress import progress
from penstock.batches import Batch, BatchSplitter, Microbatch, Split, explain_failure, find_split
from penstock.capture import (
    Captured,
    Granularity,
    find_head,
    shard_vocabulary,
    sharded_granularity,
    sharded_head,
    with_loss,
)
from penstock.capture import capture as record_model
from penstock.errors import CaptureError, FitError, NoLossError, PenstockWarning, PlanError
from penstock.ir import (
    MAX_MICROBATCHES,
    MAX_RANKS,
    Cluster,
    Device,
    DeviceSpeed,
    Graph,
    Partition,
    Plan,
    Profile,
    Program,
    Replicas,
    Schedule,
    SplitRule,
    TrainingState,
    as_int,
    find_device,
    find_link,
    node_cluster,
)
from penstock.loss import has_parameters
from penstock.partitioners import Division
from penstock.planner import (
    AUTO,
    DevicePool,
    Measured,
    PlanOptions,
    TensorParallel,
    interpolate_profile,
    search,
    search_devices,
)
from penstock.runtime import mesh_sizes

_LOG = logging.getLogger(__name__)
# Shares of the budget: the least that is left for searching, however long measuring takes, and the share after which
# no new candidate is started.
_MIN_SEARCH_SHARE, _SEARCH_END_SHARE = 0.2, 0.85
# The share and the least seconds after which nodes are not timed again; they are timed three times in any case.
_MEASURE_SHARE, _MIN_MEASURE_SECONDS = 0.4, 1.5
_MIN_DEVICES_SHARE = 0.5  # the same for `devices`
# For `devices`: samples of a microbatch, devices of a node, and degrees of tensor parallelism.
_MICROBATCH_SIZES, _PER_NODE, _DEGREES = (1, 2, 4), 8, (1, 2, 4, 8)
_MICROBATCHES_PER_RANK = (4, 1, 2, 8)  # those that "auto" considers, the usual number first
_SLOW_SECONDS = 2.0  # if measuring one size of microbatch takes longer than this, no other size is measured


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int | Cluster | None = None,
    microbatches: int | str = "auto",
    mesh: Any = None,
    schedule: str | Path | Schedule | Program = "auto",
    partitioner: str | Partition | Division | Sequence[Sequence[str]] = "auto",
    stages_per_rank: int | None = None,
    memory: int | str | None = None,
    recompute: str = "none",
    profile: Profile | None = None,
    loss_fn: LossFn | None = None,
    split: Split | None = None,
    speed: DeviceSpeed | None = None,
    device: str | DeviceSpeed | None = None,
    devices: int | None = None,
    tensor_parallel: int | str = 1,
    sequence_parallel: bool = False,
    overlap_collectives: bool = False,
    optimizer: str | None = None,
    precision: str | None = None,
    shard_optimizer: bool = False,
    budget_seconds: float = 10.0,
    depth: int | None = None,
    basic_blocks: Sequence[str | type] = (),
    vocabulary_shards: int | str | None = None,
    target: Any = None,
) -> Plan:
    """Search for the best plan: cuts, placement, schedule, microbatches and recomputation.

    Everything that is "auto" is searched together; `plan.describe()` shows the candidates. Where `split` and the shapes
    of the arguments leave open how they are split, the model is run on the batch and on halves of it, and the plan
    holds the result.

    Args:
        model: any module, also on the meta device, where its costs are estimated instead of measured
        args: the positional arguments of one example batch: a whole batch, not a microbatch
        kwargs: the keyword arguments of that batch
        ranks: the number of pipeline ranks, or a Cluster with the memory, slowness and links of every rank; None: that
            of the mesh. With a number, and costs that are measured here on the CPU, the ranks are processes of this
            machine: the costs of their messages are measured once and cached, and they share its cores
        microbatches: how many microbatches a batch is split into; "auto": 1, 2, 4 or 8 per rank
        mesh: the DeviceMesh that the Pipeline will get: its axis "pp" has the ranks, and those along "dp" are replicas,
            whose averaging of gradients counts in the step; the example is then the batch of one replica
        schedule: a name, a Schedule, a Program or the path of a CSV file; an order with messages is run as it is, one
            without any backward can be evaluated only
        partitioner: a name, a Partition, a Division (whose placement is kept), or lists of module names per stage
        stages_per_rank: None: what the schedule needs, or searched
        memory: the limit of a rank, in bytes or as "24GiB"; None: no limit
        recompute: "none", "full", or "auto": recompute activations where memory requires it
        profile: measured costs of a microbatch; None: measured here
        loss_fn: the loss function that the Pipeline will get; without one, only the loss that the model returns has a
            gradient
        split: the `split` that the Pipeline will get
        speed: the device to estimate for, if the model is on the meta device; None: this one
        device: instead of `speed`, a DeviceSpeed or the name of a preset ("a100", "h100", ...), which also has the
            memory and the links of the ranks where `memory` and `ranks` leave them open
        devices: instead of `ranks`, a number of devices: replicas x pipeline ranks are searched too, the example is the
            batch of all replicas, and `microbatches` must be "auto"; `plan.search.layouts` has all layouts
        tensor_parallel: with `devices`, over how many of them `parallelize_fn` splits each layer; "auto": 1, 2, 4 or 8
        sequence_parallel: with `tensor_parallel`, values between blocks are split over its ranks too, as Megatron does;
            stages of a Pipeline exchange whole values
        overlap_collectives: with `tensor_parallel`, its collectives run beside the matrix products of their block, as
            with Megatron's tp_comm_overlap
        optimizer: "adamw", "adam8bit", "sgd", "muon" or "none": its state counts in memory; None: no state
        precision: "bf16" or "fp16": two-byte parameters have master weights and optimizer state in float32; None,
            "fp32" or "pure-bf16": state has the dtype of the parameters
        shard_optimizer: every replica holds a part of the optimizer's state and of the master weights, as in ZeRO stage
            1, for instance with torch's ZeroRedundancyOptimizer
        budget_seconds: seconds for measuring and searching, approximately
        depth: as in `penstock.capture`: how deep modules are opened
        basic_blocks: as in `penstock.capture`: modules that stay whole
        vocabulary_shards: split the output layer and its cross entropy into this many shards along the vocabulary,
            which may be placed on any ranks; "auto": one per rank if that is possible and predicted to be faster;
            None: do not
        target: with a `loss_fn`, the target of the example batch: the loss then counts in the step;
            `vocabulary_shards` needs it

    Returns:
        The plan with the shortest predicted step that fits in memory.

    Raises:
        CaptureError: if the model cannot be recorded
        PartitionError: if it cannot be cut as asked
        FitError: if no candidate fits in memory
        PlanError: if the arguments do not fit together
    """
    if devices is not None and (ranks is not None or mesh is not None or microbatches != "auto"):
        raise PlanError("devices must be given without ranks, mesh and microbatches", hint="leave them out")
    if devices is not None and profile is not None:
        raise PlanError("profile must not be given with devices: several sizes of microbatches are measured")
    if devices is None and tensor_parallel != 1:
        hint = "devices=64, the number of all devices"
        raise PlanError("tensor_parallel must be given with devices", got=repr(tensor_parallel), hint=hint)
    if (sequence_parallel or overlap_collectives) and tensor_parallel == 1:
        name = "sequence_parallel" if sequence_parallel else "overlap_collectives"
        raise PlanError(f"{name} must be given with tensor_parallel", hint="tensor_parallel=8")
    if vocabulary_shards is not None and (devices is not None or profile is not None):
        raise PlanError("vocabulary_shards does not combine with devices and profile", hint="ranks=4")
    # With `devices` the search makes a Cluster for each layout; this one only holds the memory of a device.
    cluster = _ranks_of(mesh, ranks if devices is None else 1)
    is_measured = device is None and speed is None and profile is None
    is_on_cpu = isinstance(model, nn.Module) and all(each.device.type == "cpu" for each in model.parameters())
    is_here = is_measured and devices is None and not isinstance(ranks, Cluster) and is_on_cpu
    if device is not None:
        speed, cluster = _on_device(device, speed, cluster)
    options = PlanOptions(
        cluster,
        microbatches,
        schedule,
        partitioner,
        stages_per_rank,
        memory,
        recompute,
        budget_seconds,
        TrainingState.named(optimizer, precision),
        shard_optimizer,
    )
    if shard_optimizer and devices is None and options.cluster.replicas.count == 1:
        hint = "devices=64, a mesh with replicas, or Cluster(..., replicas=Replicas(4))"
        raise PlanError("shard_optimizer must be given with replicas", hint=hint)
    granularity = Granularity(depth, basic_blocks)
    if target is not None:
        if loss_fn is None:
            raise PlanError("target must be given with a loss_fn", hint="loss_fn=..., or labels in kwargs")
        if has_parameters(loss_fn):
            raise PlanError("a loss_fn with parameters cannot be planned", hint="leave out target")
    # Profiles are cached: not less for a small budget than what small models need.
    measure_seconds = min(max(_MEASURE_SHARE * options.budget_seconds, _MIN_MEASURE_SECONDS), BUDGET_SECONDS)
    given = options.schedule if isinstance(options.schedule, Schedule | Program) else None
    is_whole = devices is None and (given.num_microbatches if given else options.microbatches) == 1
    examples = Examples(
        model, args, kwargs, split, loss_fn, target, speed, granularity, is_here, measure_seconds, is_whole
    )
    start = time.monotonic()
    if is_here:
        here = local_ranks(options.cluster.ranks)
        here = replace(here, memory=options.cluster.memory, replicas=options.cluster.replicas)
        options = replace(options, ranks=here, memory=None)
    if devices is not None:
        preset = find_device(device)[1] if isinstance(device, str) else None
        split_layers = TensorParallel((), sequence_parallel, overlap_collectives)
        found = _plan_devices(examples, options, devices, tensor_parallel, split_layers, preset)
    elif vocabulary_shards is None:
        found = _plan_examples(examples, options, profile, start)
    else:
        found = _plan_sharded(examples, options, vocabulary_shards, start)
    _LOG.info("plan: %s", found)
    return found


def _plan_examples(examples: "Examples", options: PlanOptions, profile: Profile | None, start: float) -> Plan:
    """Measure the model and search; `start` is when the budget began."""
    models = examples.measured(_microbatch_counts(options, examples), profile)
    if examples.is_here:
        cluster, share = options.cluster, next(iter(models.values())).profile.cpu_share
        cores = shared_cores(cluster.ranks, cluster.replicas.count, share)
        options = replace(options, ranks=replace(cluster, cores=cores), memory=None)
    # Measuring counts towards the budget that the user waits for.
    seconds_left = _SEARCH_END_SHARE * options.budget_seconds - (time.monotonic() - start)
    seconds_left = max(seconds_left, _MIN_SEARCH_SHARE * options.budget_seconds)
    with progress("planning") as update:
        found = search(models, replace(options, budget_seconds=seconds_left), update)
    return replace(found, split=tuple(examples.rules.items()))


def _plan_sharded(examples: "Examples", options: PlanOptions, shards: int | str, start: float) -> Plan:
    """The plan with a split output layer; with "auto" shards, the better of it and the plan without."""
    is_auto = shards == AUTO
    count = options.cluster.ranks if is_auto else as_int(shards) if not isinstance(shards, str) else None
    if count is None or count < 2 - is_auto:
        hint = 'vocabulary_shards=2, "auto", or None'
        raise PlanError("vocabulary_shards must be a whole number, 2 or more", got=repr(shards), hint=hint)
    if examples.loss_fn is not None and examples.target is None:
        hint = "target=labels, those of the example batch"
        raise PlanError("vocabulary_shards with a loss_fn needs the target of the example batch", hint=hint)
    asked = ("vocabulary shards", str(shards))
    without: Plan | None = None
    if is_auto:
        half = replace(options, budget_seconds=options.budget_seconds / 2)
        with suppress(FitError) if count > 1 else nullcontext():
            without = _plan_examples(examples, half, None, start)
        if count == 1 and without is not None:
            return _explained(without, asked, "The output layer is whole: there is one rank only.")
        options, start = half, time.monotonic()
    try:
        head, found = _plan_with_shards(examples, options, count, start)
    except (CaptureError, FitError) as error:
        if without is None:
            raise
        return _explained(without, asked, f"The output layer is whole: {error.problem}.")
    seconds = found.predicted.makespan
    if without is None:
        return _explained(found, asked, f"The output layer {head} is split into {count} shards.")
    other = without.predicted.makespan
    if other <= seconds:
        ratio = f"with {count} shards the step would be {seconds / other:.3f}x as long"
        return _explained(without, asked, f"The output layer {head} is whole: {ratio}.")
    ratio = f"without, the step would be {other / seconds:.3f}x as long"
    return _explained(found, asked, f"The output layer {head} is split into {count} shards: {ratio}.")


def _plan_with_shards(examples: "Examples", options: PlanOptions, count: int, start: float) -> tuple[str, Plan]:
    """The output layer of the model, and the plan with it split into `count` shards."""
    num_microbatches = _microbatch_counts(options, examples)[0]
    head = examples.output_layer(num_microbatches)
    while next(examples.model.get_submodule(head).children(), None) is not None:
        opened = examples.granularity.opened | {head}
        examples = replace(examples, granularity=replace(examples.granularity, opened=opened))
        head = examples.output_layer(num_microbatches)
    model = shard_vocabulary(examples.model, head, count, examples.loss_fn)
    sharded = replace(examples.of_loss(model), granularity=sharded_granularity(model, examples.granularity))
    found = _plan_examples(sharded, options, None, start)
    if sharded_head(found.graph) is None:
        raise CaptureError(
            "an output layer can be split only if the model computes a cross entropy of its logits",
            module=head,
            hint="labels in the example batch, so that the model returns its loss, or loss_fn= and target=",
        )
    return head, found


def _explained(found: Plan, asked: tuple[str, str], reason: str) -> Plan:
    seen = found.search
    return replace(found, search=replace(seen, reasons=(*seen.reasons, reason), asked=(*seen.asked, asked)))


def _ranks_of(mesh: Any, ranks: int | Cluster | None) -> int | Cluster:
    """The ranks of a pipeline and its replicas, as the mesh has them."""
    if mesh is None:
        if ranks is None:
            raise PlanError("ranks must be given", hint="ranks=2, or the mesh that the Pipeline will get")
        return ranks
    num_ranks, num_replicas = mesh_sizes(mesh)
    cluster = ranks if isinstance(ranks, Cluster) else Cluster(num_ranks if ranks is None else ranks)
    if cluster.ranks != num_ranks:
        hint = f"ranks={num_ranks}, or leave it out"
        raise PlanError('ranks must be those along the axis "pp" of the mesh', got=cluster.ranks, hint=hint)
    if cluster.replicas.count not in (1, num_replicas):
        count = cluster.replicas.count
        raise PlanError(
            'a Cluster must have the replicas along the axis "dp" of the mesh', got=count, mesh=num_replicas
        )
    return cluster if cluster.replicas.count == num_replicas else replace(cluster, replicas=Replicas(num_replicas))


def _on_device(
    device: str | DeviceSpeed, speed: DeviceSpeed | None, ranks: int | Cluster
) -> tuple[DeviceSpeed, int | Cluster]:
    """The speed of a device and, for a preset, the ranks with its memory and links where they have none."""
    if speed is not None:
        raise PlanError("speed and device must not both be given", hint="leave out one of them")
    if isinstance(device, DeviceSpeed):
        return device, ranks
    name, preset = find_device(device)
    if not isinstance(ranks, Cluster):
        ranks = node_cluster(ranks, preset.within, preset.across)
    return preset.speed(name), ranks if ranks.memory is not None else replace(ranks, memory=preset.memory)


def _plan_devices(
    examples: "Examples",
    options: PlanOptions,
    devices: int,
    tensor_parallel: int | str,
    split_layers: TensorParallel,
    preset: Device | None,
) -> Plan:
    """Searches replicas x pipeline ranks x tensor parallelism, with microbatches of 1, 2 and 4 samples."""
    count = as_int(devices)
    if count is None or not 1 <= count <= MAX_RANKS:
        raise PlanError("devices must be a whole number, 1 or more", got=repr(devices), limit=MAX_RANKS)
    degrees: tuple[int, ...] = _DEGREES
    if tensor_parallel != "auto":
        degree = as_int(tensor_parallel)
        if degree is None or degree < 1 or count % degree:
            hint = 'tensor_parallel=8, or "auto"'
            sizes = {"got": repr(tensor_parallel), "devices": count}
            raise PlanError("tensor_parallel must divide the devices", hint=hint, **sizes)
        degrees = (degree,)
    start, samples = time.monotonic(), examples.num_samples(MAX_MICROBATCHES)
    samples_each = [size for size in _MICROBATCH_SIZES if samples % size == 0]
    measured = {size: examples.measured([samples // size], None)[samples // size] for size in samples_each}
    pool = DevicePool(count, min(options.cluster.limits, default=None))
    if preset is not None:
        dtypes = Counter[str]()
        for value in measured[samples_each[0]].graph.parameters:
            dtypes[value.spec.dtype] += value.spec.bytes
        peak = preset.peak_flops(dtypes.most_common(1)[0][0] if dtypes else "float32")
        links = find_link(preset.within), find_link(preset.across)
        pool = DevicePool(count, pool.memory, *links, _PER_NODE, peak)
    budget = _SEARCH_END_SHARE * options.budget_seconds - (time.monotonic() - start)
    budget = max(budget, _MIN_DEVICES_SHARE * options.budget_seconds)
    options = replace(options, budget_seconds=budget)
    with progress("planning") as update:
        found = search_devices(measured, options, pool, samples, replace(split_layers, degrees=degrees), update)
    return replace(found, split=tuple(examples.rules.items()))


def _microbatch_counts(options: PlanOptions, examples: "Examples") -> list[int]:
    """The numbers of microbatches to consider; a Schedule that the user gives has one already."""
    if isinstance(options.microbatches, int):
        return [options.microbatches]
    if isinstance(options.schedule, Schedule | Program):
        return [options.schedule.num_microbatches]
    counts = [each * options.cluster.ranks for each in _MICROBATCHES_PER_RANK]
    samples = examples.num_samples(max(counts))
    return [count for count in counts if count <= samples] or [samples]


@dataclass(frozen=True)
class Examples:
    """One example batch of a model, which is split into microbatches of the sizes that a plan may use."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    split: Split | None = None
    loss_fn: LossFn | None = None
    target: Any = None
    """if given, the costs of the loss count"""
    speed: DeviceSpeed | None = None
    """estimate for a device of this speed instead of measuring"""
    granularity: Granularity = field(default_factory=Granularity)
    is_here: bool = False
    """whether the ranks are processes of this machine, which share its cores"""
    measure_seconds: float = BUDGET_SECONDS
    """the `budget` of measuring a microbatch of one size"""
    is_whole: bool = False
    """whether the batch is the only microbatch, so that it need not be split"""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            hint = "penstock.plan(model, args, ranks=..., microbatches=...)"
            raise PlanError("model must be a torch.nn.Module", got=type(self.model).__name__, hint=hint)
        if not isinstance(self.args, list | tuple):
            given = type(self.args).__name__
            raise PlanError("args must be a tuple of the model's arguments", got=given, hint="(x,)")
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            given = type(self.kwargs).__name__
            raise PlanError("kwargs must be a dict of the model's arguments", got=given, hint='{"mask": mask}')
        if self.speed is not None and not isinstance(self.speed, DeviceSpeed):
            hint = "penstock.measure_speed(), or penstock.DeviceSpeed(...)"
            raise PlanError("speed must be a DeviceSpeed", got=repr(self.speed), hint=hint)
        check_loss_fn(self.model, self.loss_fn)
        check_split(self.split, self.model)

    @cached_property
    def rules(self) -> dict[str, SplitRule]:
        """How the batch is split: as given, and as found for arguments whose shapes leave it open."""
        found = {} if self.is_whole else find_split(self.model, self.args, self.kwargs or {}, self.split)
        return {**found, **(self.split or {})}

    def measured(self, counts: Sequence[int], profile: Profile | None) -> dict[int, Measured]:
        """Measure the model for the numbers of microbatches, at least for the first.

        Besides the first, the largest and the smallest number are measured, others are interpolated. With a given
        profile, only the size that it was measured for can be planned.
        """
        if profile is not None:
            return self._with_profile(counts, profile)
        start = time.monotonic()
        models = {counts[0]: self._measured(counts[0])}
        if len(counts) == 1 or time.monotonic() - start > _SLOW_SECONDS:
            return models
        ends = (min(counts), max(counts))
        models |= {count: self._measured(count) for count in ends if count not in models}
        models |= {count: self._interpolated(count, ends, models) for count in counts if count not in models}
        return models

    def of_loss(self, model: nn.Module) -> "Examples":
        """The same batch for a model that returns the loss; if there is a `loss_fn`, one that takes the target too."""
        if self.loss_fn is None:
            return replace(self, model=model)
        return replace(
            self, model=model, kwargs={**(self.kwargs or {}), "target": self.target}, loss_fn=None, target=None
        )

    def _measured(self, count: int) -> Measured:
        captured = self.captured(count)
        graph = self._graph(captured)
        return Measured(graph, self._profile(captured, graph, count))

    def _profile(self, captured: Captured, graph: Graph, count: int) -> Profile:
        if self.loss_fn is None or self.target is None:
            return measure(captured, loss_fn=self.loss_fn, speed=self.speed, budget=self.measure_seconds)
        # The costs of the loss are part of those of the output.
        scored = self.of_loss(with_loss(self.model, self.loss_fn))
        try:
            profile = measure(scored.captured(count), speed=self.speed, budget=self.measure_seconds)
        except (CaptureError, NoLossError) as error:
            # A Pipeline calls the loss as it is, and needs no record of it.
            warnings.warn(f"the loss does not count in the plan: {error}", PenstockWarning, stacklevel=2)
            return replace(self, target=None)._profile(captured, graph, count)
        return profile.with_loss_in_output(graph)

    def _interpolated(self, count: int, ends: tuple[int, int], known: Mapping[int, Measured]) -> Measured:
        captured = self.captured(count)
        graph, sizes = self._graph(captured), [self._microbatches(each)[0].size for each in (ends[0], count, ends[1])]
        share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0]) if sizes[2] != sizes[0] else 0.0
        profiles = (known[end].profile for end in ends)
        try:
            return Measured(graph, interpolate_profile(graph, share, *profiles))
        except PlanError:
            # The model takes another path for this size, so its nodes differ.
            return Measured(graph, self._profile(captured, graph, count))

    def _with_profile(self, counts: Sequence[int], profile: Profile) -> dict[int, Measured]:
        if not isinstance(profile, Profile):
            hint = "penstock.measure(penstock.capture(model, args)), or None to measure here"
            raise PlanError("profile must be a Profile", got=type(profile).__name__, hint=hint)
        graphs = {count: self._graph(self.captured(count)) for count in counts}
        matching = {count: graph for count, graph in graphs.items() if graph.fingerprint == profile.fingerprint}
        if not matching:
            profile.check(graphs[counts[0]])
        return {count: Measured(graph, profile) for count, graph in matching.items()}

    def _microbatches(self, count: int) -> tuple[Microbatch, ...]:
        splitter = BatchSplitter(self.model.forward, self.rules)
        return splitter.split(Batch(self.args, self.kwargs or {}), count)

    def captured(self, count: int) -> Captured:
        microbatches = self._microbatches(count)
        first, last = microbatches[0], microbatches[-1]
        try:
            captured = record_model(self.model, first.args, first.kwargs, self.granularity)
            if last.size == 1 < first.size and any(isinstance(one, _BatchNorm) for one in self.model.modules()):
                # Batch norm may refuse a single sample.
                captured.recording(last.args, last.kwargs)
        except CaptureError as error:
            raise explain_failure(error, self.model.forward, microbatches) from error.__cause__
        return captured

    def output_layer(self, count: int) -> str:
        """The module that makes the logits, or contains their layer."""
        measured = measured_model(self.captured(count), self.loss_fn is not None)
        return find_head(measured.graph, measured.roots)

    def _graph(self, captured: Captured) -> Graph:
        """The graph of a microbatch, with gradients for the loss or, with a loss function, for all outputs."""
        return measured_model(captured, self.loss_fn is not None).graph

    def num_samples(self, most: int) -> int:
        """The number of samples of the batch, at most `most`."""
        return len(self._microbatches(most))
