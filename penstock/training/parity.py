"""Parity: a plan's pipeline against the unsplit model, number by number."""

from dataclasses import dataclass

from torch import Tensor

_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
_FLOOR = 1e-3
"""A gradient that is zero in exact arithmetic holds rounding only: differences count against this share of the largest
gradient at least."""


@dataclass(frozen=True)
class Difference:
    """How far one number of the pipeline is from that of the unsplit model, relative to the largest entry."""

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
        return f"{self.name} in stage {self.stage}: {self.relative:.3g} (limit {self.tolerance:g})"


@dataclass(frozen=True)
class Comparison:
    """All numbers of one step against one way to run the unsplit model."""

    against: str
    differences: tuple[Difference, ...]

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
        verdict = "identical" if self.is_identical else "equal up to rounding" if self.ok else "DIFFERENT"
        lines = [f"{self.against}: {verdict}, {len(self.differences)} numbers compared"]
        if not self.is_identical:
            lines.append(f"  largest difference: {self.largest}")
        if self.first_wrong is not None:
            lines.append(f"  first difference: {self.first_wrong}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ParityReport:
    """What `penstock.check` found about the loss, the gradient of every parameter, and the buffers."""

    loop: Comparison
    """against the unsplit model on the same microbatches, one after another"""
    whole: Comparison | None
    """against the unsplit model on the whole batch; None where that cannot be equal"""
    notes: tuple[str, ...] = ()
    """why the whole batch cannot be equal, in words"""

    @property
    def ok(self) -> bool:
        """Whether the pipeline trains with the numbers of the unsplit model."""
        return self.loop.ok and (self.whole is None or self.whole.ok)

    def __str__(self) -> str:
        parts = [str(part) for part in (self.loop, self.whole) if part is not None]
        return "\n".join((self._verdict, *parts, *self.notes))

    @property
    def _verdict(self) -> str:
        if self.ok:
            return "the pipeline has the numbers of the unsplit model"
        if self.loop.ok:
            return (
                "the stages are right, but the loss of the whole batch is not made of those of its microbatches: "
                "samples act on each other, parts compute in half precision, or the loss is weighted otherwise "
                "(try reduction=...)"
            )
        return "the pipeline is WRONG"


Numbers = dict[str, Tensor | None]


def compare(against: str, expected: Numbers, found: Numbers, stages: dict[str, int]) -> Comparison:
    """Every number of one step beside that of another; `stages` says where each one is made."""
    scale = max((_largest(value) for name, value in expected.items() if name.startswith("gradient")), default=0.0)
    return Comparison(
        against,
        tuple(
            _difference(name, stages.get(name, 0), expected.get(name), found.get(name), scale * _FLOOR)
            for name in dict.fromkeys((*expected, *found))
        ),
    )


def _difference(name: str, stage: int, expected: Tensor | None, found: Tensor | None, floor: float) -> Difference:
    if expected is None or found is None or expected.shape != found.shape:
        same = expected is None and found is None
        return Difference(name, stage, 0.0 if same else float("inf"), 0.0)
    tolerance = _TOLERANCES.get(str(expected.dtype).removeprefix("torch."), 0.0)
    if not expected.numel():
        return Difference(name, stage, 0.0, tolerance)
    apart = float((expected.double() - found.double()).abs().max())
    scale = max(_largest(expected), floor if name.startswith("gradient") else 0.0)
    # Without anything to compare with, a difference is measured by itself.
    return Difference(name, stage, apart / (scale or 1.0), tolerance)


def _largest(value: Tensor | None) -> float:
    return float(value.double().abs().max()) if value is not None and value.numel() else 0.0
