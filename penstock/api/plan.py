"""plan: search for the best plan of a model, from one example batch."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.api.arguments import LossFn
from penstock.api.example_batch import ExampleBatch
from penstock.api.local_ranks import local_ranks, ranks_that_compute
from penstock.api.measuring import BUDGET_SECONDS
from penstock.api.progress import progress
from penstock.batches import Split
from penstock.capture import Granularity, shard_vocabulary, sharded_granularity, sharded_head
from penstock.errors import CaptureError, FitError, PlanError
from penstock.ir import (
    MAX_MICROBATCHES,
    MAX_RANKS,
    Cluster,
    Device,
    DeviceSpeed,
    Plan,
    Profile,
    Program,
    Replicas,
    Schedule,
    TrainingState,
    as_int,
    find_device,
    find_link,
    node_cluster,
)
from penstock.loss import has_parameters
from penstock.planner import (
    AUTO,
    DevicePool,
    DeviceSearch,
    Measured,
    PartitionerChoice,
    PlanOptions,
    ScheduleChoice,
    TensorParallel,
    search,
)
from penstock.runtime import mesh_sizes

_LOG = logging.getLogger(__name__)
# Shares of the budget: the least that is left for searching, however long measuring takes, and the share after which
# no new candidate is started.
_MIN_SEARCH_SHARE, _SEARCH_END_SHARE = 0.2, 0.85
_MIN_DEVICES_SHARE = 0.5  # the least for searching, with `devices`
# The share and the least seconds after which nodes are not timed again; they are timed three times in any case.
_MEASURE_SHARE, _MIN_MEASURE_SECONDS = 0.4, 1.5
_MICROBATCHES_PER_RANK = (4, 1, 2, 8)  # those that "auto" considers, the usual number first
# For `devices`: samples of a microbatch that are always tried, devices of a node, and degrees of tensor parallelism.
_MICROBATCH_SIZES, _PER_NODE, _DEGREES = (1, 2, 4), 8, (1, 2, 4, 8)
# Larger microbatches have this many times the samples of the one before, and are tried as long as a sample of the last
# one takes at most this share of the time of a sample of the one before it.
_LARGER, _FASTER = 4, 0.95


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    # Where the pipeline will run: ranks, a mesh, or devices that are divided into replicas and ranks
    ranks: int | Cluster | None = None,
    mesh: Any = None,
    devices: int | None = None,
    tensor_parallel: int | str = 1,
    sequence_parallel: bool = False,
    overlap_collectives: bool = False,
    # Choices
    microbatches: int | str = "auto",
    schedule: ScheduleChoice = "auto",
    partitioner: PartitionerChoice = "auto",
    stages_per_rank: int | None = None,
    recompute: str = "none",
    vocabulary_shards: int | str | None = None,
    # Memory, and the state of the optimizer in it
    memory: int | str | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    shard_optimizer: bool = False,
    # The loss, and how the batch is split
    loss_fn: LossFn | None = None,
    target: Any = None,
    split: Split | None = None,
    # Costs: measured here, given, or estimated for a device
    profile: Profile | None = None,
    speed: DeviceSpeed | None = None,
    device: str | DeviceSpeed | None = None,
    budget_seconds: float = 10.0,
    # Recording of the model
    depth: int | None = None,
    basic_blocks: Sequence[str | type] = (),
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
        mesh: the DeviceMesh that the Pipeline will get: its axis "pp" has the ranks, and those along "dp" are replicas,
            whose averaging of gradients counts in the step; the example is then the batch of one replica
        devices: instead of `ranks`, a number of devices: replicas x pipeline ranks are searched too, the example is the
            batch of all replicas, and `microbatches` must be "auto"; `plan.search.layouts` has all layouts
        tensor_parallel: with `devices`, over how many of them `parallelize_fn` splits each layer; "auto": 1, 2, 4 or 8
        sequence_parallel: with `tensor_parallel`, values between blocks are split over its ranks too, as Megatron does;
            stages of a Pipeline exchange whole values
        overlap_collectives: with `tensor_parallel`, its collectives run beside the matrix products of their block, as
            with Megatron's tp_comm_overlap
        microbatches: how many microbatches a batch is split into; "auto": 1, 2, 4 or 8 per rank
        schedule: a name, a Schedule, a Program or the path of a CSV file; an order with messages is run as it is, one
            without any backward can be evaluated only
        partitioner: a name, a Partition, a Division (whose placement is kept), or lists of module names per stage
        stages_per_rank: None: what the schedule needs, or searched
        recompute: "none", "full", or "auto": recompute activations where memory requires it
        vocabulary_shards: split the output layer and its cross entropy into this many shards along the vocabulary,
            which may be placed on any ranks; "auto": one per rank if that is possible and predicted to be faster;
            None: do not
        memory: the limit of a rank, in bytes or as "24GiB"; None: no limit
        optimizer: "adamw", "adam8bit", "sgd", "muon" or "none": its state counts in memory; None: no state
        precision: "bf16" or "fp16": two-byte parameters have master weights and optimizer state in float32; None,
            "fp32" or "pure-bf16": state has the dtype of the parameters
        shard_optimizer: every replica holds a part of the optimizer's state and of the master weights, as in ZeRO stage
            1, for instance with torch's ZeroRedundancyOptimizer
        loss_fn: the loss function that the Pipeline will get; without one, only the loss that the model returns has a
            gradient
        target: with a `loss_fn`, the target of the example batch: the loss then counts in the step;
            `vocabulary_shards` needs it
        split: the `split` that the Pipeline will get
        profile: measured costs of a microbatch; None: measured here
        speed: the device to estimate for, if the model is on the meta device; None: this one
        device: instead of `speed`, a DeviceSpeed or the name of a preset ("a100", "h100", ...), which also has the
            memory and the links of the ranks where `memory` and `ranks` leave them open
        budget_seconds: seconds for measuring and searching, approximately
        depth: as in `penstock.capture`: how deep modules are opened
        basic_blocks: as in `penstock.capture`: modules that stay whole

    Returns:
        The plan with the shortest predicted step that fits in memory.

    Raises:
        CaptureError: if the model cannot be recorded
        PartitionError: if it cannot be cut as asked
        FitError: if no candidate fits in memory
        PlanError: if the arguments do not fit together
    """
    if devices is not None and (ranks is not None or mesh is not None or microbatches != AUTO):
        raise PlanError("devices must be given without ranks, mesh and microbatches", hint="leave them out")
    if devices is not None and profile is not None:
        hint = "leave out profile, or ranks= and microbatches= in place of devices="
        raise PlanError("profile must not be given with devices: several sizes of microbatches are measured", hint=hint)
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
    # Whether the ranks are processes of this machine: nothing describes another one.
    is_here = is_measured and devices is None and not isinstance(ranks, Cluster) and is_on_cpu
    preset: Device | None = None
    if device is not None:
        if speed is not None:
            raise PlanError("speed and device must not both be given", hint="leave out one of them")
        if isinstance(device, DeviceSpeed):
            speed = device
        else:
            name, preset = find_device(device)
            speed = preset.speed(name)
            if not isinstance(cluster, Cluster):
                cluster = node_cluster(cluster, preset.within, preset.across)
            if cluster.memory is None:
                cluster = replace(cluster, memory=preset.memory)
    options = PlanOptions(
        ranks=cluster,
        microbatches=microbatches,
        schedule=schedule,
        partitioner=partitioner,
        stages_per_rank=stages_per_rank,
        memory=memory,
        recompute=recompute,
        budget_seconds=budget_seconds,
        training=TrainingState.named(optimizer, precision),
        shard_optimizer=shard_optimizer,
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
    given = options.schedule if isinstance(options.schedule, Schedule | Program) else None
    batch = ExampleBatch(
        model,
        args,
        kwargs,
        split=split,
        loss_fn=loss_fn,
        target=target,
        speed=speed,
        profile=profile,
        granularity=granularity,
        # Never less than small models need: profiles are cached, and used by later plans with a larger budget.
        measure_seconds=min(max(_MEASURE_SHARE * options.budget_seconds, _MIN_MEASURE_SECONDS), BUDGET_SECONDS),
        is_whole=devices is None and (given.num_microbatches if given else options.microbatches) == 1,
    )
    start = time.monotonic()
    if is_here:
        here = replace(local_ranks(options.cluster.ranks), replicas=options.cluster.replicas)
        options = replace(options, ranks=here)
    if devices is not None:
        split_layers = TensorParallel((), sequence_parallel, overlap_collectives)
        found = _plan_devices(batch, options, devices, tensor_parallel, split_layers, preset)
    elif vocabulary_shards is None:
        found = _plan_batch(batch, options, is_here, start)
    else:
        found = _plan_vocabulary_shards(batch, options, vocabulary_shards, is_here, start)
    _LOG.info("plan: %s", found)
    return found


def _plan_batch(batch: ExampleBatch, options: PlanOptions, is_here: bool, start: float) -> Plan:
    """Measure the model and search. The budget began at `start`; with `is_here` the ranks share this machine."""
    models = batch.measured(_microbatch_counts(options, batch))
    if is_here:
        share = next(iter(models.values())).profile.cpu_share
        options = replace(options, ranks=ranks_that_compute(options.cluster, share))
    # Measuring counts towards the budget that the user waits for.
    seconds_left = _SEARCH_END_SHARE * options.budget_seconds - (time.monotonic() - start)
    seconds_left = max(seconds_left, _MIN_SEARCH_SHARE * options.budget_seconds)
    with progress("planning") as update:
        found = search(models, replace(options, budget_seconds=seconds_left), update)
    return replace(found, split=tuple(batch.rules.items()))


def _plan_vocabulary_shards(
    batch: ExampleBatch, options: PlanOptions, shards: int | str, is_here: bool, start: float
) -> Plan:
    """The plan with a split output layer; with "auto" shards, the better of it and the plan without."""
    is_auto = shards == AUTO
    count = options.cluster.ranks if is_auto else as_int(shards)
    if count is None or (count < 2 and not is_auto):
        hint = 'vocabulary_shards=2, "auto", or None'
        raise PlanError("vocabulary_shards must be a whole number, 2 or more", got=repr(shards), hint=hint)
    if batch.loss_fn is not None and batch.target is None:
        hint = "target=labels, those of the example batch"
        raise PlanError("vocabulary_shards with a loss_fn needs the target of the example batch", hint=hint)
    asked = ("vocabulary shards", str(shards))
    without: Plan | None = None
    if is_auto:
        half = replace(options, budget_seconds=options.budget_seconds / 2)
        with suppress(FitError) if count > 1 else nullcontext():
            without = _plan_batch(batch, half, is_here, start)
        if count == 1 and without is not None:
            return _explained(without, asked, "The output layer is whole: there is one rank only.")
        options, start = half, time.monotonic()
    try:
        head, found = _plan_with_shards(batch, options, count, is_here, start)
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


def _plan_with_shards(
    batch: ExampleBatch, options: PlanOptions, count: int, is_here: bool, start: float
) -> tuple[str, Plan]:
    """The output layer of the model, and the plan with it split into `count` shards."""
    num_microbatches = _microbatch_counts(options, batch)[0]
    head = batch.output_layer(num_microbatches)
    # A module with children hides the layer itself: it is opened, and the model recorded again.
    while next(batch.model.get_submodule(head).children(), None) is not None:
        opened = batch.granularity.opened | {head}
        batch = replace(batch, granularity=replace(batch.granularity, opened=opened))
        head = batch.output_layer(num_microbatches)
    model = shard_vocabulary(batch.model, head, count, batch.loss_fn)
    sharded = replace(batch.of_loss(model), granularity=sharded_granularity(model, batch.granularity))
    found = _plan_batch(sharded, options, is_here, start)
    if sharded_head(found.graph) is None:
        raise CaptureError(
            "an output layer can be split only if the model computes a cross entropy of its logits",
            module=head,
            hint="labels in the example batch, so that the model returns its loss, or loss_fn= and target=",
        )
    return head, found


def _explained(found: Plan, asked: tuple[str, str], reason: str) -> Plan:
    """The plan with one more option and one more reason in its record of the search."""
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


def _plan_devices(
    batch: ExampleBatch,
    options: PlanOptions,
    devices: int,
    tensor_parallel: int | str,
    split_layers: TensorParallel,
    preset: Device | None,
) -> Plan:
    """Search replicas x pipeline ranks x tensor parallelism x samples of a microbatch."""
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
    start, samples = time.monotonic(), batch.num_samples(MAX_MICROBATCHES)
    # With one microbatch for every device, none idles if all are replicas.
    most = min(samples * max(degrees) // count, samples)
    measured = _measured_sizes(batch, samples, most, start + _SEARCH_END_SHARE * options.budget_seconds)
    pool = DevicePool(count, min(options.cluster.limits, default=None))
    if preset is not None:
        dtypes = Counter[str]()
        for value in measured[1].graph.parameters:
            dtypes[value.spec.dtype] += value.spec.bytes
        peak = preset.peak_flops(dtypes.most_common(1)[0][0] if dtypes else "float32")
        within, across = find_link(preset.within), find_link(preset.across)
        pool = DevicePool(count, pool.memory, within, across, per_node=_PER_NODE, peak_flops=peak)
    budget = _SEARCH_END_SHARE * options.budget_seconds - (time.monotonic() - start)
    budget = max(budget, _MIN_DEVICES_SHARE * options.budget_seconds)
    options = replace(options, budget_seconds=budget)
    with progress("planning") as update:
        found = DeviceSearch(measured, options, pool, samples, replace(split_layers, degrees=degrees), update).best()
    return replace(found, split=tuple(batch.rules.items()))


def _measured_sizes(batch: ExampleBatch, samples: int, most: int, end: float) -> dict[int, Measured]:
    """Measured microbatches by their samples: small ones, and larger ones as long as they take less time per sample.

    The costs of a pass that do not depend on its samples make a step of many small microbatches slow. No larger one is
    measured after `end`.
    """
    sizes = [size for size in _MICROBATCH_SIZES if samples % size == 0]
    measured = {size: batch.measured([samples // size])[samples // size] for size in sizes}
    while len(sizes) > 1 and time.monotonic() < end:
        before, last = (sum(cost.seconds for cost in measured[size].profile.costs) / size for size in sizes[-2:])
        size = _LARGER * sizes[-1]
        if last > _FASTER * before or size > most or samples % size:
            break
        sizes.append(size)
        measured[size] = batch.measured([samples // size])[samples // size]
    return measured


def _microbatch_counts(options: PlanOptions, batch: ExampleBatch) -> list[int]:
    """The numbers of microbatches to consider; a Schedule that the user gives has one already."""
    if isinstance(options.microbatches, int):
        return [options.microbatches]
    if isinstance(options.schedule, Schedule | Program):
        return [options.schedule.num_microbatches]
    counts = [each * options.cluster.ranks for each in _MICROBATCHES_PER_RANK]
    samples = batch.num_samples(max(counts))
    return [count for count in counts if count <= samples] or [samples]
