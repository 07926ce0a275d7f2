"""A model as a list of modules called one after another, and the part of the list that a rank holds."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.flat.topology import topology
from penstock.ir import as_int
from penstock.stages import LayerList

Entry = str | nn.Module | Callable[..., Any]
Entries = Iterable[Callable[..., Any]]


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


def flatten_model(
    model: nn.Module, layer_list: Iterable[Entry], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """The modules that the model calls one after another, as a Sequential or a list.

    Args:
        model: the whole model
        layer_list: names of modules, modules or functions in the order of their calls; a Sequential or ModuleList
            is replaced by its elements
        return_list: whether to return a list
    """
    steps = [layer for _, layer in LayerList(model, layer_list).layer_functions]
    modules = [step if isinstance(step, nn.Module) else Function(step) for step in steps]
    return modules if return_list else nn.Sequential(*modules)


def partition_uniform(
    flat_sequence: Entries, num_stages: int | None = None, stage: int | None = None
) -> list[Callable[..., Any]]:
    """The entries of a stage; stages have equal numbers of entries to within one, larger ones first.

    Args:
        flat_sequence: modules and functions, as `flatten_model` returns them
        num_stages: None: the number of pipeline ranks of the topology
        stage: None: this rank
    """
    entries, stages, stage = _check_arguments(flat_sequence, num_stages, stage)
    least, more = divmod(len(entries), stages)
    begin = stage * least + min(stage, more)
    return entries[begin : begin + least + (stage < more)]


def partition_balanced(
    flat_sequence: Entries, num_stages: int | None = None, stage: int | None = None
) -> list[Callable[..., Any]]:
    """The entries of a stage; the cut minimises the parameters of the largest stage.

    Entries that do not matter for that, such as functions without parameters, go to earlier stages.

    Args:
        flat_sequence: modules and functions, as `flatten_model` returns them
        num_stages: None: the number of pipeline ranks of the topology
        stage: None: this rank
    """
    entries, stages, stage = _check_arguments(flat_sequence, num_stages, stage)
    sizes = [
        sum(parameter.numel() for parameter in entry.parameters()) if isinstance(entry, nn.Module) else 0
        for entry in entries
    ]
    bounds = _bounds(sizes, stages)
    return entries[bounds[stage] : bounds[stage + 1]]


def _check_arguments(
    flat_sequence: Entries, num_stages: int | None, stage: int | None
) -> tuple[list[Callable[..., Any]], int, int]:
    """The entries, the number of stages and the stage, by default those of the topology."""
    entries = list(flat_sequence)
    stages = topology.get_pp_size() if num_stages is None else as_int(num_stages)
    index = topology.get_pp_rank() if stage is None else as_int(stage)
    if stages is None or index is None or not 0 <= index < stages:
        raise PartitionError("stage must be below num_stages", stage=repr(stage), num_stages=repr(num_stages))
    if len(entries) < stages:
        hint = "more entries: list the parts of a large module one by one"
        raise PartitionError("fewer entries than stages", entries=len(entries), stages=stages, hint=hint)
    return entries, stages, index


def _bounds(sizes: Sequence[int], stages: int) -> list[int]:
    """The boundaries of the stages that minimise the largest stage, by binary search for its size."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, stages, middle)) <= stages + 1:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, stages, low)


def _fill(sizes: Sequence[int], stages: int, limit: int) -> list[int]:
    """Fill stage after stage up to the limit, leaving at least one entry for each later stage."""
    bounds, content = [0], 0
    for index, size in enumerate(sizes):
        is_needed_later = len(sizes) - index == stages - len(bounds)
        if index > bounds[-1] and (content + size > limit or is_needed_later):
            bounds.append(index)
            content = 0
        content += size
    return [*bounds, len(sizes)]
