"""A plan as the configuration file of another training framework, where that framework supports the plan."""

import json
import re
from collections.abc import Callable

from penstock.errors import PartitionError, PlanError
from penstock.ir import Placement, Plan

_LAYER = re.compile(r"\.\d+$")
"""the end of the name of an element of a list"""
_LOOP = "--stages-per-rank 1, or --schedule interleaved"
_ELEMENT = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")
"""the part of a module name up to the index in the outermost list of modules"""


def torchtitan(plan: Plan, csv: str) -> str:
    """The TOML of torchtitan's `[parallelism]`; `csv` is the file with the order of actions.

    Newer versions of torchtitan take the same names from Python, and `num_pp_microbatches` instead of the size.
    """
    names = module_lists(plan)
    for name in (name for stage in names for name in stage):
        words = name.split(".")
        if len(words) > 2 or (len(words) == 2 and not words[1].isdigit()):
            hint = "--emit automodel, or a model whose layers are a list at its top, as those of torchtitan are"
            raise PartitionError("torchtitan can split a model between its own children only", module=name, hint=hint)
    lines = [
        "[parallelism]",
        f"pipeline_parallel_degree = {plan.num_ranks}",
        f'pipeline_parallel_schedule = "{_schedule(plan)}"',
        f"pipeline_parallel_schedule_csv = {json.dumps(csv)}",
        f"pipeline_parallel_microbatch_size = {_samples(plan)}",
        "module_fqns_per_model_part = [",
        *(f"  {json.dumps(stage)}," for stage in names),
        "]",
        "",
        "[training]",
        f"local_batch_size = {_samples(plan) * plan.num_microbatches}",
    ]
    if _recomputes(plan):
        lines += ["", "[activation_checkpoint]", 'mode = "full"']
    return "\n".join(lines) + "\n"


def automodel(plan: Plan, csv: str) -> str:
    """The YAML of NeMo AutoModel's `distributed` section; `csv` is the file with the order of actions."""
    lines = [
        "distributed:",
        "  strategy: fsdp2",
        f"  pp_size: {plan.num_ranks}",
        f"  activation_checkpointing: {json.dumps(_recomputes(plan))}",
        "  pipeline:",
        f"    pp_schedule: {_schedule(plan)}",
        f"    pp_schedule_csv: {json.dumps(csv)}",
        f"    pp_microbatch_size: {_samples(plan)}",
        f"    pp_batch_size: {_samples(plan) * plan.num_microbatches}",
        "    module_fqns_per_model_part:",
        *(f"      - {json.dumps(stage)}" for stage in module_lists(plan)),
    ]
    return "\n".join(lines) + "\n"


def megatron(plan: Plan, csv: str) -> str:
    """The arguments of Megatron-LM, with the layers of every stage as its pipeline layout.

    Megatron runs its own 1F1B order, interleaved if a rank has several stages; `csv` is for reference.
    """
    ranks = plan.num_ranks
    if plan.schedule.placement.kind != "loop":
        raise PlanError("the placement must be a loop", placement=plan.schedule.placement.ranks, hint=_LOOP)
    lists = module_lists(plan)
    matches = [[match for name in names if (match := _LAYER.search(name))] for names in lists]
    found = sorted({match.string[: match.start()] for stage in matches for match in stage})
    if len(found) != 1:
        raise PartitionError(
            "for Megatron all layers must be in one list",
            lists=", ".join(found) or "none",
            hint="a model with all layers in one list, such as layers.0, layers.1; or --emit automodel",
        )
    counts = [len(stage) for stage in matches]
    letters = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    # Megatron has the embedding first and the output layer with the loss last, whatever is beside them here.
    letters[0] = f"E{letters[0]}"
    letters[-1] += "L"
    lines = [
        f"--num-layers {sum(counts)}",
        f"--pipeline-model-parallel-size {ranks}",
        f'--pipeline-model-parallel-layout "{"|".join(letters)}"',
        f"--micro-batch-size {_samples(plan)}",
        f"--global-batch-size {_samples(plan) * plan.num_microbatches * plan.cluster.replicas.count}",
    ]
    if _recomputes(plan):
        lines += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    order = "1F1B" if plan.num_stages == ranks else "interleaved 1F1B"
    return "\n".join((f"# Megatron runs {order}; the planned order is in {csv}", *lines)) + "\n"


def deepspeed(plan: Plan, csv: str) -> str:
    """The JSON of DeepSpeed with the partition of a PipelineModule; `csv` is for reference.

    `parts` are boundaries in `layers`: stage s has the layers from parts[s] up to parts[s + 1]. DeepSpeed runs 1F1B.
    """
    if plan.schedule.placement != Placement.loop(plan.num_ranks):
        placement = plan.schedule.placement.ranks
        raise PlanError("for DeepSpeed every rank must have one stage", placement=placement, hint="--stages-per-rank 1")
    lists = module_lists(plan)
    layers = list(dict.fromkeys(name for names in lists for name in names))
    parts = [0]
    for names in lists:
        parts.append(parts[-1] + sum(name in layers[parts[-1] :] for name in names))
    config = {
        "train_micro_batch_size_per_gpu": _samples(plan),
        "gradient_accumulation_steps": plan.num_microbatches,
        "train_batch_size": _samples(plan) * plan.num_microbatches * plan.cluster.replicas.count,
        "pipeline": {
            "stages": plan.num_ranks,
            "activation_checkpoint_interval": int(_recomputes(plan)),
            "parts": parts,
            "layers": layers,
            "planned_order": csv,
        },
    }
    return json.dumps(config, indent=2) + "\n"


