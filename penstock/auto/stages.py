"""How many stages a model is cut into, and where."""

from torch import nn

from penstock.auto.config import AutoPipelineConfig
from penstock.auto.names import shared_out
from penstock.errors import PartitionError, PlanError
from penstock.ir import Graph, Partition, Schedule
from penstock.partitioners import by_modules, cut_before
from penstock.schedules import build, find

_WITH_SEVERAL = {"1f1b": "interleaved", "gpipe": "looped_bfs"}
"""what a schedule with one stage per rank is called when there are several"""


def partition_of(config: AutoPipelineConfig, model: nn.Module, graph: Graph, given: Schedule | None) -> Partition:
    """The stages that the configuration asks for; `given` is the schedule, if it comes from a CSV."""
    named = config.module_fqns_per_model_part
    if named is not None:
        return by_modules(graph, named)
    layers = layers_of(model, graph)
    if not layers:
        hint = "module_fqns_per_model_part=[...], or penstock.plan, which cuts any model"
        raise PartitionError("the model has no list of layers to cut between", model=type(model).__name__, hint=hint)
    counts = shared_out(len(layers), num_stages_of(config, len(layers), given))
    starts = [sum(counts[:stage]) for stage in range(1, len(counts))]
    return cut_before(graph, [layers[start] for start in starts])


def num_stages_of(config: AutoPipelineConfig, num_layers: int, given: Schedule | None) -> int:
    """As many stages as the layers per stage make, rounded as asked for; else what the schedule wants."""
    ranks, each = config.num_ranks, config.layers_per_stage
    if each is None:
        return given.num_stages if given else ranks * find(str(config.pp_schedule))().stages_per_rank
    stages = -(-num_layers // each)
    rounding = config.round_virtual_stages_to_pp_multiple
    if rounding is not None:
        stages = -(-stages // ranks) * ranks if rounding == "up" else stages // ranks * ranks
    if stages % ranks or not stages:
        raise PlanError(
            "the stages do not divide among the ranks",
            layers=num_layers,
            layers_per_stage=each,
            stages=stages,
            ranks=ranks,
            hint='round_virtual_stages_to_pp_multiple="up", or other layers_per_stage',
        )
    return stages


def schedule_of(config: AutoPipelineConfig, num_stages: int) -> Schedule:
    """The named schedule for that many stages, the same order that its name stands for everywhere."""
    depth, rest = divmod(num_stages, config.num_ranks)
    if rest:
        raise PlanError("the stages do not divide among the ranks", stages=num_stages, ranks=config.num_ranks)
    return build(schedule_name(config, num_stages), config.num_ranks, config.num_microbatches, depth)


def schedule_name(config: AutoPipelineConfig, num_stages: int) -> str:
    """The name of the schedule in the table; for more lists of modules than ranks, the kind that takes several."""
    name = find(str(config.pp_schedule)).name
    is_several = config.module_fqns_per_model_part is not None and num_stages > config.num_ranks
    return _WITH_SEVERAL.get(name, name) if is_several else name


def layers_of(model: nn.Module, graph: Graph) -> list[str]:
    """The elements of the outermost lists of modules that have parameters, in the order in which they are called."""
    found = (_layer_of(model, node.module) for node in graph.nodes if node.module)
    layers = dict.fromkeys(name for name in found if name)
    return [name for name in layers if any(True for _ in model.get_submodule(name).parameters())]


def _layer_of(model: nn.Module, path: str) -> str:
    """The outermost element of a list that a module is or is part of; empty if there is none."""
    words = path.split(".")
    for length in range(len(words)):
        if isinstance(model.get_submodule(".".join(words[:length])), nn.ModuleList | nn.Sequential):
            return ".".join(words[: length + 1])
    return ""
