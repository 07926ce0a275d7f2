"""Turns an AutoPipelineConfig into a plan: stages and order as configured, nothing measured or searched."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from penstock.api.arguments import check_batch
from penstock.api.measuring import measured_model
from penstock.auto.config import AutoPipelineConfig
from penstock.batches import Batch, BatchSplitter, Microbatch, Split, find_split
from penstock.capture import Granularity, capture
from penstock.errors import PartitionError, PlanError, ScheduleError
from penstock.ir import Graph, Partition, Plan, Profile, Program, Schedule, SplitRule, as_int, read_schedule
from penstock.partitioners import by_modules, cut_before
from penstock.passes import verify
from penstock.planner import Measured, PlanOptions, search
from penstock.schedules import build, find

# The schedules with several stages per rank that correspond to those with one.
_WITH_SEVERAL_STAGES = {"1f1b": "interleaved", "gpipe": "looped_bfs"}
_EXAMPLE_HINT = "build(model, loss_fn=..., args=(batch,)), with a batch like those of the training"


def plan_of(config: AutoPipelineConfig, model: nn.Module, example: Microbatch, has_loss_fn: bool) -> Plan:
    """The plan as configured. It depends on no measurement, so every rank computes the same one."""
    csv = _schedule_from_csv(config)
    granularity = Granularity(config.depth, config.basic_blocks)
    graph = measured_model(capture(model, example.args, example.kwargs, granularity), has_loss_fn).graph
    partition = partition_of(config, model, graph, csv)
    schedule = csv or schedule_of(config, partition.num_stages)
    if partition.num_stages != schedule.num_stages:
        stages = {"stages": partition.num_stages, "stages_of_the_CSV": schedule.num_stages}
        hint = "layers_per_stage or module_fqns_per_model_part with that number of stages, or another CSV"
        raise PlanError("the CSV must have as many stages as the model", **stages, hint=hint)
    options = PlanOptions(config.num_ranks, schedule=schedule, partitioner=partition, budget_seconds=0.0)
    return search({config.num_microbatches: Measured(graph, Profile.uniform(graph))}, options)


def _schedule_from_csv(config: AutoPipelineConfig) -> Schedule | Program | None:
    """The orders of `pp_schedule_csv`, which must have the configured sizes; None without it."""
    if config.pp_schedule_csv is None:
        return None
    schedule = read_schedule(config.pp_schedule_csv)
    sizes = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    configured = {"ranks": config.num_ranks, "microbatches": config.num_microbatches}
    if sizes != configured:
        raise PlanError(
            "the CSV must have the configured ranks and microbatches",
            csv=sizes,
            configured=configured,
            hint="pp_batch_size and pp_microbatch_size, or a mesh, with these sizes",
        )
    if isinstance(schedule, Schedule):
        # A program is proven for the cuts of the model when it is planned.
        verify(schedule)
    return schedule


def partition_of(
    config: AutoPipelineConfig, model: nn.Module, graph: Graph, csv: Schedule | Program | None
) -> Partition:
    """The configured stages; `csv` is the schedule of `pp_schedule_csv`, if that is configured."""
    if config.module_fqns_per_model_part is not None:
        return by_modules(graph, config.module_fqns_per_model_part)
    layers = layers_of(model, graph)
    if not layers:
        hint = "module_fqns_per_model_part=[...], or penstock.plan, which cuts any model"
        raise PartitionError("the model has no list of layers to cut between", model=type(model).__name__, hint=hint)
    counts = layers_per_stage(len(layers), num_stages_of(config, len(layers), csv))
    starts = [sum(counts[:stage]) for stage in range(1, len(counts))]
    return cut_before(graph, [layers[start] for start in starts])


def num_stages_of(config: AutoPipelineConfig, num_layers: int, csv: Schedule | Program | None) -> int:
    """The number of stages from `layers_per_stage`, rounded as configured; else the number that the schedule has."""
    ranks, each = config.num_ranks, config.layers_per_stage
    if each is None:
        return csv.num_stages if csv else ranks * find(str(config.pp_schedule))().stages_per_rank
    stages = -(-num_layers // each)
    rounding = config.round_virtual_stages_to_pp_multiple
    if rounding is not None:
        stages = -(-stages // ranks) * ranks if rounding == "up" else stages // ranks * ranks
    if stages % ranks or not stages:
        raise PlanError(
            "the number of stages must be a multiple of the ranks",
            layers=num_layers,
            layers_per_stage=each,
            stages=stages,
            ranks=ranks,
            hint='round_virtual_stages_to_pp_multiple="up", or other layers_per_stage',
        )
    return stages


def schedule_of(config: AutoPipelineConfig, num_stages: int) -> Schedule:
    """The named schedule for that many stages."""
    stages_per_rank, rest = divmod(num_stages, config.num_ranks)
    if rest:
        sizes = {"stages": num_stages, "ranks": config.num_ranks}
        raise PlanError("the number of stages must be a multiple of the ranks", **sizes)
    try:
        return build(schedule_name(config, num_stages), config.num_ranks, config.num_microbatches, stages_per_rank)
    except ScheduleError as error:
        if config.layers_per_stage is None:
            raise
        hint = 'pp_schedule="interleaved1f1b", which takes several stages per rank, or more layers_per_stage'
        raise PlanError(error.problem, layers_per_stage=config.layers_per_stage, hint=hint, **error.values) from None


def schedule_name(config: AutoPipelineConfig, num_stages: int) -> str:
    """The name in the table; with more module lists than ranks, of the kind that takes several stages per rank."""
    name = find(str(config.pp_schedule)).name
    has_several = config.module_fqns_per_model_part is not None and num_stages > config.num_ranks
    return _WITH_SEVERAL_STAGES.get(name, name) if has_several else name


def layers_of(model: nn.Module, graph: Graph) -> list[str]:
    """Names of the layers: elements of the outermost module lists that have parameters, in the order of calls."""
    names = (_layer_of(model, node.module) for node in graph.nodes if node.module)
    layers = dict.fromkeys(name for name in names if name)
    return [name for name in layers if any(True for _ in model.get_submodule(name).parameters())]


def _layer_of(model: nn.Module, path: str) -> str:
    """The element of the outermost list that a module is or belongs to; or ""."""
    words = path.split(".")
    for length in range(len(words)):
        if isinstance(model.get_submodule(".".join(words[:length])), nn.ModuleList | nn.Sequential):
            return ".".join(words[: length + 1])
    return ""


def layers_per_stage(num_layers: int, num_stages: int) -> list[int]:
    """The number of layers of every stage: equal to within one, larger ones first, none empty."""
    if (as_int(num_stages) or 0) < 1 or (as_int(num_layers) or 0) < num_stages:
        hint = "fewer stages, or module_fqns_per_model_part"
        raise PartitionError("every stage needs a layer", stages=num_stages, layers=num_layers, hint=hint)
    least, more = divmod(num_layers, num_stages)
    return [least + (stage < more) for stage in range(num_stages)]


def generate_hf_model_fqn_per_model_part(
    num_stages: int,
    num_layers: int,
    include_embeddings: bool = True,
    include_lm_head: bool = True,
    include_rotary_emb: bool = True,
    fqn_prefix: str = "model.",
) -> list[list[str]]:
    """The module names of every stage of a Hugging Face decoder.

    Layers are spread evenly; embeddings come first, norm and head last, the rotary embedding is on every stage.

    Args:
        num_stages: number of stages
        num_layers: number of layers of the model
        include_embeddings: whether the first stage gets `embed_tokens`
        include_lm_head: whether the last stage gets `lm_head`
        include_rotary_emb: whether every stage gets `rotary_emb`
        fqn_prefix: prefix of all names but `lm_head`

    Returns:
        A list of module names per stage, for `module_fqns_per_model_part`.

    Raises:
        PartitionError: if there are fewer layers than stages
    """
    counts = layers_per_stage(num_layers, num_stages)
    layers = iter(range(num_layers))
    stages = [[f"{fqn_prefix}layers.{layer}" for layer in islice(layers, count)] for count in counts]
    if include_embeddings:
        stages[0].insert(0, f"{fqn_prefix}embed_tokens")
    stages[-1].append(f"{fqn_prefix}norm")
    if include_lm_head:
        stages[-1].append("lm_head")
    if include_rotary_emb:
        for stage in stages:
            stage.append(f"{fqn_prefix}rotary_emb")
    return stages


def example_of(
    config: AutoPipelineConfig,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    has_loss_fn: bool,
    split: Split | None,
) -> tuple[Microbatch, dict[str, SplitRule]]:
    """The first microbatch of the given batch, or of one made of the model's `dummy_inputs`, and how it is split.

    Later batches may have other lengths and arguments: only the order of the layers is taken from the example.
    """
    check_batch(args, kwargs, PlanError, _EXAMPLE_HINT)
    if not args and not kwargs:
        args, kwargs = (), _dummy_batch(config, model, has_loss_fn)
    rules = {**find_split(model, args, kwargs, split), **(split or {})}
    microbatches = BatchSplitter(model.forward, rules).split(Batch(args, kwargs), config.num_microbatches)
    return microbatches[0], rules


def _dummy_batch(config: AutoPipelineConfig, model: nn.Module, has_loss_fn: bool) -> dict[str, Tensor]:
    """A batch of equal samples, the first of `dummy_inputs`, which every model of transformers has."""
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        kind = type(model).__name__
        raise PlanError("a model that is not from Hugging Face needs an example batch", model=kind, hint=_EXAMPLE_HINT)
    device = next((parameter.device for parameter in model.parameters()), None)
    rows = config.pp_batch_size
    batch = {name: value[:1].repeat(rows, *[1] * (value.dim() - 1)).to(device) for name, value in inputs.items()}
    ids = batch.get("input_ids")
    if not has_loss_fn and ids is not None and "labels" in inspect.signature(model.forward).parameters:
        batch["labels"] = ids
    return batch
