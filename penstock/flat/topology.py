"""Topology: which place this process has in the grid of all processes, and the group for every dimension."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from penstock.errors import RunError
from penstock.flat.grid import DATA, MODEL, PIPE, TENSOR, WORLD, Grid
from penstock.flat.line import Line
from penstock.ir import is_finite
from penstock.runtime import Agreement, ProcessGroups, RankMonitor, RankSync

DEADLINE_SECONDS = 60.0


class Topology:
    """The groups of this process, by the names of the dimensions; empty until they are set up."""

    def __init__(self) -> None:
        self._grid: Grid | None = None
        self._groups: dict[str, Any] = {}
        self._line: Line | None = None

    def setup_process_groups(
        self, config: Iterable[Sequence[object]], deadline_seconds: float = DEADLINE_SECONDS
    ) -> None:
        """Make the groups for pairs of a name and a size, the outermost dimension first; all processes call it alike.

        `[("data", 2), ("pipe", 2)]`, in any order. Nothing that ranks do together waits longer than the deadline.
        """
        if not dist.is_initialized():
            hint = "dist.init_process_group('gloo'), torchrun, or penstock.launch"
            raise RunError("torch.distributed is not initialised in this process", hint=hint)
        if not (is_finite(deadline_seconds) and deadline_seconds > 0):
            raise RunError("a deadline is seconds above 0", deadline_seconds=repr(deadline_seconds), hint="60.0")
        rank, world = dist.get_rank(), dist.get_world_size()
        grid = Grid.of(config, world)
        pipe = grid.group_of(PIPE, rank) if PIPE in grid.names else (rank,)
        monitor = RankMonitor(pipe, range(world), deadline_seconds)
        is_gloo = dist.get_backend() == "gloo"
        control = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
        RankSync(ProcessGroups(rank, world, dist.group.WORLD, control, monitor=monitor)).establish(
            Agreement.of_options({"dimensions": grid.dimensions})
        )
        self._groups = {kind: _made(grid.groups(kind), rank) for kind in grid.kinds if kind != WORLD}
        self._groups[WORLD] = dist.group.WORLD
        self._grid = grid
        self._line = None
        if PIPE in grid.names:
            host = self._groups[PIPE] if is_gloo else _made(grid.groups(PIPE), rank, "gloo")
            replicas = self._groups[DATA] if DATA in grid.names and self.get_group_size(DATA) > 1 else None
            own = ProcessGroups(pipe.index(rank), len(pipe), self._groups[PIPE], host, replicas, None, monitor)
            self._line = Line(own)
        monitor.idle()

    @property
    def line(self) -> Line:
        """The pipeline that this process is in."""
        if self._line is None:
            self._known(PIPE)
            raise AssertionError("a topology with a pipe has a line")
        return self._line

    def get_group(self, mode: str) -> Any:
        """The group of torch.distributed along a dimension, of "model" (all but data), or of the "global" world."""
        self._known(mode)
        return self._groups[mode]

    def get_ranks_in_group(self, mode: str) -> list[int]:
        """The ranks of the world that are in the group of this process, in order."""
        return list(self._known(mode).group_of(mode, dist.get_rank()))

    def all_ranks(self, mode: str) -> list[list[int]]:
        """The ranks of every group along a dimension."""
        return [list(group) for group in self._known(mode).groups(mode)]

    def get_group_rank(self, mode: str) -> int:
        """The place of this process in its group."""
        return self.get_ranks_in_group(mode).index(dist.get_rank())

    def get_group_size(self, mode: str) -> int:
        """How many processes are in its group."""
        return len(self.get_ranks_in_group(mode))

    def get_prev_global_rank(self, mode: str = PIPE) -> int:
        """The rank of the world before this one in its group; before the first comes the last."""
        return self._neighbour(mode, -1)

    def get_next_global_rank(self, mode: str = PIPE) -> int:
        """The rank of the world after this one in its group; after the last comes the first."""
        return self._neighbour(mode, 1)

    def _neighbour(self, mode: str, step: int) -> int:
        ranks = self.get_ranks_in_group(mode)
        return ranks[(ranks.index(dist.get_rank()) + step) % len(ranks)]

    def is_mode_inited(self, mode: str) -> bool:
        """Whether there are groups of several processes along a dimension."""
        return self._grid is not None and mode in self._grid.kinds and self.get_group_size(mode) > 1

    def is_first_group(self, mode: str) -> bool:
        """Whether the group of this process is the first along a dimension."""
        return self.get_ranks_in_group(mode) == self.all_ranks(mode)[0]

    def is_first_in_group(self, mode: str) -> bool:
        """Whether this process is the first of its group."""
        return self.get_group_rank(mode) == 0

    def is_last_in_group(self, mode: str) -> bool:
        """Whether this process is the last of its group."""
        return self.get_group_rank(mode) == self.get_group_size(mode) - 1

    def is_first_in_pipeline_group(self) -> bool:
        """Whether this process holds the first stage."""
        return self.is_first_in_group(PIPE)

    def is_last_in_pipeline_group(self) -> bool:
        """Whether this process holds the last stage."""
        return self.is_last_in_group(PIPE)

    def is_first_in_data_group(self) -> bool:
        """Whether this process is in the first replica."""
        return self.is_first_in_group(DATA)

    def is_last_in_data_group(self) -> bool:
        """Whether this process is in the last replica."""
        return self.is_last_in_group(DATA)

    def is_first_in_tensor_group(self) -> bool:
        """Whether this process is the first of its tensor group."""
        return self.is_first_in_group(TENSOR)

    def is_last_in_tensor_group(self) -> bool:
        """Whether this process is the last of its tensor group."""
        return self.is_last_in_group(TENSOR)

    def is_first_in_model_group(self) -> bool:
        """Whether this process is the first of those that hold one model."""
        return self.is_first_in_group(MODEL)

    def is_last_in_model_group(self) -> bool:
        """Whether this process is the last of those that hold one model."""
        return self.is_last_in_group(MODEL)

    def get_pp_rank(self) -> int:
        """The place in the pipeline."""
        return self.get_group_rank(PIPE)

    def get_pp_size(self) -> int:
        """The length of the pipeline."""
        return self.get_group_size(PIPE)

    def get_dp_rank(self) -> int:
        """The number of the replica."""
        return self.get_group_rank(DATA)

    def get_dp_size(self) -> int:
        """How many replicas there are."""
        return self.get_group_size(DATA)

    def get_tp_rank(self) -> int:
        """The place in the tensor group."""
        return self.get_group_rank(TENSOR)

    def get_tp_size(self) -> int:
        """The size of the tensor group."""
        return self.get_group_size(TENSOR)

    def get_mp_rank(self) -> int:
        """The place among those that hold one model."""
        return self.get_group_rank(MODEL)

    def get_mp_size(self) -> int:
        """How many processes hold one model."""
        return self.get_group_size(MODEL)

    def _known(self, mode: str) -> Grid:
        if self._grid is None:
            hint = "topology.setup_process_groups([('pipe', dist.get_world_size())])"
            raise RunError("the topology is not set up", hint=hint)
        if mode not in self._grid.kinds:
            known = ", ".join(self._grid.kinds)
            raise RunError("the topology has no such dimension", name=repr(mode), known=known)
        return self._grid


def _made(groups: Iterable[tuple[int, ...]], rank: int, backend: str | None = None) -> Any:
    """The group of this process; all processes make all groups, in the same order."""
    made = [(ranks, dist.new_group(list(ranks), backend=backend)) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)


topology = Topology()
