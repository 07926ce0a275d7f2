"""The topology: all processes as a grid of named dimensions (data, pipe, tensor), and the groups along each."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from itertools import product
from typing import Any

import torch.distributed as dist

from penstock.errors import RunError
from penstock.ir import as_int, is_finite
from penstock.launch import group_device
from penstock.runtime import Agreement, ProcessGroups, RankMonitor, RankSync, RunOptions, UserStageEngine, watch_step

DATA, PIPE, TENSOR = "data", "pipe", "tensor"
MODEL, WORLD = "model", "global"
_EXAMPLE = "setup_process_groups([('data', 2), ('pipe', 2)])"


@dataclass(frozen=True)
class Grid:
    """Named dimensions from the outermost to the innermost; consecutive ranks differ in the innermost."""

    dimensions: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, dimensions: Iterable[Sequence[object]], world: int) -> "Grid":
        """A grid of all ranks, from pairs of a name and a size."""
        grid = cls(tuple(_dimension(entry) for entry in dimensions))
        if len(set(grid.names)) < len(grid.names):
            raise RunError("dimensions must have different names", dimensions=grid.names)
        if math.prod(grid.sizes) != world:
            raise RunError(
                "the sizes of all dimensions must multiply to the number of processes",
                dimensions=grid.dimensions,
                processes=world,
            )
        return grid

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dimensions)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.dimensions)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All group names; "model" groups are the ranks that hold one replica."""
        model = (MODEL,) if {PIPE, TENSOR} & set(self.names) else ()
        return (*self.names, *model, WORLD)

    def check_kind(self, kind: str) -> None:
        """Raise a RunError if there are no groups of that name."""
        if kind not in self.kinds:
            known = ", ".join(self.kinds)
            raise RunError("the topology has no such dimension", name=repr(kind), known=known, hint=_EXAMPLE)

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group of a kind: those that differ only in its dimensions."""
        self.check_kind(kind)
        along = {kind}
        if kind in (MODEL, WORLD):
            along = set(self.names) - ({DATA} if kind == MODEL else set())
        ranks: dict[tuple[int, ...], list[int]] = {}
        """by position in the other dimensions"""
        for rank, position in enumerate(product(*map(range, self.sizes))):
            rest = tuple(at for at, (name, _) in zip(position, self.dimensions, strict=True) if name not in along)
            ranks.setdefault(rest, []).append(rank)
        return tuple(map(tuple, ranks.values()))

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of that kind that contains a rank."""
        return next(group for group in self.groups(kind) if rank in group)


def _dimension(entry: Sequence[object]) -> tuple[str, int]:
    """The name and size of a dimension; sizes may be floats such as `world / 2`."""
    if isinstance(entry, str) or len(entry) != 2:
        raise RunError("a dimension must be a pair of a name and a size", got=repr(entry), hint=_EXAMPLE)
    name, size = entry
    count = int(size) if isinstance(size, float) and size.is_integer() else as_int(size)
    if not isinstance(name, str) or not name or name in (MODEL, WORLD):
        raise RunError("invalid name of a dimension", got=repr(name), reserved=(MODEL, WORLD), hint=_EXAMPLE)
    if count is None or count < 1:
        raise RunError("the size of a dimension must be a whole number, 1 or more", dimension=name, size=repr(size))
    return name, count


class FlatPipeline:
    """The pipeline of this process. Calls of forward_backward have the same number on all of its ranks."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.engine = UserStageEngine(groups, group_device(groups.group), groups.num_ranks, {})
        self.num_calls = 0
        self.replicated: dict[Any, None] | None = None
        """DDP modules that computed gradients in the current call; None between calls"""

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.groups.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.groups.rank == self.groups.num_ranks - 1

    @contextmanager
    def call(self, is_training: bool) -> Iterator[int]:
        """Run a call and yield its number; an error names the call and is reported to the other ranks."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self.replicated = {}
        try:
            with watch_step(self.groups.monitor, number, is_training):
                yield number
        finally:
            self.replicated = None


