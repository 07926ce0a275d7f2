"""Crew: the ranks of one pipeline, its replicas, and this process among them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.lookout import Lookout

PIPELINE, REPLICAS = "pp", "dp"


@dataclass(frozen=True)
class Crew:
    """Who works together.

    `group` carries the messages between the stages, `control` the small figures that all ranks compare, on the host;
    `replicas` are the ranks that hold the same stages of other copies of the pipeline, and `replica_control` the same
    for figures. `lookout` keeps the deadlines.
    """

    rank: int
    ranks: int
    group: Any = None
    control: Any = None
    replicas: Any = None
    replica_control: Any = None
    lookout: Lookout | None = None

    @property
    def is_alone(self) -> bool:
        """Whether all ranks are inside this process."""
        return self.group is None

    @property
    def replica(self) -> int:
        """Which copy of the pipeline this is."""
        return 0 if self.replicas is None else dist.get_rank(self.replicas)

    @property
    def num_replicas(self) -> int:
        """How many copies of the pipeline train together."""
        return 1 if self.replicas is None else dist.get_world_size(self.replicas)

    @classmethod
    def inside(cls, ranks: int) -> "Crew":
        """All ranks in this process."""
        return cls(0, ranks)

    @classmethod
    def of_world(cls, ranks: int, deadline_seconds: float) -> "Crew":
        """Every process of torch.distributed is a rank of the pipeline."""
        if dist.get_world_size() != ranks:
            raise RunError(
                "the plan is for another number of ranks",
                plan=ranks,
                world=dist.get_world_size(),
                hint=f"start {ranks} processes, or give a mesh with a {PIPELINE!r} axis of {ranks}",
            )
        group = dist.group.WORLD
        control = group if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        lookout = Lookout(range(ranks), (), deadline_seconds)
        return cls(dist.get_rank(), ranks, group, control, lookout=lookout)

    @classmethod
    def of_mesh(cls, mesh: Any, ranks: int, deadline_seconds: float) -> "Crew":
        """The pipeline along the axis "pp" of a mesh, replicas along "dp"."""
        names = mesh.mesh_dim_names or ()
        if PIPELINE not in names or set(names) - {PIPELINE, REPLICAS}:
            raise RunError(
                "a mesh needs an axis for the pipeline, and may have one for replicas",
                axes=names,
                hint=f'init_device_mesh(device, (2, 2), mesh_dim_names=("{REPLICAS}", "{PIPELINE}"))',
            )
        found = mesh[PIPELINE].size()
        if found != ranks:
            raise RunError("the plan is for another number of ranks", plan=ranks, mesh=found)
        group = mesh.get_group(PIPELINE)
        control, replicas, replica_control = _control_of(mesh, PIPELINE), None, None
        if REPLICAS in names and mesh[REPLICAS].size() > 1:
            replicas, replica_control = mesh.get_group(REPLICAS), _control_of(mesh, REPLICAS)
        own = [dist.get_global_rank(group, rank) for rank in range(ranks)]
        lookout = Lookout(own, mesh.mesh.flatten().tolist(), deadline_seconds)
        return cls(mesh.get_local_rank(PIPELINE), ranks, group, control, replicas, replica_control, lookout)

    def gather(self, figures: Tensor) -> Tensor:
        """The figures of all ranks, one row each."""
        if self.is_alone:
            return figures.unsqueeze(0)
        rows = torch.empty((self.ranks, *figures.shape), dtype=figures.dtype)
        self.do(dist.all_gather, list(rows.unbind()), figures, group=self.control, async_op=True)
        return rows

    def gather_replicas(self, figures: Tensor) -> Tensor:
        """The figures of this rank and of those that hold the same stages, one row for each replica."""
        if self.replica_control is None:
            return figures.unsqueeze(0)
        rows = torch.empty((self.num_replicas, *figures.shape), dtype=figures.dtype)
        self.do(dist.all_gather, list(rows.unbind()), figures, group=self.replica_control, async_op=True)
        return rows

    def start(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begin an operation of torch.distributed that needs no waiting for; if that fails it is said in words."""
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            raise error if self.lookout is None else self.lookout.parted(error) from error

    def wait(self, work: Any) -> None:
        """Wait for something that ranks do together, not longer than the deadline."""
        if self.lookout is None:
            work.wait()
            return
        try:
            work.wait(self.lookout.deadline)
        except RuntimeError as error:
            raise self.lookout.parted(error) from error

    def do(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin an operation that can be waited for, and wait for it."""
        self.wait(self.start(operation, *args, **kwargs))

    def tell(self, figures: Tensor, source: int) -> Tensor:
        """The figures of one rank, on every rank; all of them know the form."""
        if not self.is_alone:
            self.do(dist.broadcast, figures, group=self.control, group_src=source, async_op=True)
        return figures

    def tell_text(self, text: str, source: int) -> str:
        """The text of one rank, on every rank."""
        return text if self.is_alone else self._told(text, source, self.rank == source, self.control)

    def tell_all(self, text: str) -> str:
        """The text of the first rank of the first replica, on every rank of all."""
        return self.tell_replicas(self.tell_text(text, 0), 0)

    def tell_replicas(self, text: str, source: int) -> str:
        """The text of one replica, on every rank that holds the same stages."""
        return text if self.replicas is None else self._told(text, source, self.replica == source, self.replica_control)

    def _told(self, text: str, source: int, is_source: bool, group: Any) -> str:
        data = bytearray(text.encode())
        content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self.do(dist.broadcast, size, group=group, group_src=source, async_op=True)
        if not is_source:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.do(dist.broadcast, content, group=group, group_src=source, async_op=True)
        return content.numpy().tobytes().decode()


def _control_of(mesh: Any, axis: str) -> Any:
    """A group along an axis for figures on the host: that of the axis if it can carry them, else one more per row."""
    group = mesh.get_group(axis)
    if dist.get_backend(group) == "gloo":
        return group
    place = (mesh.mesh_dim_names or ()).index(axis)
    rows = mesh.mesh.movedim(place, -1).reshape(-1, mesh.mesh.shape[place]).tolist()
    made = [dist.new_group(row, backend="gloo") for row in rows]
    return next(one for one, row in zip(made, rows, strict=True) if dist.get_rank() in row)
