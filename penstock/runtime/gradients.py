"""Reduces gradients over replicas, tied parameters and shards, and computes and clips their global norm."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.capture import contiguous_entries, is_dtensor, is_ordered, largest_magnitude
from penstock.errors import RunError
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.host_memory import goes_through_host, host_buffer, read_scalars, to_device, to_host
from penstock.runtime.sync import RankSync, SyncRequest, SyncVote
from penstock.runtime.tensor_parallel import (
    ParameterLayout,
    distribute_like,
    dtensor_from_shard,
    full_tensor,
    local_shard,
    resolve_partial,
    stored_entries,
)


class ReplicaReducer:
    """Averages over the replicas the gradients that one step adds, each stage after its last backward.

    Of a parameter that is distributed over ranks, each rank sums its shard over the replicas that have the same one. If
    the replicas have different shards, as of experts, the shard's gradient is already a sum over their batches.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        layouts: Mapping[nn.Parameter, ParameterLayout] | None = None,
    ) -> None:
        """`parameters` by stage. Those without a layout are the same on all replicas."""
        self._groups = groups
        self.count = groups.num_replicas
        usual = ParameterLayout(groups.replicas, float(self.count))
        self._layouts = {p: (layouts or {}).get(p, usual) for stage in parameters.values() for p in stage}
        self._parameters = {
            index: [parameter for parameter in stage if self._layouts[parameter].is_reduced]
            for index, stage in parameters.items()
            if groups.replicas is not None
        }
        self._replica_ranks = () if groups.replicas is None else dist.get_process_group_ranks(groups.replicas)
        self._started: list[tuple[Any, float, Tensor, list[nn.Parameter]]] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are averaged here. FSDP averages those that it has sharded over all replicas itself."""
        return list(dict.fromkeys(parameter for stage in self._parameters.values() for parameter in stage))

    def start(self, stage: int) -> None:
        """Start averaging the gradients of a stage, while other stages still compute."""
        buckets: dict[Any, list[nn.Parameter]] = {}
        for parameter in self._parameters.get(stage, ()):
            if parameter.requires_grad:
                resolve_partial(parameter, self._replica_ranks)
                layout = self._layouts[parameter]
                # One message per dtype, so that no gradient is converted.
                buckets.setdefault((layout.group, layout.divisor, parameter.dtype), []).append(parameter)
        for (group, divisor, dtype), parameters in buckets.items():
            # A gradient may be missing on some replicas: flags, one per parameter, are sent after the gradients.
            flags = torch.tensor([p.grad is not None for p in parameters], dtype=dtype, device=parameters[0].device)
            flat = torch.cat([*map(_flat_gradient, parameters), flags])
            work = None
            if group is not None:
                work = self._groups.start(dist.all_reduce, flat, group=group, async_op=True)
            self._started.append((work, divisor, flat, parameters))

    def finish(self) -> None:
        """Wait for all averages and store them.

        A parameter that two stages use is averaged twice; the later average includes the gradients of both stages.
        """
        for work, divisor, flat, parameters in self._started:
            if work is not None:
                self._groups.wait(work)
            sizes = [local_shard(parameter).numel() for parameter in parameters]
            *averages, flags = torch.split(flat.div_(divisor), [*sizes, len(parameters)])
            for parameter, average, is_present in zip(parameters, averages, flags.tolist(), strict=True):
                # A parameter that no replica used has no gradient, as in plain training. The flags are divided too: any
                # positive one means that some replica has a gradient.
                if is_present:
                    # Cloned: a view would keep the memory of all gradients of the message.
                    local = average.view_as(local_shard(parameter)).clone()
                    parameter.grad = dtensor_from_shard(local, parameter)
        self._started.clear()

    def clear(self) -> None:
        """Drop averages that a failed step has started."""
        self._started.clear()

    def sum(self, values: Tensor) -> Tensor:
        """The values, summed over the replicas."""
        if self._groups.replica_control is None:
            return values
        total = values.cpu().clone()
        self._groups.run(dist.all_reduce, total, group=self._groups.replica_control, async_op=True)
        return total.to(values.device)


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local_shard(parameter)).flatten()
    return dense(local_shard(gradient)).flatten()


def dense(gradient: Tensor) -> Tensor:
    """A sparse gradient as a dense one; any other itself."""
    return gradient.to_dense() if gradient.is_sparse else gradient


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that stages of several ranks use; the first of these ranks owns it."""

    name: str
    parameter: nn.Parameter
    ranks: tuple[int, ...]


