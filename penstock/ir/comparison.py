"""Comparison of the tensors of two runs, and whether rounding explains the differences."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.ir.dtypes import TOLERANCES
from penstock.ir.units import listed, printable

GRADIENT = "gradient of "
"""prefix of the names of gradients"""
# A gradient that is zero in exact arithmetic consists of rounding errors only. Its difference is therefore divided by
# at least this share of the largest gradient of the run; the second share is for half precision.
_FLOOR, _COARSE_FLOOR = 1e-3, 1e-1
# Where terms cancel, as in the gradient of a mean square behind a layer norm, rounding errors grow. They are of the
# size of the change that other last bits of the weights make, up to this factor. Beyond the limit nothing is left to
# compare.
_NOISE_FACTOR, _NOISE_LIMIT = 32.0, 0.1


@dataclass(frozen=True)
class Distance:
    """Largest absolute difference of two tensors of one name; infinite if one is missing or has another shape."""

    name: str
    apart: float
    largest: float = 0.0
    """largest absolute entry of the expected tensor"""
    dtype: str = ""


@dataclass(frozen=True)
class Difference:
    """Difference of a tensor to the expected one, relative to the largest entry."""

    name: str
    stage: int
    """the stage that makes or owns the tensor"""
    relative: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within tolerance; False for NaN."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        return f"{printable(self.name)} in stage {self.stage}: {self.relative:.3g} (limit {self.tolerance:g})"


@dataclass(frozen=True)
class Comparison:
    """The differences of all tensors of two runs."""

    against: str
    differences: tuple[Difference, ...]
    coarsest: str = ""
    """the lowest precision that parts of the model compute in, if lower than that of the tensors"""

    @property
    def ok(self) -> bool:
        """Whether every difference is within tolerance."""
        return all(difference.ok for difference in self.differences)

    @property
    def is_identical(self) -> bool:
        """Whether all tensors are bit-identical."""
        return all(difference.relative == 0.0 for difference in self.differences)

    @property
    def largest(self) -> Difference:
        """The largest difference; NaN counts as largest."""
        return max(self.differences, key=lambda one: (one.relative != one.relative, one.relative))

    @property
    def first_wrong(self) -> Difference | None:
        """The first difference out of tolerance, in the order of the stages."""
        wrong = [difference for difference in self.differences if not difference.ok]
        return min(wrong, key=lambda one: one.stage, default=None)

    def __str__(self) -> str:
        summary = "identical" if self.is_identical else "DIFFERENT"
        if self.ok and not self.is_identical:
            coarse = f"the rounding of {self.coarsest}, in which parts compute"
            summary = f"equal up to {coarse if self.coarsest else 'rounding'}"
        lines = [f"{self.against}: {summary}, {len(self.differences)} tensors compared"]
        if not self.is_identical:
            lines.append(f"  largest difference: {self.largest}")
        if self.first_wrong is not None:
            lines.append(f"  first difference: {self.first_wrong}")
        if lost := [printable(one.name) for one in self.differences if one.tolerance > _NOISE_LIMIT]:
            lines.append(f"  not comparable, as rounding errors are about as large: {listed(lost, 1)}")
        return "\n".join(lines)


def compare_tensors(
    against: str,
    distances: Iterable[Distance],
    stages: Mapping[str, int],
    coarsest: str = "",
    noise: Mapping[str, float] | None = None,
) -> Comparison:
    """The comparison made from distances; `stages` maps each name to the stage that makes or owns it.

    `coarsest` is the lowest precision in which the two runs may round differently, `noise` how far each tensor moves if
    the last bits of the weights are changed.
    """
    found = tuple(distances)
    least = TOLERANCES.get(coarsest, 0.0)
    is_coarser = any(0.0 < TOLERANCES.get(one.dtype, 0.0) < least for one in found)
    gradients = (one.largest for one in found if one.name.startswith(GRADIENT))
    largest = max(gradients, default=0.0)

    def difference(one: Distance) -> Difference:
        own = TOLERANCES.get(one.dtype, 0.0)
        tolerance = max(own, least) if own else 0.0
        floor = largest * (_COARSE_FLOOR if tolerance >= TOLERANCES["float16"] else _FLOOR)
        scale = max(one.largest, floor if one.name.startswith(GRADIENT) else 0.0)
        # If the expected tensor is all zero, the difference cannot be relative.
        relative = one.apart / (scale or 1.0) if one.apart else 0.0
        moved = (noise or {}).get(one.name, 0.0) / (scale or 1.0)
        if tolerance:
            tolerance = max(tolerance, _NOISE_FACTOR * moved)
        return Difference(one.name, stages.get(one.name, 0), relative, tolerance)

    return Comparison(against, tuple(map(difference, found)), coarsest if is_coarser else "")
