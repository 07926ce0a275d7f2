"""Checks that all ranks start with the same weights."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from penstock.errors import RunError
from penstock.ir import Plan
from penstock.runtime.agreement import checksum
from penstock.runtime.gradients import TiedReducer
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.meta_init import named_tensors, unsaved_buffer_names
from penstock.runtime.tensor_parallel import NUM_SAMPLED, full_tensor, sample_as_float64, sample_shard
from penstock.stages import parameter_ranks

_HINT = "use the same seed on every rank before creating the model, or load the same state on every rank"


def check_tied_weights(plan: Plan, tied: TiedReducer, groups: ProcessGroups) -> None:
    """Raise an error, on every rank, if a parameter that several ranks use differs between them."""
    names = [name for name, ranks in parameter_ranks(plan).items() if len(ranks) > 1]
    if groups.is_local or not names:
        return
    parameters = {entry.name: full_tensor(entry.parameter.detach()) for entry in tied.tied}
    checksums = torch.tensor([checksum({name: parameters[name]}) if name in parameters else 0 for name in names])
    for name, column in zip(names, groups.gather(checksums).t().tolist(), strict=True):
        if len(set(column) - {0}) > 1:
            raise RunError(
                "a parameter that several ranks use must have the same values on all of them",
                name=name,
                ranks=[rank for rank, number in enumerate(column) if number],
                hint=_HINT,
            )


def differing_weights(plan: Plan, model: nn.Module, groups: ProcessGroups) -> RunError | None:
    """The error for the first parameter, or buffer that no forward writes, that differs between ranks; collective.

    The same on all ranks of the pipeline. Tensors are sampled, and those that a rank does not have are not compared.
    """
    graph = plan.graph
    written = {name for update in graph.updates for name in update.names}
    unsaved = unsaved_buffer_names(model)
    names = [value.name for value in (*graph.parameters, *graph.buffers) if value.name not in written]
    tensors = {name: tensor for name, tensor in named_tensors(model) if name not in unsaved and not tensor.is_meta}
    digests = [checksum({"": sample_shard(tensors[name])}) if name in tensors else 0 for name in names]
    rows = groups.gather(torch.tensor(digests, dtype=torch.int64)).t().tolist()
    for name, column in zip(names, rows, strict=True):
        ranks = [rank for rank, number in enumerate(column) if number]
        other = next((rank for rank in ranks if column[rank] != column[ranks[0]]), None)
        if other is None:
            continue
        # All ranks find this difference, and gather a few entries for the error.
        entries = torch.full((NUM_SAMPLED,), math.nan, dtype=torch.float64)
        if name in tensors:
            values = sample_as_float64(tensors[name])[:NUM_SAMPLED]
            entries[: len(values)] = values
        first, second = groups.gather(entries)[[ranks[0], other]]
        differing = (first != second).logical_and((first == first) | (second == second)).nonzero().flatten().tolist()
        shown = [float(row[differing[0]]) if differing else "other entries" for row in (first, second)]
        spec = next(value.spec for value in (*graph.parameters, *graph.buffers) if value.name == name)
        return RunError(
            "the ranks start with different weights",
            name=name,
            tensor=str(spec),
            **{f"rank_{ranks[0]}": shown[0], f"rank_{other}": shown[1]},
            hint=f"{_HINT}; RunOptions(check_model=False) to train with the weights of each rank",
        ).on_all_ranks()
    return None


def check_replica_weights(groups: ProcessGroups, stages: Iterable[nn.Module]) -> None:
    """Raise an error, on every rank, if pipelines start with different weights; called before they are sharded."""
    if groups.peers is None:
        return
    entries = {
        name: sample_shard(parameter)
        for stage in stages
        for name, parameter in stage.named_parameters(remove_duplicate=False)
    }
    # Combined over the ranks of the pipeline first, so that every rank of every pipeline finds the same difference.
    combined = checksum({"ranks": groups.gather(torch.tensor([checksum(entries)]))})
    checksums = groups.gather_peers(torch.tensor([combined])).flatten().tolist()
    if len(set(checksums)) > 1:
        other = next(pipeline for pipeline, value in enumerate(checksums) if value != checksums[0])
        replica, tensor_rank = divmod(other, groups.num_tensor_ranks)
        if tensor_rank:
            problem, ranks = "tensor-parallel ranks start with different weights", {"tensor_ranks": (0, tensor_rank)}
        else:
            problem, ranks = "the replicas start with different weights", {"replicas": (0, replica)}
        raise RunError(problem, **ranks, hint=_HINT).on_all_ranks()
