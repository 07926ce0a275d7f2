"""Records the results of penstock bit by bit, and compares them with an earlier record.

Use it to prove that a refactoring changes no result:

    python -m benchmarks.reference --write FILE                 # on the commit before the change
    python -m benchmarks.reference --against FILE               # after the change: prints differences, exits with 1
    python -m benchmarks.reference --against FILE --quick       # a seventh of the large sections
    python -m benchmarks.reference --against FILE --only local  # some sections

The script uses public names only, so that the same file runs on both commits. Costs are estimated for a device of a
fixed speed and never measured, so nothing depends on the clock. A tensor is recorded as the first 16 hex digits of the
sha256 of its dtype, shape and raw bytes; a float as its repr; an exception as its type, without the message.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from benchmarks.reference_models import (
    CASES,
    LAYER_NAMES,
    TRANSFORMERS,
    Batch,
    Case,
    cnn_parts,
    image_batch,
    llama,
    tokens,
)
from penstock.flat import (
    clip_grad_norm_,
    flatten_model,
    forward_backward,
    forward_eval,
    partition_balanced,
    partition_uniform,
    topology,
)

# Read when torch is loaded. Without MKL_CBWR, matrix products may depend on the alignment of their operands.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
    "zbv",
    "v_half",
    "v_min",
    "dualpipe_v",
)
PARTITIONERS = ("uniform", "parameters", "linear", "pipedream", "metis", "mpipe", "acyclic", "auto")
SAMPLES, MICROBATCHES, STEPS = 8, 4, 5
SPEED = penstock.DeviceSpeed(1e9, 1e9, 1e-5)
QUICK_STRIDE, LARGE_SECTION = 7, 50
"""--quick runs every 7th case of sections with at least 50 cases, which reaches every schedule and number of ranks"""

Record = dict[str, Any]
Section = Iterator[tuple[str, Callable[[], Any]]]
"""pairs of a name and a function that computes the results of that name"""


# Digests and records of the objects that penstock returns.


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def tensor_digest(tensor: Tensor | None) -> str:
    """Digest of dtype, shape and raw bytes."""
    if tensor is None:
        return "None"
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return digest(f"{tensor.dtype}{list(tensor.shape)}".encode() + data)


def digests(value: Any) -> Any:
    """Digests of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, dict):
        return {str(name): digests(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [digests(item) for item in value]
    return repr(value)


def gradient_digests(model: nn.Module | penstock.Pipeline) -> Record:
    return {name: tensor_digest(parameter.grad) for name, parameter in model.named_parameters()}


def exact(value: float | Tensor | None) -> str:
    """Text that represents exactly this number."""
    return "None" if value is None else repr(float(value))


def order_record(schedule: penstock.Schedule, program: penstock.Program) -> Record:
    """Actions of every rank, before and after lowering."""
    return {
        "orders": [digest(" ".join(map(str, order))) for order in schedule.orders],
        "placement": " ".join(str(schedule.placement[stage]) for stage in range(schedule.num_stages)),
        "schedule csv": digest(schedule.to_csv()),
        "program csv": digest(program.to_csv()),
    }


def trace_record(trace: penstock.Trace) -> Record:
    """Times and memory of a simulated step."""
    spans = "\n".join(f"{span.rank} {span.action} {span.start!r} {span.end!r}" for span in trace.spans)
    return {
        "makespan": exact(trace.makespan),
        "span": exact(trace.span),
        "bubble": exact(trace.bubble),
        "span bubble": exact(trace.span_bubble),
        "spans": digest(spans),
        "peaks": [trace.peak_bytes(rank) for rank in range(trace.num_ranks)],
    }


def plan_record(plan: penstock.Plan) -> Record:
    """Partition, orders, and the prediction."""
    return {
        "stages": [digest(" ".join(stage)) for stage in plan.partition.stages],
        **order_record(plan.schedule, penstock.lower(plan.schedule, cuts=plan.cuts)),
        "predicted makespan": exact(plan.predicted.makespan),
        "predicted bubble": exact(plan.predicted.bubble),
        "predicted peaks": [plan.predicted.peak_bytes(rank) for rank in range(plan.num_ranks)],
        "lower bound": exact(plan.lower_bound),
        **trace_record(penstock.simulate(plan)),
    }


# Schedules without a model.


def make_costs(kind: str, stages: int) -> penstock.StageCosts | None:
    if kind == "none":
        return None
    if kind == "equal":
        return penstock.StageCosts.uniform(stages, 1.0, 1.0, 1.0)
    # "uneven": whole seconds. "decimal": multiples of 0.1, and a full backward that is shorter than its two parts.
    unit = 1.0 if kind == "uneven" else 0.1
    return penstock.StageCosts(
        forward=[unit * (1 + 3 * stage % 4) for stage in range(stages)],
        input_grad=[unit * (1 + 2 * stage % 3) for stage in range(stages)],
        weight_grad=[unit * (1 + 5 * stage % 3) for stage in range(stages)],
        backward=() if kind == "uneven" else [unit * (1.75 + 2 * stage % 3 + 5 * stage % 3) for stage in range(stages)],
        activation_bytes=[100 + 7 * stage for stage in range(stages)],
        weight_grad_bytes=[40 + 3 * stage for stage in range(stages)],
        messages=[penstock.MessageCost(stage, stage + 1, 100 + 10 * stage, 80 + stage) for stage in range(stages - 1)],
        state=[penstock.StateBytes(1000 + stage, 500 + stage, 2 * stage) for stage in range(stages)],
    )


def make_cluster(kind: str, ranks: int) -> penstock.Cluster | None:
    if kind == "no links":
        return None
    if kind == "slow links":
        links = [penstock.Link(0, 1, 0.5, 200.0)] if ranks > 1 else []
        return penstock.Cluster(ranks, latency=0.25, bandwidth=1000.0, links=links)
    return penstock.Cluster(ranks, latency=0.01, bandwidth=1e4, replicas=penstock.Replicas(2, 0.1, 1e4))


def schedules() -> Section:
    """Build, verify, lower and simulate every schedule in many sizes, with several costs and clusters."""
    for name, ranks, microbatches, kind in product(
        SCHEDULES, (1, 2, 3, 4, 8), (1, 4, 7), ("none", "equal", "uneven", "decimal")
    ):
        key = f"{name}, {ranks} ranks, {microbatches} microbatches, costs {kind}"
        yield key, partial(simulate_schedule, name, ranks, microbatches, kind)
    for name, depth in product(SCHEDULES, (1, 2, 3)):
        yield f"{name}, {depth} stages per rank", partial(simulate_schedule, name, 3, 5, "uneven", depth)


def simulate_schedule(name: str, ranks: int, microbatches: int, kind: str, depth: int | None = None) -> Record:
    stages = penstock.schedule(name, ranks, microbatches, stages_per_rank=depth).num_stages
    costs = make_costs(kind, stages)
    schedule = penstock.schedule(name, ranks, microbatches, stages_per_rank=depth, costs=costs)
    program = penstock.lower(schedule)
    penstock.verify(schedule)
    penstock.verify(program)
    clusters = {links: make_cluster(links, ranks) for links in ("no links", "slow links", "replicas")}
    traces = {links: trace_record(penstock.simulate(program, costs, where)) for links, where in clusters.items()}
    return order_record(schedule, program) | traces


def skip_connections() -> Section:
    """Lower and simulate every schedule for stages that also read stages further ahead."""
    for name, ranks in product(SCHEDULES, (2, 3, 4)):
        yield f"{name}, {ranks} ranks", partial(simulate_skips, name, ranks)


def simulate_skips(name: str, ranks: int) -> Record:
    schedule = penstock.schedule(name, ranks, 5)
    last = schedule.num_stages - 1
    edges = {(stage, stage + 1) for stage in range(last)} | {(0, stage) for stage in range(2, last, 2)} | {(0, last)}
    cuts = penstock.Cuts.of(last + 1, edges, {(0, last)} if last > 1 else ())
    program = penstock.lower(schedule, cuts=cuts)
    penstock.verify(program)
    trace = penstock.simulate(program, make_costs("uneven", last + 1), make_cluster("slow links", ranks))
    return order_record(schedule, program) | trace_record(trace)


def synthesis() -> Section:
    """Schedules that "auto" makes for given costs and memory.

    The search is limited by effort as well as by time, so short searches are deterministic. Cases that take seconds are
    left out, because the time limit could end the search on a slow machine.
    """
    for ranks, microbatches, depth, memory in product((1, 2, 3, 4), (4, 7), (1, 2), ("unlimited", "limited")):
        if (ranks, microbatches, depth) not in ((3, 4, 2), (4, 4, 2)):
            key = f"{ranks} ranks, {microbatches} microbatches, {depth} stages per rank, memory {memory}"
            yield key, partial(synthesise, ranks, microbatches, depth, memory == "limited")


def synthesise(ranks: int, microbatches: int, depth: int, is_limited: bool) -> Record:
    stages = ranks * depth
    seconds = [
        [float(1 + factor * stage % rest) for stage in range(stages)] for factor, rest in ((3, 4), (2, 3), (5, 3))
    ]
    costs = penstock.StageCosts(*seconds, activation_bytes=[10 + stage for stage in range(stages)])
    memory = 14 * stages if is_limited else None
    schedule = penstock.schedule("auto", ranks, microbatches, stages_per_rank=depth, costs=costs, memory=memory)
    return order_record(schedule, penstock.lower(schedule)) | trace_record(penstock.simulate(schedule, costs))


# Graphs, partitions and plans of models.


@cache
def estimate(case: Case) -> penstock.Profile:
    """Estimated costs of one microbatch."""
    batch = case.batch(SAMPLES // MICROBATCHES, 0)
    captured = penstock.capture(case.model(), batch.args, batch.kwargs)
    return penstock.measure(captured, loss_fn=case.loss_fn, speed=SPEED)


def make_plan(case: Case, schedule: Any, ranks: int | penstock.Cluster, **options: Any) -> penstock.Plan:
    """Plan without measuring. A budget of 0 takes the first plan that is found."""
    batch = case.batch(SAMPLES, 0)
    defaults = {"partitioner": "uniform", "budget_seconds": 0.0, "microbatches": MICROBATCHES}
    # A profile is valid for one size of microbatches only.
    costs = {"speed": SPEED} if "microbatches" in options else {"profile": estimate(case)}
    given = {"ranks": ranks, "schedule": schedule, "loss_fn": case.loss_fn, **costs, **defaults, **options}
    return penstock.plan(case.model(), batch.args, batch.kwargs, **given)


def graphs() -> Section:
    """Captured graphs and estimated costs, and the comparison with the unsplit model that `penstock.check` makes."""
    for name, case in CASES.items():
        yield name, partial(capture_case, case)
        yield f"{name}, check", partial(check_case, case)


def capture_case(case: Case) -> Record:
    batch = case.batch(SAMPLES // MICROBATCHES, 0)
    graph = penstock.capture(case.model(), batch.args, batch.kwargs).graph
    profile = estimate(case)
    return {
        "nodes": [node.name for node in graph.nodes],
        "edges": [f"{edge.producer} {edge.consumer} {edge.value}" for edge in graph.edges],
        "forward seconds": {node.name: exact(profile[node.name].forward) for node in graph.nodes},
        "backward seconds": {node.name: exact(profile[node.name].backward) for node in graph.nodes},
    }


def check_case(case: Case) -> Record:
    batch = case.batch(SAMPLES, 0)
    options = {"loss_fn": case.loss_fn, "target": batch.target, **case.options}
    report = penstock.check(case.model(), make_plan(case, "1f1b", 2), batch.args, batch.kwargs, **options)
    return {"ok": report.ok}


def partitions() -> Section:
    """Every partitioner on several models, for one and two stages per rank, fast and slow links."""
    settings = ((2, "1f1b", None), (4, "interleaved", None), (3, "zbv", None), (4, "interleaved", 2e6))
    for model, partitioner in product(("mlp", "cnn", "tied", "encoder_decoder", "towers"), PARTITIONERS):
        case = CASES[model]
        for ranks, schedule, bandwidth in settings:
            key = f"{model}, {partitioner}, {schedule}, {ranks} ranks, {'slow' if bandwidth else 'fast'} links"
            cluster = penstock.Cluster(ranks, latency=1e-5, bandwidth=bandwidth)
            yield key, partial(partition_case, case, schedule, cluster, partitioner)
        yield f"{model}, {partitioner}, pipe_model, 3 ranks", partial(pipe_case, case, 3, partitioner)


def partition_case(case: Case, schedule: str, cluster: penstock.Cluster, partitioner: str) -> Record:
    # With the schedule given, the search ends by itself long before this budget.
    return plan_record(make_plan(case, schedule, cluster, partitioner=partitioner, budget_seconds=1e6))


def pipe_case(case: Case, ranks: int, method: str) -> Record:
    batch = case.batch(SAMPLES // MICROBATCHES, 0)
    options = {"ranks": ranks, "method": method, "loss_fn": case.loss_fn, "profile": estimate(case)}
    found = penstock.pipe_model(case.model(), batch.args, batch.kwargs, **options)
    return {"stages": [digest(" ".join(stage)) for stage in found.partition.stages]}


def plans() -> Section:
    """Explicit partitions, memory limits, recomputation, special clusters, and plans with several choices left open."""
    modules = [["0", "1", "2", "3"], ["4", "5", "6", "7", "8"], ["9", "10", "11"], ["12", "13", "14"]]
    linear = {"partitioner": "linear"}
    slow = penstock.Cluster(3, slowness=(1.0, 2.5, 1.0))
    replicated = penstock.Cluster(3, replicas=penstock.Replicas(4, 1e-4, 1e6))
    yield "modules", partial(plan_case, "mlp", "1f1b", 4, partitioner=modules)
    yield "modules, looped", partial(plan_case, "mlp", "interleaved", 2, partitioner=modules, stages_per_rank=2)
    yield "recompute full", partial(plan_case, "cnn", "1f1b", 3, recompute="full", **linear)
    yield "recompute auto", partial(plan_case, "cnn", "1f1b", 3, recompute="auto", memory="70kB", **linear)
    yield "too little memory", partial(plan_case, "mlp", "1f1b", 3, memory=2000, **linear)
    yield "slow rank", partial(plan_case, "mlp", "1f1b", slow, **linear)
    yield "replicas", partial(plan_case, "mlp", "1f1b", replicated, **linear)
    yield "given schedule", partial(plan_case, "mlp", penstock.schedule("zb_h1", 2, MICROBATCHES), 2)
    for name, ranks in product(("mlp", "cnn", "t5"), (2, 3)):
        yield f"{name}, {ranks} ranks, all auto", partial(plan_case, name, "auto", ranks, partitioner="auto")
    open_choices = {"partitioner": "auto", "microbatches": "auto"}
    yield "microbatches auto", partial(plan_case, "mlp", "auto", 2, **open_choices)


def plan_case(name: str, schedule: Any, ranks: int | penstock.Cluster, **options: Any) -> Record:
    return plan_record(make_plan(CASES[name], schedule, ranks, **options))


# Training.


@dataclass(frozen=True)
class Variant:
    """The settings of one training run."""

    sizes: tuple[int, ...] = (SAMPLES,) * STEPS
    """samples in the batch of every step"""
    accumulate: int = 1
    """calls of pipe.step for every step of the optimizer"""
    microbatches: tuple[int, ...] = ()
    """for every step, instead of the number in the plan"""
    max_norm: float | None = None
    init_scale: float | None = None
    """of a GradScaler"""
    recompute: str = "none"
    partitioner: str = "uniform"
    record: bool = False
    evaluate: bool = False
    save: bool = False
    """save a checkpoint after the third step, and load it again after the last"""

    def plan(self, case: Case, schedule: str, ranks: int) -> penstock.Plan:
        return make_plan(case, schedule, ranks, recompute=self.recompute, partitioner=self.partitioner)


UNEVEN = (7, 3, 10, 1, 7)
PLAIN = Variant()
VARIANTS = {
    "uneven batches": Variant(UNEVEN),
    "accumulation": Variant(accumulate=2),
    "clipping": Variant(max_norm=0.05),
    "scaler": Variant(init_scale=1024.0),
    "scaler overflows": Variant(init_scale=1.5e38, max_norm=1.0),
    "recompute": Variant(recompute="full"),
    "recompute, uneven batches, clipping": Variant(UNEVEN, recompute="full", max_norm=0.1),
    "linear partitioner": Variant(partitioner="linear"),
    "recording": Variant(record=True),
    "eval": Variant(evaluate=True),
    "eval, uneven batches": Variant(UNEVEN, evaluate=True),
    "checkpoint": Variant(save=True),
    "changing microbatches": Variant(microbatches=(4, 1, 8, 3, 4)),
}


def train(case: Case, plan: penstock.Plan, variant: Variant = PLAIN, **where: Any) -> Record:
    """Losses of every step, gradients of the first and last step, and parameters and buffers after the last.

    `where` holds the arguments of the Pipeline that say where it runs. Each replica trains on batches of its own.
    """
    torch.manual_seed(1)
    scaler = None
    if variant.init_scale is not None:
        scaler = penstock.GradScaler(init_scale=variant.init_scale, growth_interval=3)
    pipe = penstock.Pipeline(case.model(), plan, loss_fn=case.loss_fn, scaler=scaler, **case.options, **where)
    optimizer = case.optimizer(pipe.parameters())
    replica = where["mesh"].get_local_rank("dp") if "mesh" in where else 0
    found: Record = {}
    last = len(variant.sizes) - 1
    with tempfile.TemporaryDirectory() as directory:
        for step, samples in enumerate(variant.sizes):
            if variant.microbatches:
                pipe.microbatches = variant.microbatches[step]
            for part in range(variant.accumulate):
                batch = case.batch(samples + replica, 10 * step + part + 5 * replica)
                found[f"step {step}.{part}"] = run_step(pipe, batch, variant)
            if step in (0, last):
                found[f"gradients {step}"] = gradient_digests(pipe)
            if variant.max_norm is not None:
                found[f"norm {step}"] = exact(pipe.clip_grad_norm_(variant.max_norm))
                found[f"clipped gradients {step}"] = gradient_digests(pipe)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
                found[f"scaler {step}"] = [exact(scaler.scale), scaler.skipped]
            optimizer.zero_grad()
            # Processes have no common directory here.
            if variant.save and "local" in where and step == last // 2:
                pipe.save(directory, optimizer)
        found["state"] = digests(dict(pipe.state_dict()))
        found["full state"] = digests(dict(pipe.full_state_dict()))
        if variant.save and "local" in where:
            found["loaded step"] = pipe.load(directory, optimizer).step
            found["loaded state"] = digests(dict(pipe.state_dict()))
    return found


def run_step(pipe: penstock.Pipeline, batch: Batch, variant: Variant) -> Record:
    options = {"return_outputs": variant.evaluate, "record": variant.record}
    result = pipe.step(*batch.args, target=batch.target, **options, **batch.kwargs)
    found: Record = {"loss": exact(result.loss), "losses": [exact(loss) for loss in result.losses]}
    if variant.record:
        found["actions"] = digest("\n".join(f"{span.rank} {span.action}" for span in result.trace.spans))
    if variant.evaluate:
        found["outputs"] = digests(result.outputs)
        result = pipe.eval(*batch.args, target=batch.target, return_outputs=True, **batch.kwargs)
        found["eval loss"] = exact(result.loss)
        found["eval losses"] = [exact(loss) for loss in result.losses]
        found["eval outputs"] = digests(result.outputs)
    return found


def local() -> Section:
    """Every model with every schedule on 1 to 4 ranks, all ranks in this process."""
    for (name, case), schedule, ranks in product(CASES.items(), SCHEDULES, (1, 2, 3, 4)):
        # Models of transformers take half of the time: two numbers of ranks are enough for them.
        if name not in TRANSFORMERS or ranks in (2, 4):
            yield f"{name}, {schedule}, {ranks} ranks", partial(train_local, case, schedule, ranks, PLAIN)


def variants() -> Section:
    """Every variant with some models on 3 ranks in this process, cycling through the schedules."""
    names = cycle(SCHEDULES)
    for (name, variant), model in product(VARIANTS.items(), ("mlp", "tied", "penalised", "towers", "gpt2")):
        schedule = next(names)
        yield f"{name}, {model}, {schedule}, 3 ranks", partial(train_local, CASES[model], schedule, 3, variant)


def train_local(case: Case, schedule: str, ranks: int, variant: Variant) -> Record:
    plan = variant.plan(case, schedule, ranks)
    return {"plan": plan_record(plan), **train(case, plan, variant, local=True)}


Job = tuple[str, Case, penstock.Plan, Variant]


def processes() -> Section:
    """Processes: every model, every schedule and every variant on 2 and on 4 ranks; 2 replicas of 2 ranks."""
    runs = [(name, PLAIN, "plain") for name in CASES]
    models = cycle(("tied", "penalised", "gpt2"))
    runs += [(next(models), variant, name) for name, variant in VARIANTS.items()]
    for ranks in (2, 4):
        yield f"{ranks} ranks", partial(launch_jobs, runs, ranks, ranks, train_as_rank)
    chosen = cycle([PLAIN, *list(VARIANTS.values())[:6]])
    names = cycle(["plain", *list(VARIANTS)[:6]])
    runs = [(name, next(chosen), next(names)) for name in CASES]
    yield "2 replicas of 2 ranks", partial(launch_jobs, runs, 4, 2, train_as_replica)


def launch_jobs(runs: Sequence[tuple[str, Variant, str]], world: int, ranks: int, fn: Callable[..., Any]) -> Record:
    """Trains all runs one after another in the same processes, cycling through the schedules."""
    jobs: list[Job] = []
    for (model, variant, name), schedule in zip(runs, cycle(SCHEDULES), strict=False):
        case = CASES[model]
        jobs.append((f"{name}, {model}, {schedule}", case, variant.plan(case, schedule, ranks), variant))
    results = penstock.launch(fn, world, jobs)
    return {
        job[0]: {f"rank {rank}": found[place] for rank, found in enumerate(results)} for place, job in enumerate(jobs)
    }


def train_as_rank(jobs: Sequence[Job]) -> list[Record]:
    return [train(case, plan, variant) for _, case, plan, variant in jobs]


def train_as_replica(jobs: Sequence[Job]) -> list[Record]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    return [train(case, plan, variant, mesh=mesh) for _, case, plan, variant in jobs]


# AutoPipeline and penstock.flat.


def front_ends() -> Section:
    """AutoPipeline with the schedules it documents, and pipelines written by hand with penstock.flat."""
    yield "AutoPipeline, 2 ranks", partial(launch_all, train_auto_pipelines, 2)
    for ranks in (2, 3):
        yield f"flat, {ranks} ranks", partial(launch_all, train_flat, ranks)


def launch_all(fn: Callable[..., Any], ranks: int) -> Record:
    return {f"rank {rank}": found for rank, found in enumerate(penstock.launch(fn, ranks, ranks))}


def train_auto_pipelines(ranks: int) -> Record:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    names = ("1f1b", "gpipe", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
    found: Record = {}
    for name, is_scaled in product(names, (False, True)):
        options = {"pp_schedule": name, "pp_batch_size": 4, "scale_grads_in_schedule": is_scaled}
        config = penstock.AutoPipelineConfig(world_mesh=mesh, **options)
        found[f"{name}, scaled {is_scaled}"] = train_auto_pipeline(penstock.AutoPipeline(config))
    return found


def train_auto_pipeline(ap: penstock.AutoPipeline) -> Record:
    ap = ap.build(
        llama(), loss_fn=lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    )
    optimizer = torch.optim.AdamW(ap.parameters(), lr=1e-2)
    found: Record = {"modules": ap.list_stage_modules(), "parameters": ap.get_stage_param_counts()}
    losses: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        ids = tokens(4, 7, seed=step)
        ap.step(ids[:, :-1], target=ids[:, 1:], losses=losses)
        found[f"losses {step}"] = [exact(loss) for loss in losses]
        ap.scale_grads_by_divisor(len(losses))
        found[f"norm {step}"] = exact(ap.clip_grad_norm(max_norm=1.0))
        found[f"gradients {step}"] = gradient_digests(ap.pipeline)
        optimizer.step()
    found["state"] = digests(dict(ap.pipeline.state_dict()))
    found["eval loss"] = exact(ap.eval(tokens(4, 6, seed=9), target=tokens(4, 6, seed=10)).loss)
    return found


def train_flat(ranks: int) -> Record:
    topology.setup_process_groups([("pipe", ranks)])
    found: Record = {}
    for name, partition in (("uniform", partition_uniform), ("balanced", partition_balanced)):
        torch.manual_seed(0)
        layers = flatten_model(cnn_parts(), LAYER_NAMES, return_list=True)
        model = nn.Sequential(*partition(layers))
        found[name] = {"layers": len(model), **train_flat_stage(model)}
    return found


def train_flat_stage(model: nn.Module) -> Record:
    is_first, is_last = topology.is_first_in_pipeline_group(), topology.is_last_in_pipeline_group()

    def forward(inputs: Any) -> Tensor:
        if not is_last:
            return model(inputs)
        x, target = inputs
        return nn.functional.cross_entropy(model(x), target, reduction="sum") / 9

    found: Record = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        batch = image_batch(9, step)
        inputs = [*batch.args] if is_first else [batch.target] if is_last else None
        found[f"loss {step}"] = exact(forward_backward(optimizer, forward, None, inputs, num_microbatches=4))
        found[f"gradients {step}"] = gradient_digests(model)
        found[f"norm {step}"] = exact(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
    found["state"] = digests(dict(model.state_dict()))
    batch = image_batch(5, 7)
    model.eval()
    found["eval outputs"] = digests(forward_eval(model, batch.args[0] if is_first else None))
    return found


# Running and comparing.

SECTIONS: dict[str, Callable[[], Section]] = {
    "schedules": schedules,
    "skip_connections": skip_connections,
    "synthesis": synthesis,
    "graphs": graphs,
    "partitions": partitions,
    "plans": plans,
    "front_ends": front_ends,
    "processes": processes,
    "variants": variants,
    "local": local,
}


def leaves(record: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every single value of a nested record with its path."""
    if isinstance(record, dict | list):
        pairs = record.items() if isinstance(record, dict) else enumerate(record)
        for name, value in pairs:
            yield from leaves(value, f"{path} / {name}" if path else str(name))
    else:
        yield path, record


def differences(found: Any, expected: Any) -> list[str]:
    """One line for every value that differs or that only one of the two records has."""
    new, old = dict(leaves(found)), dict(leaves(expected))
    changed = [f"{path}: was {old[path]!r}, is {new[path]!r}" for path in new if path in old and new[path] != old[path]]
    added = [f"{path}: added, is {new[path]!r}" for path in new if path not in old]
    return changed + added + [f"{path}: missing, was {old[path]!r}" for path in old if path not in new]


@cache
def cases_of(section: str) -> list[tuple[str, Callable[[], Any]]]:
    return list(SECTIONS[section]())


def run_case(section: str, index: int) -> Any:
    """Compute one case; an exception is recorded as its type."""
    key, compute = cases_of(section)[index]
    try:
        # Through JSON and back, so that the record equals one that was read from a file.
        return json.loads(json.dumps(compute()))
    except Exception as error:
        if not isinstance(error, penstock.ScheduleError | penstock.FitError):  # These two are part of the cases.
            print(f"{section} / {key}:\n{traceback.format_exc()}", file=sys.stderr)
        return f"raised {type(error).__name__}"


def run_section(section: str, is_quick: bool, jobs: int) -> Record:
    """Compute the cases of a section, those of a large one in several processes."""
    start, cases = time.perf_counter(), cases_of(section)
    is_large = len(cases) >= LARGE_SECTION
    chosen = range(0, len(cases), QUICK_STRIDE if is_quick and is_large else 1)
    if is_large and jobs > 1:
        # Forked processes need not load torch and transformers again.
        with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
            results = list(pool.map(partial(run_case, section), chosen, chunksize=4))
    else:
        results = [run_case(section, index) for index in chosen]
    found = {cases[index][0]: result for index, result in zip(chosen, results, strict=True)}
    values, raised = sum(1 for _ in leaves(found)), sum(isinstance(result, str) for result in results)
    seconds = time.perf_counter() - start
    print(f"{section:16} {len(found):4} cases {values:7} values {raised:3} raised {seconds:6.1f} s", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference", description="Record or compare results.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="write the results to a file")
    action.add_argument("--against", type=Path, metavar="FILE", help="compare the results with those in a file")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="run these sections only")
    parser.add_argument("--quick", action="store_true", help="run every 7th case of the large sections")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes for the large sections")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    system = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }
    expected = json.loads(options.against.read_text(encoding="utf-8")) if options.against else {}
    if expected and expected["system"] != system:
        print(f"recorded on another system, results may differ: {expected['system']}, here {system}")
    found = {name: run_section(name, options.quick, options.jobs) for name in options.only}
    count = sum(1 for _ in leaves(found))
    if options.write:
        options.write.write_text(json.dumps({"system": system, **found}, indent=0), encoding="utf-8")
        print(f"{count} values written")
        return 0
    if options.quick:
        expected = {name: {key: expected[name][key] for key in found[name] if key in expected[name]} for name in found}
    lines = differences(found, {name: expected.get(name, {}) for name in found})
    print("\n".join([*lines, f"{count} values compared, {len(lines)} differences"]))
    return 1 if lines else 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        command = [sys.executable, "-m", "benchmarks.reference", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ENVIRONMENT})
    sys.exit(main())
