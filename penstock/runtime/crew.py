"""Crew: the ranks of one pipeline, its replicas, and this process among them."""

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
    `replicas` are the ranks that hold the same stages of other copies of the pipeline. `lookout` keeps the deadlines.
    """

    rank: int
    ranks: int
    group: Any = None
    control: Any = None
    replicas: Any = None
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
        return cls(dist.get_rank(), ranks, group, control, None, Lookout(group, deadline_seconds))

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
        replicas = mesh.get_group(REPLICAS) if REPLICAS in names and mesh[REPLICAS].size() > 1 else None
        lookout = Lookout(group, deadline_seconds)
        return cls(mesh.get_local_rank(PIPELINE), ranks, group, _control_of(mesh, group), replicas, lookout)

    def gather(self, figures: Tensor) -> Tensor:
        """The figures of all ranks, one row each."""
        if self.is_alone:
            return figures.unsqueeze(0)
        rows = torch.empty((self.ranks, *figures.shape), dtype=figures.dtype)
        self.wait(dist.all_gather(list(rows.unbind()), figures, group=self.control, async_op=True))
        return rows

    def wait(self, work: Any) -> None:
        """Wait for something that all ranks do together, not longer than the deadline."""
        if self.lookout is None:
            work.wait()
            return
        try:
            work.wait(self.lookout.deadline)
        except RuntimeError as error:
            raise self.lookout.parted(error) from error

    def gather_everywhere(self, figures: Tensor) -> Tensor:
        """The figures of all ranks of all replicas, one row each."""
        return self.gather_replicas(self.gather(figures))

    def gather_replicas(self, rows: Tensor) -> Tensor:
        """The rows of all replicas, one after another."""
        if self.replicas is None:
            return rows
        held = [torch.empty_like(rows) for _ in range(self.num_replicas)]
        self.wait(dist.all_gather(held, rows.contiguous(), group=self.replicas, async_op=True))
        return torch.cat(held)

    def tell_text(self, text: str, source: int) -> str:
        """The text of one rank, on every rank."""
        content = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self.wait(dist.broadcast(size, group=self.control, group_src=source, async_op=True))
        if self.rank != source:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.wait(dist.broadcast(content, group=self.control, group_src=source, async_op=True))
        return bytes(content.tolist()).decode()

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([len(own)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        rows = self.gather(padded)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def _control_of(mesh: Any, group: Any) -> Any:
    """A group for figures on the host: the pipeline's own if it can carry them, else one more per pipeline."""
    if dist.get_backend(group) == "gloo":
        return group
    place = (mesh.mesh_dim_names or ()).index(PIPELINE)
    rows = mesh.mesh.movedim(place, -1).reshape(-1, mesh.mesh.shape[place]).tolist()
    made = [dist.new_group(row, backend="gloo") for row in rows]
    return next(one for one, row in zip(made, rows, strict=True) if dist.get_rank() in row)
