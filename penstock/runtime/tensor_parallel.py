"""Tensor parallelism inside stages: parameters that `parallelize_fn` sharded over ranks, as DTensors.

A parameter is plain, and then equal on all ranks that have its stage, or sharded: a DTensor of which each rank has a
shard, along the axis "tp" of the mesh, or over replicas, as experts ("ep") and parameters of FSDP are. The shards
decide over which replicas the gradient is summed, and how many ranks would count it in a norm (`ParameterLayout`).

`groups.py` has the axes of the mesh and their process groups; `model_part.py` calls `parallelize_fn`; `gradients.py`
sums gradients over replicas and computes norms.
"""

import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.capture import is_dtensor, real_entries
from penstock.errors import RunError
from penstock.runtime.agreement import checksum, sample
from penstock.runtime.fsdp import averaged_by_fsdp
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.sync import raise_on_all_ranks

NUM_SAMPLED = 1024
"""entries of each parameter that ranks compare"""
_MAX_DIFFERENCE = 0.05
"""between entries of gradients that should be equal, relative to the largest one"""
_DTENSOR_HINT = "the same parameter on all of these ranks, or a DTensor: DTensor.from_local(own_part, mesh, [Shard(0)])"


@dataclass(frozen=True)
class ParameterLayout:
    """How the gradient of one parameter is reduced over the replicas, and counted in a norm."""

    group: Any = None
    """the replicas with the same shard, over which gradients are summed; None: no other replica has it"""
    divisor: float = 1.0
    """by which the sum is divided"""
    copies: int = 1
    """how many ranks of all pipelines have this shard"""

    @property
    def is_reduced(self) -> bool:
        """Whether the gradient is changed after backward."""
        return self.group is not None or self.divisor != 1.0


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def stored_entries(tensor: Tensor) -> Tensor:
    """The entries that this rank stores: of a DTensor its shard, of a sparse tensor those that are not left out."""
    tensor = local_shard(tensor)
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def dtensor_from_shard(local: Tensor, other: Tensor) -> Tensor:
    """The tensor of which this rank has the shard `local`, sharded like another one; `local` if that is plain."""
    if not is_dtensor(other):
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements = other.device_mesh, other.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=other.shape, stride=other.stride())


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, a collective call; a plain tensor itself."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def distribute_like(value: Tensor, other: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, sharded like `other`; the tensor itself if `other` is plain."""
    if is_dtensor(other) and not is_dtensor(value):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has the whole tensor, so nothing needs to be sent.
        return distribute_tensor(value.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
    return value


def sample_shard(tensor: Tensor) -> Tensor:
    """Some entries of a tensor or shard. A few are enough: weights of another seed differ everywhere."""
    return sample(local_shard(tensor.detach()), NUM_SAMPLED)


def sample_as_float64(tensor: Tensor) -> Tensor:
    """The entries that `sample_shard` selects as one row of float64 on the host; the parts of complex ones."""
    return real_entries(sample_shard(tensor)).flatten().to("cpu", torch.float64)


class PartialGradients:
    """Sums partial gradients: DTensors of which each rank has one addend, such as those of a norm weight.

    The ranks that share a parameter compute the same batch, so this sum is the gradient.
    """

    def __init__(self, groups: ProcessGroups, parameters: Iterable[nn.Parameter]) -> None:
        distributed = [parameter for parameter in dict.fromkeys(parameters) if is_dtensor(parameter)]
        self.parameters = [] if groups.is_local else distributed

    def finish(self) -> None:
        """Sum the partial gradients of all parameters."""
        for parameter in self.parameters:
            resolve_partial(parameter)


def resolve_partial(parameter: nn.Parameter, replicas: Collection[int] = ()) -> None:
    """Give a gradient the placements of its parameter; a collective call if they differ.

    Refuses a gradient that is partial over `replicas`, given as global ranks: it would be summed over them twice.
    """
    gradient = parameter.grad
    if is_dtensor(gradient) and is_dtensor(parameter) and gradient.placements != parameter.placements:
        mesh = gradient.device_mesh
        for dim, placement in enumerate(gradient.placements):
            ranks = set(dist.get_process_group_ranks(mesh.get_group(dim))) - {dist.get_rank()}
            if placement.is_partial() and ranks.intersection(replicas):
                raise RunError(
                    "a gradient must not be a partial sum over replicas: the Pipeline averages gradients over them",
                    shape=list(parameter.shape),
                    placements=gradient.placements,
                    hint="distribute only experts over replicas, and use their to_local() in the forward",
                )
        parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)


