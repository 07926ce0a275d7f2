"""Comparison: numbers of one run beside those of another, and whether rounding explains how far they are apart."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.ir.units import printable

GRADIENT = "gradient of "
"""how the names of gradients begin"""
_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""relative to the largest entry, from the finest type to the coarsest"""
_FLOOR, _COARSE_FLOOR = 1e-3, 1e-1
"""A gradient that is zero in exact arithmetic holds rounding only: differences count against this share of the largest
gradient at least; the second is for half precision."""


@dataclass(frozen=True)
class Distance:
    """How far two tensors of one name are apart; `apart` is infinite where one is missing or has another form."""

    name: str
    apart: float
    largest: float = 0.0
    """entry of the expected one"""
    dtype: str = ""


@dataclass(frozen=True)
class Difference:
    """How far a number is from the expected one, relative to the largest entry."""

    name: str
    stage: int
    """the stage that makes or owns it"""
    relative: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether it is within what rounding explains; NaN is not."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        return f"{printable(self.name)} in stage {self.stage}: {self.relative:.3g} (limit {self.tolerance:g})"


@dataclass(frozen=True)
class Comparison:
    """All numbers of one run against those of another."""

    against: str
    differences: tuple[Difference, ...]
    coarsest: str = ""
    """the type of the lowest precision that parts compute in, if that is lower than the numbers' own"""

    @property
    def ok(self) -> bool:
        """Whether every number agrees."""
        return all(difference.ok for difference in self.differences)

    @property
    def is_identical(self) -> bool:
        """Whether every bit agrees."""
        return all(difference.relative == 0.0 for difference in self.differences)

    @property
    def largest(self) -> Difference:
        """The one that is farthest off; NaN is farther than anything."""
        return max(self.differences, key=lambda one: (one.relative != one.relative, one.relative))

    @property
    def first_wrong(self) -> Difference | None:
        """The first that is too far off, in the order of the stages."""
        wrong = [difference for difference in self.differences if not difference.ok]
        return min(wrong, key=lambda one: one.stage, default=None)

    def __str__(self) -> str:
        lines = [f"{self.against}: {self._verdict}, {len(self.differences)} numbers compared"]
        if not self.is_identical:
            lines.append(f"  largest difference: {self.largest}")
        if self.first_wrong is not None:
            lines.append(f"  first difference: {self.first_wrong}")
        return "\n".join(lines)

    @property
    def _verdict(self) -> str:
        if self.is_identical:
            return "identical"
        rounding = f"rounding, that of {self.coarsest} in which parts compute" if self.coarsest else "rounding"
        return f"equal up to {rounding}" if self.ok else "DIFFERENT"


def compare_tensors(
    against: str, distances: Iterable[Distance], stages: Mapping[str, int], coarsest: str = ""
) -> Comparison:
    """The comparison of some distances; `stages` says where each number is made.

    `coarsest` is the type of the lowest precision in use where the two runs round differently.
    """
    found = tuple(distances)
    least = _TOLERANCES.get(coarsest, 0.0)
    is_coarser = any(0.0 < _TOLERANCES.get(one.dtype, 0.0) < least for one in found)
    gradients = (one.largest for one in found if one.name.startswith(GRADIENT))
    largest = max(gradients, default=0.0)

    def difference(one: Distance) -> Difference:
        own = _TOLERANCES.get(one.dtype, 0.0)
        tolerance = max(own, least) if own else 0.0
        floor = largest * (_COARSE_FLOOR if tolerance >= _TOLERANCES["float16"] else _FLOOR)
        scale = max(one.largest, floor if one.name.startswith(GRADIENT) else 0.0)
        # Without anything to compare with, a difference is measured by itself.
        relative = one.apart / (scale or 1.0) if one.apart else 0.0
        return Difference(one.name, stages.get(one.name, 0), relative, tolerance)

    return Comparison(against, tuple(map(difference, found)), coarsest if is_coarser else "")
