"""auto: the best that the other partitioners find.

Choose it when you do not want to choose; the result says which one it was and how far the others are behind. Metis
takes part if it is installed, pipedream if messages take time, and mpipe if the placement is left open.
"""

from dataclasses import dataclass, replace

from penstock.errors import PartitionError
from penstock.partitioners.acyclic import Acyclic
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.linear import Linear
from penstock.partitioners.metis import Metis, is_installed
from penstock.partitioners.mpipe import MPipe
from penstock.partitioners.pipedream import PipeDream
from penstock.partitioners.search.bill import Rates

_WORTH = 0.01
"""what more stages per rank must take off the busiest rank, as a share"""


@dataclass(frozen=True)
class Auto(Partitioner):
    """The least bottleneck and, among equals, the fewest bytes over the cuts."""

    name = "auto"

    def divide(self, problem: Problem) -> Division:
        members: list[Partitioner] = [Linear(), Acyclic()]
        members += [PipeDream()] if Rates.of(problem).has_messages else []
        members += [Metis()] if is_installed() else []
        members += [MPipe()] if problem.placement is None else []
        found: dict[str, Division] = {}
        refusals: list[PartitionError] = []
        for member in members:
            try:
                found[member.name] = member.divide(problem)
            except PartitionError as error:
                refusals.append(error)
        if not found:
            raise refusals[0]
        return _best(found)


def _best(found: dict[str, Division]) -> Division:
    """The best for one placement, unless another placement is worth its additional stages."""
    fewest = min(division.partition.num_stages for division in found.values())
    alike = [name for name, division in found.items() if division.partition.num_stages == fewest]
    name = min(alike, key=lambda each: (float(f"{found[each].bottleneck_seconds:.11g}"), found[each].cut_bytes))
    others = [each for each in found if each not in alike]
    name = min([name, *others], key=lambda each: found[each].bottleneck_seconds * (1 + (each in others) * _WORTH))
    best = found[name]
    alike = [each for each in found if found[each].placement == best.placement]
    least = max(found[each].lower_bound_seconds for each in alike)
    contiguous = max(found[each].contiguous_bound_seconds for each in alike)
    behind = [
        f"{each} {division.bottleneck_seconds / best.bottleneck_seconds - 1:.1%}"
        for each, division in found.items()
        if each != name and best.bottleneck_seconds > 0
    ]
    why = f"{name}: {best.why}; longer by: {', '.join(behind) or 'nothing else was found'}"
    return replace(best, lower_bound_seconds=least, contiguous_bound_seconds=contiguous, why=why)