def find_layouts(
    groups: ProcessGroups, stages: Sequence[nn.Module], has_weights: bool, tied: Iterable[Sequence[str]]
) -> dict[nn.Parameter, ParameterLayout]:
    """The layout of every parameter of this rank's stages; a collective call of all ranks.

    `has_weights` is False for a model on the meta device, whose values are not compared. `tied`: groups of names that
    are one parameter. Raises an error, on every rank, if `parallelize_fn` untied one, or if a plain parameter differs
    between ranks that have the same stage: gradients of different parameters would be averaged, and a checkpoint would
    have one of them.
    """
    named = [(name, parameter) for stage in stages for name, parameter in stage.named_parameters()]
    untied = _untied(stages, tied)
    if groups.is_local:
        if untied is not None:
            raise untied
        return {parameter: ParameterLayout() for _, parameter in named}
    averaged = averaged_by_fsdp(stages)
    # All checks run before any error is raised: every rank must make the same collective calls.
    problem = untied or _wrong_mesh(groups, named) or _layer_split_over_replicas(groups, stages, averaged)
    rows, difference = _gather_hashes(groups, named, has_weights)
    raise_on_all_ranks(groups, problem or difference)
    replica_ranks = [dist.get_rank()] if groups.replicas is None else dist.get_process_group_ranks(groups.replicas)
    # The pipelines of all replicas that have the same shards along the axis "tp" as this one.
    alike = range(groups.tensor_rank, groups.num_pipelines, groups.num_tensor_ranks)
    subgroups: dict[tuple[int, ...], Any] = {}
    layouts: dict[nn.Parameter, ParameterLayout] = {}
    for index, (_, parameter) in enumerate(named):
        shards = rows[:, index, 0].tolist()
        own = shards[groups.pipeline]
        same = [rank for rank, pipeline in zip(replica_ranks, alike, strict=True) if shards[pipeline] == own]
        divisor = float(groups.num_replicas)
        if parameter in averaged:
            members, factor = averaged[parameter]
            # FSDP divides the sum over `members` by `factor`. Tensor-parallel ranks have the same batch, so if they are
            # members too, each replica is in that sum `times` times. Summed over the remaining replicas, it is
            # times / factor * sum(replicas), and the divisor makes that the mean.
            times = len(members) / len(members.intersection(replica_ranks))
            divisor = divisor * times / factor
            same = [rank for rank in same if rank not in members or rank == dist.get_rank()]
        key = tuple(same)
        if key not in subgroups:
            subgroups[key] = _subgroup(groups, key)
        layouts[parameter] = ParameterLayout(subgroups[key], divisor, shards.count(own))
    return layouts


