"""The process groups of one pipeline, of its replicas, and of the ranks that share its tensors."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import RunError
from penstock.runtime.monitor import RankMonitor

PIPELINE, REPLICAS, EXPERTS, TENSOR = "pp", "dp", "ep", "tp"
"""the names of the axes of a mesh"""
_REPLICA_AXES = (REPLICAS, EXPERTS)
"""the axes along which ranks train on different batches"""
_AXES = (PIPELINE, *_REPLICA_AXES, TENSOR)
# Message tags, far above those of messages between stages, which have small numbers, as the user's own are likely to.
SYNC_TAG = 2_000_000_000
"""of syncs; each sync that may be open at the same time as others adds its number, below 1,000,000"""
HEADER_TAG, CONTENT_TAG, LOSS_TAG = 2_001_000_001, 2_001_000_002, 2_002_000_000
"""of messages that a header describes, and of losses of asynchronous steps, to which a small number is added"""


@dataclass
class ProcessGroups:
    """The groups of torch.distributed that this process belongs to, and its position in them.

    `is_local`: all ranks are in this process. `replica` of `num_replicas` is the index of this copy of the pipeline.
    With tensor parallelism a replica consists of several pipelines, each with a part of the tensors of every stage and
    all with the same batch: `pipeline` of `num_pipelines` is the index among those of all replicas. `is_first`: this is
    the first rank of the first pipeline, which issues warnings and writes logs for all.
    """

    rank: int
    """of the pipeline"""
    num_ranks: int
    group: Any = None
    """carries the messages between the stages; None if all ranks are in this process"""
    control: Any = None
    """the same ranks, for small host tensors (always gloo)"""
    replicas: Any = None
    """the ranks with the same stages in other copies of the pipeline; None if there is one copy"""
    replica_control: Any = None
    """the same ranks, for small host tensors"""
    monitor: RankMonitor | None = None
    """of this process; None if and only if all ranks are in it"""
    peers: Any = None
    """the ranks with the same stages in all pipelines, those of one replica next to each other; for host tensors"""
    connections: Any = None
    """the result of `transports.links.connect`, once it was called"""

    _channels: ClassVar[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()
    """by control group"""
    interrupted: ClassVar[dict[int, Any]] = {}
    """by id, the groups in which messages of a failed step were dropped, and may still arrive"""

    def __post_init__(self) -> None:
        if id(self.group) in self.interrupted:
            raise RunError(
                "messages of a step that was interrupted may still arrive in this process group",
                hint="start the processes again, or initialize torch.distributed again on every rank",
            )
        self.is_local = self.group is None
        self.own_ranks = range(self.num_ranks) if self.is_local else (self.rank,)
        """the pipeline ranks of this process"""
        self.num_processes = 1 if self.is_local else self.num_ranks
        """of this pipeline: 1 if all of its ranks are in this process"""
        self.replica = 0 if self.replicas is None else dist.get_rank(self.replicas)
        self.num_replicas = 1 if self.replicas is None else dist.get_world_size(self.replicas)
        if self.peers is None:
            self.peers = self.replica_control
        self.pipeline = 0 if self.peers is None else dist.get_rank(self.peers)
        self.num_pipelines = 1 if self.peers is None else dist.get_world_size(self.peers)
        self.num_tensor_ranks = max(1, self.num_pipelines // self.num_replicas)
        """number of pipelines per replica, along the axis "tp" of the mesh"""
        self.tensor_rank = self.pipeline % self.num_tensor_ranks
        """position of this pipeline among those of its replica"""
        self.is_first = self.rank == 0 and self.replica == 0 and self.pipeline == 0

    @property
    def channels(self) -> Any:
        """Channels for the syncs of the control group, by rank, once `transports.links.connect` has made them.

        All Pipelines of the group share them, so that ranks that call different Pipelines are seen to disagree.
        """
        return self._channels.get(self.control)

    @channels.setter
    def channels(self, channels: Any) -> None:
        self._channels[self.control] = channels

    @classmethod
    def local(cls, num_ranks: int) -> "ProcessGroups":
        """All ranks in this process."""
        return cls(0, num_ranks)

    @classmethod
    def of_world(cls, num_ranks: int, deadline_seconds: float) -> "ProcessGroups":
        """Every process of the default group is a rank of the pipeline."""
        if dist.get_world_size() != num_ranks:
            raise RunError(
                "the number of processes must be the number of ranks of the plan",
                plan=num_ranks,
                world=dist.get_world_size(),
                hint=f"start {num_ranks} processes, or give a mesh with a {PIPELINE!r} axis of {num_ranks}",
            )
        group = dist.group.WORLD
        control = group if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        monitor = RankMonitor(range(num_ranks), (), deadline_seconds)
        return cls(dist.get_rank(), num_ranks, group, control, monitor=monitor)

    @classmethod
    def of_mesh(cls, mesh: Any, num_ranks: int, deadline_seconds: float) -> "ProcessGroups":
        """The pipeline along the axis "pp" of a DeviceMesh, replicas along "dp" and "ep", shared tensors along "tp"."""
        _check_axes(mesh, num_ranks)
        sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
        replica_axes = [axis for axis in _REPLICA_AXES if sizes.get(axis, 1) > 1]
        peer_axes = [*replica_axes, *([TENSOR] if sizes.get(TENSOR, 1) > 1 else [])]
        group, control = mesh.get_group(PIPELINE), _group(mesh, [PIPELINE], "gloo")
        replicas = replica_control = None
        if replica_axes:
            replicas, replica_control = _group(mesh, replica_axes), _group(mesh, replica_axes, "gloo")
        peers = replica_control if peer_axes == replica_axes else _group(mesh, peer_axes, "gloo")
        pipeline_ranks = [dist.get_global_rank(group, rank) for rank in range(num_ranks)]
        ranks, backend = mesh.mesh.flatten().tolist(), dist.get_backend(group)
        monitor = RankMonitor(pipeline_ranks, ranks, deadline_seconds, backend=backend)
        return cls(mesh.get_local_rank(PIPELINE), num_ranks, group, control, replicas, replica_control, monitor, peers)

    def start(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, such as one that starts an operation of torch.distributed; a RuntimeError is explained."""
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            if self.monitor is None:
                raise
            raise self.monitor.sync_error(error) from error

    def wait(self, work: Any) -> None:
        """Wait for a started operation, at most until the deadline."""
        if self.monitor is None:
            work.wait()
            return
        try:
            self.monitor.wait(work)
        except RuntimeError as error:
            raise self.monitor.sync_error(error) from error

    def run(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start an asynchronous operation and wait for it."""
        self.wait(self.start(operation, *args, **kwargs))

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks of the pipeline, one row each, on every rank."""
        return self._gather(values, self.control, self.num_ranks)

    def gather_peers(self, values: Tensor) -> Tensor:
        """The values of the ranks with the same stages in all pipelines, one row each, on each of these ranks."""
        return self._gather(values, self.peers, self.num_pipelines)

    def _gather(self, values: Tensor, group: Any, size: int) -> Tensor:
        if group is None:
            return values.unsqueeze(0)
        rows = torch.empty((size, *values.shape), dtype=values.dtype)
        self.run(dist.all_gather, list(rows.unbind()), values, group=group, async_op=True)
        return rows

    def broadcast(self, values: Tensor, source: int) -> Tensor:
        """The values of pipeline rank `source` on every rank; shape and dtype must be equal everywhere."""
        if not self.is_local:
            self.run(dist.broadcast, values, group=self.control, group_src=source, async_op=True)
        return values

    def broadcast_text(self, text: str, source: int) -> str:
        """The text of pipeline rank `source` on every rank of the pipeline."""
        return self._broadcast_text(self.control, text, source)

    def broadcast_text_to_peers(self, text: str, source: int) -> str:
        """The text of pipeline `source` on every rank with the same stages."""
        return self._broadcast_text(self.peers, text, source)

    def broadcast_text_to_all(self, text: str) -> str:
        """The text of the first rank of the first pipeline, on every rank of every pipeline."""
        return self.broadcast_text_to_peers(self.broadcast_text(text, 0), 0)

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks of the pipeline, on every rank."""
        return [self.broadcast_text(text, rank) for rank in range(self.num_processes)]

    def gather_texts_of_all(self, text: str) -> list[str]:
        """The texts of all ranks of all pipelines, on every rank: pipeline by pipeline, in the order of their ranks."""
        own = json.dumps(self.gather_texts(text))
        pipelines = [self.broadcast_text_to_peers(own, index) for index in range(self.num_pipelines)]
        return [found for texts in pipelines for found in json.loads(texts)]

    def _broadcast_text(self, group: Any, text: str, source: int) -> str:
        """The text of rank `source` of a group on every rank of it; `text` itself if the group is None."""
        if group is None:
            return text
        data = bytearray(text.encode())
        content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        # The size goes first: gloo does not check that both ends of a message have the same size.
        size = torch.tensor([len(content)])
        self.run(dist.broadcast, size, group=group, group_src=source, async_op=True)
        if dist.get_rank(group) != source:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.run(dist.broadcast, content, group=group, group_src=source, async_op=True)
        return content.numpy().tobytes().decode()


def mesh_sizes(mesh: Any) -> tuple[int, int]:
    """The number of ranks of a pipeline, and of replicas, on a DeviceMesh."""
    if not isinstance(mesh, DeviceMesh):
        hint = 'torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))'
        raise RunError("mesh must be a DeviceMesh", got=type(mesh).__name__, hint=hint)
    _check_axes(mesh)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    return sizes[PIPELINE], math.prod(sizes.get(axis, 1) for axis in _REPLICA_AXES)


def _check_axes(mesh: Any, num_ranks: int | None = None) -> None:
    """Refuse a mesh without the axis of the pipeline, or with processes along an axis of unknown meaning.

    With `num_ranks`, the axis must have that many ranks.
    """
    names = mesh.mesh_dim_names or ()
    unknown = {name: size for name, size in zip(names, mesh.mesh.shape, strict=False) if name not in _AXES and size > 1}
    if PIPELINE not in names or unknown:
        raise RunError(
            f"a mesh must have an axis for the pipeline ({PIPELINE!r}), and may have axes for replicas ({REPLICAS!r}, "
            f"{EXPERTS!r}) and for tensor parallelism ({TENSOR!r})",
            axes=names,
            **{"unknown": unknown} if unknown else {},
            hint=f'init_device_mesh(device, (2, 2), mesh_dim_names=("{REPLICAS}", "{PIPELINE}"))',
        )
    if num_ranks is not None and mesh[PIPELINE].size() != num_ranks:
        raise RunError(
            f"the {PIPELINE!r} axis of the mesh must be as long as the plan has ranks",
            plan=num_ranks,
            mesh=mesh[PIPELINE].size(),
        )


def _group(mesh: Any, axes: Sequence[str], backend: str | None = None) -> Any:
    """The group of the ranks along some axes, the last axis varying fastest."""
    if len(axes) == 1 and backend in (None, dist.get_backend(mesh.get_group(axes[0]))):
        return mesh.get_group(axes[0])
    dims = [mesh.mesh_dim_names.index(axis) for axis in axes]
    rest = [dim for dim in range(mesh.mesh.dim()) if dim not in dims]
    rows = mesh.mesh.permute(*rest, *dims).flatten(len(rest)).flatten(0, -2).tolist()
    # new_group is collective: every process creates the groups of all rows, in the same order.
    groups = [dist.new_group(row, backend=backend) for row in rows]
    return next(group for group, row in zip(groups, rows, strict=True) if dist.get_rank() in row)
