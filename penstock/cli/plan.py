"""`penstock plan`: measure a model and search for the best plan; also plans for `explain` and `train`."""

import json
import os
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from penstock.cli.files import check_targets, write
from penstock.cli.models import HF, Model, build_model, source_of
from penstock.cli.options import AsJson, Blocks, Depth, Example
from penstock.cli.output import echo, note, print_json
from penstock.cli.user_code import user_errors
from penstock.errors import CaptureError, PartitionError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.batches import Batch
    from penstock.ir import Cluster, DeviceSpeed, Plan

SCHEDULE_NAME = "schedule.csv"  # the name of the order in printed configurations


@dataclass(frozen=True)
class PlanFlags:
    """The options of a plan as flags; see `penstock.planner.PlanOptions`."""

    ranks: Annotated[int, Option(metavar="P", help="Pipeline ranks.")] = 4
    microbatches: Annotated[str, Option(metavar="M", help='Microbatches per batch, or "auto".')] = "auto"
    schedule: Annotated[str, Option(metavar="NAME", help='A schedule, the CSV file of one, or "auto".')] = "auto"
    partitioner: Annotated[str, Option(metavar="NAME", help='A partitioner, or "auto".')] = "auto"
    stages_per_rank: Annotated[int | None, Option(metavar="V", help="Stages per rank; default: the best number.")] = (
        None
    )
    memory: Annotated[str | None, Option(metavar="SIZE", help="Memory of each rank, such as 24GiB.")] = None
    recompute: Annotated[
        str, Option(metavar="WHICH", help="Recompute activations: none, full, or auto (where memory requires it).")
    ] = "none"
    vocabulary_shards: Annotated[
        str | None,
        Option(
            metavar="K",
            help='Split the output layer and its cross entropy into K shards, or "auto": one per rank if faster.',
        ),
    ] = None
    budget: Annotated[float, Option(metavar="SECONDS", help="How long to search.")] = 10.0
    depth: Depth = None
    block: Blocks = None

    @property
    def granularity(self) -> dict[str, Any]:
        """`depth` and `basic_blocks` of the Python functions."""
        return {"depth": self.depth, "basic_blocks": self.block or ()}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `penstock.plan`, besides `ranks`: the fields, most of which have the names of arguments."""
        from penstock.partitioners import find

        try:
            find(self.partitioner)
        except PartitionError as error:
            # As a PlanError it is wrong usage, with exit code 2, and is found before the model is built.
            raise PlanError(error.problem, hint=error.hint, **error.values) from None
        arguments = asdict(self)
        for name in ("ranks", "block"):
            del arguments[name]
        arguments["microbatches"] = _number_or_auto("microbatches", self.microbatches)
        if self.vocabulary_shards is not None:
            arguments["vocabulary_shards"] = _number_or_auto("vocabulary-shards", self.vocabulary_shards)
        return arguments | {"budget_seconds": arguments.pop("budget"), **self.granularity}


def _number_or_auto(option: str, value: str) -> int | str:
    """The value of an option that is a number or "auto"."""
    if not value.isdecimal() and value != "auto":
        raise PlanError(f"{option} must be a whole number or auto", got=repr(value), hint=f"--{option} 8")
    return value if value == "auto" else int(value)


@dataclass(frozen=True)
class Machine:
    """The machine to plan for, if it is not this one."""

    flops: Annotated[
        float | None, Option(metavar="FLOP/S", help="Estimate for a device this fast, such as 3e14; else measure here.")
    ] = None
    memory_speed: Annotated[float | None, Option(metavar="B/S", help="Memory bandwidth of that device.")] = None
    device: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Predict for a preset, not for this machine: a100, h100, h200, b200, l4, rtx4090 and others.",
        ),
    ] = None
    devices: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Instead of --ranks: search replicas x pipeline ranks over N devices."),
    ] = None
    tensor_parallel: Annotated[
        str,
        Option(metavar="T", help='With --devices: devices that share the tensors of a layer, or "auto": 1, 2, 4 or 8.'),
    ] = "1"
    sequence_parallel: Annotated[
        bool,
        Option(
            "--sequence-parallel",
            help="With --tensor-parallel: values between blocks are split too, as in Megatron.",
        ),
    ] = False
    overlap_collectives: Annotated[
        bool,
        Option("--overlap-collectives", help="With --tensor-parallel: collectives run beside matrix products."),
    ] = False
    global_batch: Annotated[
        int | None, Option(min=1, metavar="N", help="Samples of all replicas, for --devices and an hf: model.")
    ] = None
    link: Annotated[
        str | None, Option(metavar="NAME", help="Link inside a node: nvlink, pcie, 100G, 200G, 400G and others.")
    ] = None
    across: Annotated[str | None, Option(metavar="NAME", help="Link between nodes; default: as inside.")] = None
    per_node: Annotated[int, Option(min=1, metavar="N", help="Ranks of a node.")] = 8
    bandwidth: Annotated[float | None, Option(metavar="B/S", help="Bandwidth of a link; default: unlimited.")] = None
    latency: Annotated[float, Option(metavar="SECONDS", help="Latency of a message between ranks.")] = 0.0
    cores: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Ranks that compute at once, as processes of one machine; default: all."),
    ] = None
    slowness: Annotated[
        str | None, Option(metavar="F,F,...", help="Slowdown factor of each rank, such as 1,1,1.8,1.")
    ] = None

    @classmethod
    def here(cls, ranks: int, replicas: int = 1) -> "Machine":
        """This machine; its cores are shared if there are more ranks than cores. Replicas have equal parts of them."""
        from penstock.launch import num_cores

        cores = max(1, num_cores() // replicas)
        return cls(cores=cores if cores < ranks else None)

    @property
    def speed(self) -> "DeviceSpeed | None":
        """The device to estimate for; None for this one."""
        from penstock.ir import DeviceSpeed

        if self.device is not None:
            if self.flops is not None or self.memory_speed is not None:
                hint = "leave them out, or --device"
                raise PlanError(
                    "--flops and --memory-speed must not be given with --device", device=self.device, hint=hint
                )
            self._check_device()
            return DeviceSpeed.named(self.device)
        if (self.flops is None) != (self.memory_speed is None):
            hint = "--flops 3e14 --memory-speed 2e12, about one large GPU in half precision"
            raise PlanError("--flops and --memory-speed must be given together", hint=hint)
        return None if self.flops is None else DeviceSpeed(self.flops, self.memory_speed)

    def _check_device(self) -> None:
        """Refuse the values that `--device` of `penstock train` has."""
        if self.device is not None and self.device.partition(":")[0] in ("cpu", "cuda"):
            raise PlanError(
                "device must be the name of a device to predict for",
                got=repr(self.device),
                hint="--device h100, or none to measure here; --device cpu or cuda is one of `penstock train`",
            )

    def cluster(self, ranks: int) -> "Cluster":
        """The ranks with their links."""
        from penstock.ir import Cluster, find_device, node_cluster

        self._check_device()
        if ranks < 1:
            raise PlanError("ranks must be 1 or more", got=ranks, hint="--ranks 4")
        slowness = None
        if self.slowness is not None:
            try:
                slowness = tuple(map(float, self.slowness.split(",")))
            except ValueError:
                hint = "--slowness 1,1,1.8,1"
                raise PlanError("slowness must be one number per rank", got=repr(self.slowness), hint=hint) from None
        preset = None if self.device is None else find_device(self.device)[1]
        within = self.link or (preset.within if preset and self.bandwidth is None and not self.latency else None)
        if within is None:
            if self.across is not None:
                raise PlanError("--across needs the link inside a node", hint=f"--link nvlink --across {self.across}")
            cluster = Cluster(ranks, None, self.latency, self.bandwidth)
        else:
            if self.bandwidth is not None or self.latency:
                hint = "leave them out, or --link: a named link has both"
                raise PlanError("--bandwidth and --latency must not be given with --link", hint=hint)
            across = self.across or (preset.across if preset and not self.link else None)
            cluster = node_cluster(ranks, within, across, self.per_node)
        memory = preset.memory if preset else None
        return replace(cluster, memory=memory, cores=self.cores, slowness=slowness)

    def arguments(self, options: PlanFlags, replicas: int, emits: bool) -> dict[str, Any]:
        """The arguments of `penstock.plan` that describe ranks or devices."""
        from penstock.ir import Replicas

        cluster, speed = self.cluster(options.ranks), self.speed
        if (self.sequence_parallel or self.overlap_collectives) and self.tensor_parallel == "1":
            name = "--sequence-parallel" if self.sequence_parallel else "--overlap-collectives"
            raise PlanError(f"{name} must be given with --tensor-parallel", hint="--tensor-parallel 8")
        if self.devices is None:
            if self.tensor_parallel != "1":
                hint = "--devices 64, the number of all devices"
                raise PlanError("--tensor-parallel must be given with --devices", hint=hint)
            if self == Machine() and replicas == 1:
                # Given as a number, the ranks are processes of this machine, whose costs are measured.
                return {"ranks": options.ranks}
            return {"ranks": replace(cluster, replicas=Replicas(replicas)), "speed": speed}
        if options.ranks != PlanFlags.ranks or options.microbatches != "auto" or emits:
            hint = "leave them out: --devices searches ranks and microbatches"
            raise PlanError("--ranks, --microbatches and --emit must not be given with --devices", hint=hint)
        names = ("link", "across", "per_node", "bandwidth", "latency", "cores", "slowness")
        given = [name for name in names if getattr(self, name) != getattr(Machine, name)]
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            hint = "leave them out: the links are those of --device"
            raise PlanError(f"{flags} must not be given with --devices", hint=hint)
        return {
            "devices": self.devices,
            "device": self.device,
            "speed": speed if self.device is None else None,  # a preset has a speed of its own
            "tensor_parallel": _number_or_auto("tensor-parallel", self.tensor_parallel),
            "sequence_parallel": self.sequence_parallel,
            "overlap_collectives": self.overlap_collectives,
        }


@dataclass(frozen=True)
class StateFlags:
    """What training holds besides parameters and activations; `penstock train` has options of these names too."""

    optimizer: Annotated[
        str, Option(metavar="NAME", help="adamw, adam8bit, sgd, muon or none: its state counts in memory.")
    ] = "adamw"
    precision: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="fp32, bf16, fp16 (with master weights) or pure-bf16; a model without weights is converted to it.",
        ),
    ] = None
    shard_optimizer: Annotated[
        bool,
        Option("--shard-optimizer", help="With --devices: replicas share the optimizer's state, as in ZeRO stage 1."),
    ] = False

    @classmethod
    def of_training(cls, optimizer: str) -> "StateFlags":
        """Those of `penstock train`: an optimizer that is not known by name counts as AdamW."""
        from penstock.ir import OPTIMIZERS

        return cls(optimizer.lower() if optimizer.lower() in OPTIMIZERS else "adamw")

    @property
    def dtype(self) -> str | None:
        """The dtype that a model without weights is converted to."""
        return {"fp32": "float32", "fp16": "float16"}.get(self.precision, "bfloat16") if self.precision else None


class LossExample(NamedTuple):
    """The loss function of `penstock train` and `check`, if there is one, and a batch, with a target for it."""

    function: "Callable[[Any, Any], Any] | None"
    batch: "Batch"


@dataclass(frozen=True)
class Results:
    """Where the plan goes."""

    out: Annotated[Path | None, Option(metavar="FILE", help="Write the plan as JSON.")] = None
    emit: Annotated[
        str | None,
        Option(
            metavar="TOOL",
            help="Print stages and order for torchtitan, automodel, megatron or deepspeed; with --out, write them.",
        ),
    ] = None


def plan(
    *,
    target: Model,
    options: PlanFlags,
    machine: Machine,
    state: StateFlags,
    example: Example,
    results: Results,
    as_json: AsJson = False,
) -> None:
    """Search for the best plan of a model.

    The model is measured on its batch, on this machine; a model without weights (hf:) is estimated. Cuts, placement,
    order, microbatches and recomputation are searched together for the shortest predicted step that fits into memory.
    Prints the best plan, the other candidates and why each lost. Under torchrun, plans for the running ranks with the
    measured links between them.
    """
    from penstock.ir import to_json
    from penstock.launch import num_cores
    from penstock.views import EMITTERS

    out, emit = results.out, results.emit
    check_targets((out,), source=source_of(target))
    if emit:
        if emit not in EMITTERS:
            close = get_close_matches(emit.lower(), EMITTERS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(EMITTERS)}"
            raise PlanError("unknown tool", emit=repr(emit), hint=hint)
        if out:
            check_targets((out, out.with_suffix(".csv")))
    if is_torchrun_rank():
        if machine != Machine():
            hint = "leave them out: links are measured and cores are counted"
            raise PlanError("options that describe the machine must not be given under torchrun", hint=hint)
        import torch.distributed as dist

        import penstock

        dist.init_process_group("gloo")
        try:
            best = penstock.plan_together(
                lambda running: make_plan(target, options, example, running=running, tool=emit, state=state)
            )
            if dist.get_rank() != 0:
                return
        finally:
            dist.destroy_process_group()
    else:
        best = make_plan(target, options, example, machine=machine, tool=emit, state=state)
    if emit:
        _emit(best, emit, out, as_json)
    else:
        if as_json:
            print_json(json.loads(to_json(best)))
        else:
            echo(best.describe())
        if out:
            write(out, to_json(best))
            note(f"wrote {out}")
    is_default = replace(machine, slowness=None) == Machine() and not best.cluster.links
    if is_default and best.cluster.cores is None and best.num_ranks > (cores := num_cores()):
        note(f"predicted for {best.num_ranks} ranks with one core each; for this machine: --cores {cores}")


def make_plan(
    target: str,
    options: PlanFlags,
    example: Example,
    *,
    machine: Machine = Machine(),
    running: "Cluster | None" = None,
    tool: str | None = None,
    replicas: int = 1,
    device: Any = None,
    state: StateFlags = StateFlags(),
    loss: LossExample | None = None,
) -> "Plan":
    """Build the model and search for its best plan.

    With `running`, the ranks are those of a running process group, in place of the machine. With `tool`, the stages
    are whole modules, as the configuration of that tool needs it. With `replicas`, each of them has its share of
    the samples of the batch. With `device`, the model is measured there. With `loss`, the batch is that of the loss.
    """
    import penstock
    from penstock.api.example_batch import ExampleBatch
    from penstock.batches import Batch, BatchSplitter
    from penstock.loss import has_parameters
    from penstock.views import TIES_WEIGHTS

    if machine.global_batch is not None:
        if machine.devices is None or not target.startswith(HF):
            hint = "--devices 64 with an hf: model; other models have the samples of their own batch"
            raise PlanError("--global-batch must be given with --devices and an hf: model", hint=hint)
        example = replace(example, batch=machine.global_batch)
    if tool and options.vocabulary_shards is not None:
        hint = "leave out --vocabulary-shards, or train with penstock"
        raise PlanError(f"{tool} cannot split the output layer over stages", hint=hint)
    if state.shard_optimizer and machine.devices is None and replicas == 1:
        hint = "--devices 64, the number of all devices"
        raise PlanError("--shard-optimizer must be given with --devices", hint=hint)
    arguments = options.arguments | {"optimizer": state.optimizer, "precision": state.precision}
    arguments["shard_optimizer"] = state.shard_optimizer
    if running is None:
        arguments |= machine.arguments(options, replicas, emits=bool(tool))
    else:
        if options.ranks not in (PlanFlags.ranks, running.ranks):
            hint = f"--ranks {running.ranks}, or leave it out"
            sizes = {"got": options.ranks, "running": running.ranks}
            raise PlanError("--ranks must be the number of running ranks", hint=hint, **sizes)
        arguments["ranks"] = replace(running, replicas=penstock.Replicas(replicas))
    microbatches = arguments["microbatches"]
    problem = "the model failed on the batch while it was recorded or measured"
    with (
        build_model(target, example, device) as (model, args, kwargs),
        user_errors(problem, source_of(target), CaptureError),
    ):
        if state.dtype is not None and all(each.is_meta for each in model.parameters()):
            import torch

            model.to(getattr(torch, state.dtype))
        batch_target = None
        if loss is not None:
            args, kwargs, batch_target = loss.batch
            arguments["loss_fn"] = loss.function
            if options.vocabulary_shards is None and has_parameters(loss.function):
                batch_target = None  # only a loss without parameters can be measured
        if replicas > 1:
            shares = BatchSplitter(model.forward).split(Batch(args, kwargs, batch_target), replicas)
            if len(shares) < replicas:
                sizes = {"samples": len(shares), "replicas": replicas}
                hint = f"--replicas {len(shares)}, or a batch with more samples"
                raise PlanError("the batch has fewer samples than replicas", hint=hint, **sizes)
            args, kwargs, batch_target = shares[0].args, shares[0].kwargs, shares[0].target
        arguments["target"] = batch_target
        if isinstance(microbatches, int) and microbatches > 1:
            samples = ExampleBatch(model, args, kwargs).num_samples(microbatches)
            if samples < microbatches:
                # Empty microbatches would be measured as full ones.
                hint = f"--microbatches {samples}, or a batch with more samples"
                sizes = {"samples": samples, "microbatches": microbatches}
                raise PlanError("the batch has fewer samples than microbatches", hint=hint, **sizes)
        search = partial(penstock.plan, model, args, kwargs, **arguments)
        if not tool:
            return search()
        has_choice = options.schedule == "auto" and options.stages_per_rank is None
        return _plan_by_module(search, tool in TIES_WEIGHTS, has_choice)


def is_torchrun_rank() -> bool:
    """Whether this process was started by torchrun."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