EMITTERS: dict[str, Callable[[Plan, str], str]] = {
    "torchtitan": torchtitan,
    "automodel": automodel,
    "megatron": megatron,
    "deepspeed": deepspeed,
}
"""by the name of the framework"""
TIES_WEIGHTS = frozenset({"megatron", "deepspeed"})
"""frameworks that add the gradients of a parameter that two stages share"""


def module_lists(plan: Plan) -> list[list[str]]:
    """The names of the modules of every stage, with the cuts moved to the beginnings of modules.

    Modules that depend on inputs only are listed in every stage. Raises PartitionError for a cut inside a module.
    """
    # The modules that a list can name, in the order of their calls, and the stage of each.
    home: dict[str, int] = {}
    for node in plan.graph.nodes:
        name, stage = _unit(node.module), plan.partition.stage_of(node.name)
        if node.parameters and not name:
            raise PartitionError(
                "a parameter of the model itself is in no module that a list could name",
                parameter=node.parameters[0],
                hint="put it into a module of its own",
            )
        is_part = node.is_block or node.parameters or node.buffers or name != node.module
        if not name or not is_part or node.from_inputs:
            continue
        if home.setdefault(name, stage) != stage:
            raise PartitionError(
                "a cut must not be inside a module, which no list of names can express",
                module=name,
                stages=(home[name], stage),
                hint="--partitioner uniform, or fewer stages",
            )
    stages = list(home.values())
    # Modules can be moved to a neighbouring stage only if the stages are in order.
    if stages == sorted(stages):
        home = dict(zip(home, _filled(stages, plan.num_stages), strict=True))
    lists = [[name for name, stage in home.items() if stage == own] for own in range(plan.num_stages)]
    for stage, names in enumerate(lists):
        if not names:
            hint = "fewer stages: --stages-per-rank 1, or fewer --ranks"
            nodes = ", ".join(plan.partition.stages[stage][:3])
            raise PartitionError("every stage must have a module to name", stage=stage, nodes=nodes, hint=hint)
    again = {_unit(node.module): None for node in plan.graph.nodes if node.from_inputs and node.buffers}
    return [[*names, *(name for name in again if name and name not in home)] for names in lists]


def check_can_run(plan: Plan, ties_weights: bool = False) -> None:
    """Raise PartitionError for plans whose stages do more than pass values to the next, as the frameworks require.

    With `ties_weights`, two stages may share a parameter.
    """
    for producer, consumer in plan.cuts.edges:
        if consumer != producer + 1:
            values = [c.values[0].name for c in plan.partition.crossings(plan.graph) if c.consumer == consumer]
            raise PartitionError(
                "a value skips a stage, which torch's pipelining cannot send",
                value=values[0],
                made_in_stage=producer,
                read_in_stage=consumer,
                hint="penstock train, which sends it directly",
            )
    if ties_weights:
        return
    stage_of = {name: plan.partition.stage_of(node.name) for node in plan.graph.nodes for name in node.parameters}
    for names in plan.graph.tied:
        if len(found := {stage_of[name] for name in names if name in stage_of}) > 1:
            hint = "penstock train, which adds the gradients of both, or a model with weights of its own for each"
            raise PartitionError("a tied parameter is in two stages", names=names, stages=sorted(found), hint=hint)


def _filled(stages: list[int], num_stages: int) -> list[int]:
    """The stages of modules in order, moved as little as possible so that every stage has a module.

    A last stage of functions only, such as the loss, has none.
    """
    starts = [next((i for i, stage in enumerate(stages) if stage >= own), len(stages)) for own in range(num_stages)]
    for own in range(1, num_stages):
        starts[own] = max(starts[own], starts[own - 1] + 1)
    for own in range(num_stages):
        starts[own] = min(starts[own], len(stages) - num_stages + own)
    return [sum(start <= i for start in starts) - 1 for i in range(len(stages))]


def _unit(module: str) -> str:
    """The element of the outermost list that contains the module, or the module itself."""
    found = _ELEMENT.match(module)
    return found[0] if found else module


def _schedule(plan: Plan) -> str:
    """The schedule name that implies this placement; the order itself is in the CSV."""
    placement = plan.schedule.placement
    if placement.kind == "mixed":
        hint = "--stages-per-rank 1, or a schedule such as interleaved or zbv"
        raise PlanError("the placement must be a loop or a vee", placement=placement.ranks, hint=hint)
    if placement.kind == "vee":
        return "ZBVZeroBubble"
    return "1F1B" if plan.num_stages == plan.num_ranks else "Interleaved1F1B"


def _samples(plan: Plan) -> int:
    """Samples in a microbatch: the first dimension of the first input that has one."""
    return next((value.spec.shape[0] for value in plan.graph.inputs if value.spec.shape), 1)


def _recomputes(plan: Plan) -> bool:
    chosen = plan.choices.recompute
    if any(chosen) and not all(chosen):
        hint = "--recompute none or full"
        raise PlanError("recomputation must apply to all stages or to none", stages=chosen, hint=hint)
    return all(chosen)
