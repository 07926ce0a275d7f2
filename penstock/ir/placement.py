"""Placement: which rank holds each stage."""

from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """The rank of every stage; `placement[stage]` is a rank, every rank holds at least one stage."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0:
            raise ScheduleError("a placement names a rank, 0 or more, for every stage", placement=self.ranks)
        # Ranks above the number of stages are not all filled; that far is enough to find one that is not.
        if missing := sorted(set(range(min(max(self.ranks), len(self.ranks)) + 1)) - set(self.ranks)):
            raise ScheduleError("ranks without a stage", ranks=missing, placement=self.ranks)

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> "Placement":
        """Stages go round: rank r holds r, r + ranks, r + 2 ranks ..."""
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def vee(cls, num_ranks: int) -> "Placement":
        """Stages go down the ranks and back up: rank r holds r and 2 ranks - 1 - r."""
        return cls((*range(num_ranks), *reversed(range(num_ranks))))

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return max(self.ranks) + 1

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank, ascending."""
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.ranks):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def __getitem__(self, stage: int) -> int:
        return self.ranks[stage]

    def __len__(self) -> int:
        return len(self.ranks)