class Topology:
    """The process groups of this process by dimension; empty before `setup_process_groups`."""

    def __init__(self) -> None:
        self._grid: Grid | None = None
        self._groups: dict[str, Any] = {}
        self._pipeline: FlatPipeline | None = None

    def setup_process_groups(
        self, config: Iterable[Sequence[object]], deadline_seconds: float = RunOptions.deadline_seconds
    ) -> None:
        """Create the groups for pairs of a name and a size, outermost dimension first. Collective.

        For example `[("data", 2), ("pipe", 2)]`, in any order. A rank waits for others for at most the deadline.
        """
        if not dist.is_initialized():
            hint = "dist.init_process_group('gloo'), torchrun, or penstock.launch"
            raise RunError("torch.distributed is not initialised in this process", hint=hint)
        if not (is_finite(deadline_seconds) and deadline_seconds > 0):
            raise RunError("deadline_seconds must be above 0", deadline_seconds=repr(deadline_seconds), hint="60.0")
        rank, world = dist.get_rank(), dist.get_world_size()
        grid = Grid.of(config, world)
        pipe = grid.group_of(PIPE, rank) if PIPE in grid.names else (rank,)
        monitor = RankMonitor(pipe, range(world), deadline_seconds, "setup_process_groups(..., deadline_seconds=...)")
        is_gloo = dist.get_backend() == "gloo"
        control = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
        RankSync(ProcessGroups(rank, world, dist.group.WORLD, control, monitor=monitor)).first_sync(
            Agreement.of_options({"dimensions": grid.dimensions})
        )
        by_kind = {kind: _new_group(grid.groups(kind), rank) for kind in grid.kinds if kind != WORLD}
        by_kind[WORLD] = dist.group.WORLD
        pipeline = None
        if PIPE in grid.names:
            host = by_kind[PIPE] if is_gloo else _new_group(grid.groups(PIPE), rank, "gloo")
            has_replicas = DATA in grid.names and len(grid.group_of(DATA, rank)) > 1
            replicas = by_kind[DATA] if has_replicas else None
            groups = ProcessGroups(
                pipe.index(rank), len(pipe), by_kind[PIPE], control=host, replicas=replicas, monitor=monitor
            )
            pipeline = FlatPipeline(groups)
        # Together and last: if anything above raises, the topology stays as it was.
        self._grid, self._groups, self._pipeline = grid, by_kind, pipeline
        monitor.idle()

    @property
    def has_pipeline(self) -> bool:
        """Whether there is a dimension "pipe"."""
        return self._pipeline is not None

    @property
    def pipeline(self) -> FlatPipeline:
        """The pipeline of this process."""
        self._checked_grid(PIPE)
        return self._pipeline

    def get_group(self, mode: str) -> Any:
        """The process group along a dimension, of "model" (all but data), or "global" (all)."""
        self._checked_grid(mode)
        return self._groups[mode]

    def get_ranks_in_group(self, mode: str) -> list[int]:
        """The global ranks in the group of this process."""
        return list(self._checked_grid(mode).group_of(mode, dist.get_rank()))

    def all_ranks(self, mode: str) -> list[list[int]]:
        """The global ranks of every group along a dimension."""
        return [list(group) for group in self._checked_grid(mode).groups(mode)]

    def get_group_rank(self, mode: str) -> int:
        """The rank of this process in its group."""
        return self.get_ranks_in_group(mode).index(dist.get_rank())

    def get_group_size(self, mode: str) -> int:
        """The size of its group."""
        return len(self.get_ranks_in_group(mode))

    def get_prev_global_rank(self, mode: str = PIPE) -> int:
        """The global rank before this one in its group, cyclic."""
        return self._neighbour(mode, -1)

    def get_next_global_rank(self, mode: str = PIPE) -> int:
        """The global rank after this one in its group, cyclic."""
        return self._neighbour(mode, 1)

    def _neighbour(self, mode: str, step: int) -> int:
        ranks = self.get_ranks_in_group(mode)
        return ranks[(ranks.index(dist.get_rank()) + step) % len(ranks)]

    def is_mode_inited(self, mode: str) -> bool:
        """Whether the groups along a dimension have several processes."""
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

    # Names of TorchDistPackage for the usual dimensions.
    is_first_in_pipeline_group = partialmethod(is_first_in_group, PIPE)
    is_last_in_pipeline_group = partialmethod(is_last_in_group, PIPE)
    is_first_in_data_group = partialmethod(is_first_in_group, DATA)
    is_last_in_data_group = partialmethod(is_last_in_group, DATA)
    is_first_in_tensor_group = partialmethod(is_first_in_group, TENSOR)
    is_last_in_tensor_group = partialmethod(is_last_in_group, TENSOR)
    is_first_in_model_group = partialmethod(is_first_in_group, MODEL)
    is_last_in_model_group = partialmethod(is_last_in_group, MODEL)
    get_pp_rank = partialmethod(get_group_rank, PIPE)
    get_pp_size = partialmethod(get_group_size, PIPE)
    get_dp_rank = partialmethod(get_group_rank, DATA)
    get_dp_size = partialmethod(get_group_size, DATA)
    get_tp_rank = partialmethod(get_group_rank, TENSOR)
    get_tp_size = partialmethod(get_group_size, TENSOR)
    get_mp_rank = partialmethod(get_group_rank, MODEL)
    get_mp_size = partialmethod(get_group_size, MODEL)

    def _checked_grid(self, mode: str) -> Grid:
        if self._grid is None:
            hint = "topology.setup_process_groups([('pipe', dist.get_world_size())])"
            raise RunError("setup_process_groups must be called first", hint=hint)
        self._grid.check_kind(mode)
        return self._grid


def _new_group(groups: Iterable[tuple[int, ...]], rank: int, backend: str | None = None) -> Any:
    """The group of this process; every process must create all groups, in the same order."""
    made = [(ranks, dist.new_group(list(ranks), backend=backend)) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)


topology = Topology()