# --------------------------------------------------------------------------------------------- formats of other tools


def _plan_by_module(search: "Callable[..., Plan]", ties_weights: bool, has_choice: bool) -> "Plan":
    """The best plan whose stages are whole modules. `search` is `penstock.plan` with its arguments.

    If the stages of the best plan cannot be, and the number of stages is open, there is one stage per rank.
    """
    best = search()
    try:
        return _cut_at_modules(best, search, ties_weights)
    except PartitionError as error:
        if not has_choice or best.num_stages == best.num_ranks:
            raise
        note(f"planned again with one stage per rank, because with {best.num_stages} stages: {error.problem}")
    return _cut_at_modules(search(stages_per_rank=1), search, ties_weights)


def _cut_at_modules(plan: "Plan", search: "Callable[..., Plan]", ties_weights: bool) -> "Plan":
    """The plan if its stages are whole modules, else one with the same order and its cuts moved to module borders."""
    from penstock.partitioners import by_modules
    from penstock.views import check_can_run, module_lists

    lists = module_lists(plan)
    if by_modules(plan.graph, lists) != plan.partition:
        note("moved the cuts to module boundaries, because lists of module names cannot express others")
        plan = search(partitioner=lists, schedule=plan.schedule, microbatches="auto", stages_per_rank=None)
    check_can_run(plan, ties_weights)
    return plan


def _emit(plan: "Plan", tool: str, out: Path | None, as_json: bool) -> None:
    """Print the configuration and the order, or write the configuration to `out` and the order beside it."""
    from penstock.views import EMITTERS, module_lists

    csv = str(out.with_suffix(".csv")) if out else SCHEDULE_NAME
    config, orders = EMITTERS[tool](plan, csv), plan.schedule.to_csv()
    if out:
        write(out.with_suffix(".csv"), orders)
        write(out, config)
        note(f"wrote {out} and {csv}")
    if as_json:
        lists = {"module_fqns_per_model_part": module_lists(plan), "schedule_csv": orders, "config": config}
        print_json({"tool": tool, **lists})
    elif not out:
        echo(f"{config}\n# {csv}\n{orders}", end="")
