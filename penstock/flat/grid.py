"""Grid: the ranks of the world as a box of named dimensions, and the groups of ranks along each of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from penstock.errors import RunError
from penstock.ir import as_int

DATA, PIPE, TENSOR = "data", "pipe", "tensor"
MODEL, WORLD = "model", "global"
_EXAMPLE = "setup_process_groups([('data', 2), ('pipe', 2)])"


@dataclass(frozen=True)
class Grid:
    """Dimensions from the outermost to the innermost: neighbouring ranks differ in the last one first."""

    dimensions: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, dimensions: Iterable[Sequence[object]], world: int) -> "Grid":
        """A grid of all ranks of a world, from pairs of a name and a size."""
        grid = cls(tuple(_dimension(entry) for entry in dimensions))
        if len(set(grid.names)) < len(grid.names):
            raise RunError("a dimension is named twice", dimensions=grid.names)
        if math.prod(grid.sizes) != world:
            raise RunError(
                "the sizes of all dimensions must multiply to the number of processes",
                dimensions=grid.dimensions,
                processes=world,
            )
        return grid

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions."""
        return tuple(name for name, _ in self.dimensions)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""
        return tuple(size for _, size in self.dimensions)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every name that a group goes by; those of one model are all ranks that hold parts of one replica."""
        own_model = (MODEL,) if {PIPE, TENSOR} & set(self.names) else ()
        return (*self.names, *own_model, WORLD)

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group of a kind: those that differ in its dimensions only."""
        along = self._along(kind)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*map(range, self.sizes))):
            rest = tuple(at for at, (name, _) in zip(place, self.dimensions, strict=True) if name not in along)
            found.setdefault(rest, []).append(rank)
        return tuple(map(tuple, found.values()))

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of that kind in which a rank is."""
        return next(group for group in self.groups(kind) if rank in group)

    def _along(self, kind: str) -> set[str]:
        if kind not in self.kinds:
            raise RunError("no such group", name=repr(kind), known=", ".join(self.kinds), hint=_EXAMPLE)
        if kind == WORLD:
            return set(self.names)
        return set(self.names) - {DATA} if kind == MODEL else {kind}


def _dimension(entry: Sequence[object]) -> tuple[str, int]:
    if isinstance(entry, str) or len(entry) != 2:
        raise RunError("a dimension is a pair of a name and a size", given=repr(entry), hint=_EXAMPLE)
    name, size = entry
    count = int(size) if isinstance(size, float) and size.is_integer() else as_int(size)
    if not isinstance(name, str) or not name or name in (MODEL, WORLD):
        raise RunError("a dimension needs a name of its own", given=repr(name), taken=(MODEL, WORLD), hint=_EXAMPLE)
    if count is None or count < 1:
        raise RunError("the size of a dimension is a whole number, 1 or more", dimension=name, size=repr(size))
    return name, count