class TiedReducer:
    """Sums the gradients that one step adds to a tied parameter over the ranks that use the parameter."""

    def __init__(self, groups: ProcessGroups, tied: Sequence[TiedParameter]) -> None:
        self._groups = groups
        self.tied = () if groups.is_local else tuple(tied)
        # The owner's number cancels those of all others. A factor for each name, so that errors in two parameters do
        # not cancel each other; it is below 2**32, so that a float holds the sum exactly.
        self._balance = [
            (entry.parameter, zlib.crc32(entry.name.encode()) * (1 - len(entry.ranks) if is_owner else 1))
            for entry in self.tied
            for is_owner in [entry.ranks[0] == groups.rank]
        ]

    @property
    def trained_balance(self) -> float:
        """A number whose sum over the ranks is 0 if each parameter is trained by all ranks that use it or by none."""
        return float(sum([number for parameter, number in self._balance if parameter.requires_grad]))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are summed."""
        return [tied.parameter for tied in self.tied]

    @property
    def not_owned(self) -> set[int]:
        """The ids of parameters that another rank owns and counts in norms."""
        return {id(tied.parameter) for tied in self.tied if tied.ranks[0] != self._groups.rank}

    def finish(self) -> None:
        """Sum on the owner and send the sum back; every rank visits the parameters in the same order."""
        # Over torch.distributed even between ranks with shared memory: for 8 MiB, a ring would save 1.6 of 3.9 ms of
        # CPU time on each rank, once per step. That is not worth a second way to send them.
        for tied in self.tied:
            if not tied.parameter.requires_grad:
                continue
            owner, *others = tied.ranks
            gradient = tied.parameter.grad
            # Whole tensors are sent, because the ranks may have distributed the parameter in different ways.
            total = None if gradient is None else dense(full_tensor(gradient))
            if self._groups.rank != owner:
                send_tensor(self._groups, total, owner)
                total = receive_tensor(self._groups, tied.parameter, owner)
            else:
                for rank in others:
                    received = receive_tensor(self._groups, tied.parameter, rank)
                    total = received if total is None else total if received is None else total + received
                for rank in others:
                    send_tensor(self._groups, total, rank)
            tied.parameter.grad = None if total is None else distribute_like(total, tied.parameter)


def send_tensor(groups: ProcessGroups, tensor: Tensor | None, rank: int) -> None:
    """Send a tensor, or that there is none."""
    # A flag goes first: a rank may have no gradient to send.
    flag = torch.tensor([int(tensor is not None)])
    groups.run(dist.isend, flag, group=groups.control, group_dst=rank)
    if tensor is not None:
        content = contiguous_entries(tensor)
        if goes_through_host(groups.group, content.device):
            (content,) = to_host([content], content.device)
        groups.run(dist.isend, content, group=groups.group, group_dst=rank)


def receive_tensor(groups: ProcessGroups, like: Tensor, rank: int) -> Tensor | None:
    """Receive a tensor with the shape, dtype and device of another; None if the other rank has none."""
    flag = torch.zeros(1, dtype=torch.int64)
    groups.run(dist.irecv, flag, group=groups.control, group_src=rank)
    if not int(flag):
        return None
    if goes_through_host(groups.group, like.device):
        tensor = host_buffer(like.shape, like.dtype)
    else:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    groups.run(dist.irecv, tensor, group=groups.group, group_src=rank)
    return to_device(tensor, like.device)


def check_clipping(max_norm: object, norm_type: object) -> tuple[float, float]:
    """Check the arguments of clip_grad_norm_; returns `max_norm` and `norm_type` as floats."""
    limit = _number(max_norm)
    if limit is None or not limit >= 0:
        raise RunError("max_norm must be a number of 0 or more", got=repr(max_norm), hint="clip_grad_norm_(1.0)")
    power = _number(norm_type)
    if power is None or not power > 0:
        raise RunError(
            "norm_type must be a number above 0, or inf",
            got=repr(norm_type),
            hint='2.0 for the usual norm, float("inf") for the largest entry',
        )
    return limit, power


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and is_ordered(value) else None
    if isinstance(value, str):
        # torch accepts "inf" as a norm type.
        return math.inf if value == "inf" else None
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        return None
    return float(value)


def global_norm(
    sync: RankSync,
    request: SyncRequest,
    gradients: Sequence[Tensor],
    power: float,
    copies: Sequence[int] | None = None,
) -> Tensor:
    """The norm over the gradients of all ranks, bit-identical on every rank, as float64 on the host.

    `copies`: for each gradient, how many ranks of all pipelines have the same shard of it; by default one. Entries are
    divided by the largest one first, so that powers cannot overflow.
    """
    stored = [stored_entries(gradient) for gradient in gradients]
    magnitudes = read_scalars([largest_magnitude(entries) for entries in stored if entries.numel()])
    # Python's max would skip NaN.
    own_largest = float(torch.tensor([0.0, *magnitudes], dtype=torch.float64).max())
    largest = sync.exchange(request, SyncVote(maxes=(own_largest,))).maxes[0]
    if math.isinf(power) or not math.isfinite(largest) or largest == 0.0:
        return torch.tensor(largest, dtype=torch.float64)
    powers = []
    for entries in stored:
        scaled = entries.abs().to(torch.float64).div_(largest)
        powers.append((scaled.square_() if power == 2.0 else scaled.pow_(power)).sum())
    plain_sum, sharded_sum = 0.0, 0.0
    for gradient, count, value in zip(gradients, copies or [1] * len(gradients), read_scalars(powers), strict=True):
        if is_dtensor(gradient):
            sharded_sum += value / count
        else:
            plain_sum += value
    result = sync.exchange(request, SyncVote(sums=(plain_sum, sharded_sum)))
    # Plain gradients are equal in all pipelines, so those of one pipeline are summed. Of sharded ones each pipeline has
    # shards, so those of all pipelines are summed.
    total = result.pipeline_sums[0] + result.sums[1]
    return torch.tensor(largest * total ** (1.0 / power), dtype=torch.float64)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm becomes at most `max_norm`, by the formula of torch.nn.utils."""
    factor = float(max_norm) / (float(norm) + 1e-6)
    if factor < 1.0 or math.isnan(factor):
        for gradient in gradients:
            gradient.mul_(factor)