def replicas_share_parameters(groups: ProcessGroups, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the forward of any rank communicates with other replicas, because they share parameters; collective."""
    if groups.replicas is None:
        return False
    others = set(dist.get_process_group_ranks(groups.replicas)) - {dist.get_rank()}
    meshes = (parameter.device_mesh for parameter in parameters if is_dtensor(parameter))
    own = any(others.intersection(mesh.mesh.flatten().tolist()) for mesh in meshes)
    pipeline = groups.gather(torch.tensor([int(own)])).max()
    return bool(groups.gather_peers(pipeline.reshape(1)).max().item())


def _subgroup(groups: ProcessGroups, ranks: Sequence[int]) -> Any:
    """The process group of some of the replicas; None for this rank alone."""
    if len(ranks) == 1:
        return None
    if len(ranks) == groups.num_replicas:
        return groups.replicas
    # Only the members call this, all of them in the order of their common parameters.
    backend = dist.get_backend(groups.replicas)
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)


def _untied(stages: Sequence[nn.Module], tied: Iterable[Sequence[str]]) -> RunError | None:
    """The error for names that were one parameter and no longer are, as after one of two modules was split."""
    parameters = {name: p for stage in stages for name, p in stage.named_parameters(remove_duplicate=False)}
    for names in tied:
        own = [name for name in names if name in parameters]
        if len({id(parameters[name]) for name in own}) > 1:
            return RunError(
                "parallelize_fn must keep tied parameters tied",
                names=", ".join(own),
                hint="split both modules alike and assign one parameter to both: head.weight = embedding.weight",
            )
    return None


def _wrong_mesh(groups: ProcessGroups, named: Sequence[tuple[str, nn.Parameter]]) -> RunError | None:
    """The error for a DTensor whose mesh has ranks without this stage, or that is a partial sum."""
    peers = {dist.get_rank()} if groups.peers is None else set(dist.get_process_group_ranks(groups.peers))
    for name, parameter in named:
        if not is_dtensor(parameter):
            continue
        ranks = set(parameter.device_mesh.mesh.flatten().tolist())
        if not ranks <= peers:
            return RunError(
                "a parameter must be distributed over ranks that have its stage",
                name=name,
                mesh=sorted(ranks),
                ranks=sorted(peers),
                hint='a mesh without the pipeline axis, such as mesh["tp"] of the mesh that the Pipeline was given',
            )
        if any(placement.is_partial() for placement in parameter.placements):
            problem, hint = "a parameter must not be a partial sum", "Shard or Replicate"
            return RunError(problem, name=name, placements=parameter.placements, hint=hint)
    return None


def _layer_split_over_replicas(
    groups: ProcessGroups, stages: Iterable[nn.Module], averaged: Mapping[nn.Parameter, tuple[set[int], float]]
) -> RunError | None:
    """The error for a layer that torch's tensor parallelism splits over replicas: they have different batches."""
    if groups.replicas is None:
        return None
    replicas = set(dist.get_process_group_ranks(groups.replicas))
    for stage in stages:
        for name, module in stage.named_modules():
            # Expert parallelism distributes modules with parameters of their own, not single layers of torch.
            if isinstance(module, nn.Linear | nn.Embedding) and getattr(module, "_distribute_module_applied", False):
                weight = module.weight
                ranks = set(weight.device_mesh.mesh.flatten().tolist()) if is_dtensor(weight) else set()
                by_fsdp, _ = averaged.get(weight, (set(), 1.0))
                if (ranks - by_fsdp) & (replicas - {dist.get_rank()}):
                    return RunError(
                        "a layer is split by tensor parallelism over replicas, which have different batches",
                        module=name,
                        hint='an axis "tp" of the mesh (tp_axis_name of an AutoPipeline), and the layer split along it',
                    )
    return None


def differing_gradients(groups: ProcessGroups, parameters: Mapping[str, nn.Parameter]) -> RunError | None:
    """The error for the first plain parameter whose gradient differs between tensor-parallel ranks.

    Such gradients must be equal, as the batches are. They differ if a module without a plan, such as a norm, is given
    another part of the sequence on each rank: then each rank has the gradient of its part. A collective call of the
    ranks with these parameters.
    """
    plain = {name: p for name, p in parameters.items() if p.requires_grad and not is_dtensor(p)}
    if not plain:
        return None
    gradients = [
        torch.zeros_like(sample_as_float64(p)) if p.grad is None else sample_as_float64(p.grad) for p in plain.values()
    ]
    first = groups.pipeline - groups.tensor_rank
    rows = groups.gather_peers(torch.cat(gradients))[first : first + groups.num_tensor_ranks]
    columns = torch.split(rows, [len(values) for values in gradients], dim=1)
    for name, entries in zip(plain, columns, strict=True):
        # Rounding may differ; gradients of different parts of a sequence differ as much as they are large.
        difference = (entries - entries[0]).abs()
        if entries.numel() and bool((difference.max() > _MAX_DIFFERENCE * entries.abs().max()).item()):
            return RunError(
                "the gradient of a parameter that is not a DTensor must be equal on all tensor-parallel ranks",
                name=name,
                hint="SequenceParallel() for a module that is given a part of the sequence on each rank",
            )
    return None


def _gather_hashes(
    groups: ProcessGroups, named: Sequence[tuple[str, nn.Parameter]], has_weights: bool
) -> tuple[Tensor, RunError | None]:
    """For each pipeline and parameter a hash of the shard and one of its values; and the error if they do not fit."""
    names = torch.tensor([len(named), zlib.crc32(json.dumps([name for name, _ in named]).encode())])
    if len(set(map(tuple, groups.gather_peers(names).tolist()))) > 1:
        problem = "parallelize_fn must leave parameters of the same names on all ranks that have the same stage"
        return torch.empty(0), RunError(problem, parameters=len(named), hint=_DTENSOR_HINT)
    hashes = [(_shard_hash(parameter), checksum({"": sample_shard(parameter)})) for _, parameter in named]
    rows = groups.gather_peers(torch.tensor(hashes, dtype=torch.int64).reshape(len(named), 2))
    for index, (name, parameter) in enumerate(named):
        values: dict[int, set[int]] = {}
        for shard, value in rows[:, index].tolist():
            values.setdefault(shard, set()).add(value)
        # These are the rows of all ranks that have this stage, so all of them find the same problem.
        if len(values) > 1 and any(shard % 2 == 0 for shard in values):
            problem = "a parameter that is not a DTensor must have the same shape on all ranks that have the same stage"
            return rows, RunError(problem, name=name, shape=list(parameter.shape), hint=_DTENSOR_HINT)
        if has_weights and any(len(different) > 1 for different in values.values()):
            kind = "the same shard of a parameter" if is_dtensor(parameter) else "a parameter"
            problem = f"{kind} must have the same values on all ranks that have the same stage"
            return rows, RunError(problem, name=name, hint=_DTENSOR_HINT)
    return rows, None


def _shard_hash(parameter: nn.Parameter) -> int:
    """A number that is even for a plain parameter and odd for a DTensor; the same for the same shape and shard."""
    text = f"{tuple(parameter.shape)} {parameter.dtype}"
    if not is_dtensor(parameter):
        return 2 * zlib.crc32(text.encode())
    mesh = parameter.device_mesh
    places = zip(parameter.placements, mesh.mesh.shape, mesh.get_coordinate() or (), strict=True)
    sharded = [place for place in places if not place[0].is_replicate()]
    return 2 * zlib.crc32(f"{text} {sharded}".encode()) + 1
