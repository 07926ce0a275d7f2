"""Tries the other partitioners and returns the best division.

Choose it if you have no preference; the result names the partitioner and how far the others are behind. It tries every
member of the table that compares seconds: optional ones if they are installed, those for slow links if messages take
time, and those that choose placements if the placement is left open.
"""

from dataclasses import dataclass, replace

from penstock.errors import PartitionError
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.costs import CostRates

_WORTH = 0.01
"""share by which more stages per rank must relieve the busiest rank"""


@dataclass(frozen=True)
class Auto(Partitioner):
    """Prefers the least bottleneck and, among equals, the fewest bytes over the cuts."""

    name = "auto"
    is_tried = False
    chooses_placement = True

    def divide(self, problem: Problem) -> Division:
        # The table holds this class, so it can be imported only once that is complete.
        from penstock.partitioners import PARTITIONERS

        has_messages = CostRates.of(problem).has_messages
        found: dict[str, Division] = {}
        refusals: list[PartitionError] = []
        for member in PARTITIONERS.values():
            is_of_use = (has_messages or not member.is_for_slow_links) and (
                problem.placement is None or not member.chooses_placement
            )
            if not (member.is_tried and member.is_available() and is_of_use):
                continue
            try:
                found[member.name] = member().divide(problem)
            except PartitionError as error:
                refusals.append(error)
        if not found:
            raise refusals[0]
        return _best(found)


def _best(found: dict[str, Division]) -> Division:
    """The best for one placement, unless another placement is worth its additional stages."""
    fewest = min(division.partition.num_stages for division in found.values())
    comparable = [name for name, division in found.items() if division.partition.num_stages == fewest]
    # Rounded, so that equal sums compare equal whatever their order.
    name = min(comparable, key=lambda each: (float(f"{found[each].bottleneck_seconds:.11g}"), found[each].cut_bytes))
    others = [each for each in found if each not in comparable]
    name = min([name, *others], key=lambda each: found[each].bottleneck_seconds * (1 + (each in others) * _WORTH))
    best = found[name]
    comparable = [each for each in found if found[each].placement == best.placement]
    behind = [
        f"{each} {division.bottleneck_seconds / best.bottleneck_seconds - 1:.1%}"
        for each, division in found.items()
        if each != name and best.bottleneck_seconds > 0
    ]
    return replace(
        best,
        lower_bound_seconds=max(found[each].lower_bound_seconds for each in comparable),
        contiguous_bound_seconds=max(found[each].contiguous_bound_seconds for each in comparable),
        why=f"{name}: {best.why}; longer by: {', '.join(behind) or 'nothing else was found'}",
    )
