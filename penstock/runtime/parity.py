"""The result of `penstock.check`: how a pipeline compares with the unsplit model."""

from dataclasses import dataclass

from penstock.ir import Comparison


@dataclass(frozen=True)
class ParityReport:
    """The differences in the loss, the gradient of every parameter, and the buffers."""

    loop: Comparison
    """against the unsplit model on the same microbatches, one after another"""
    whole: Comparison | None
    """against the unsplit model on the whole batch; None where that cannot be equal"""
    notes: tuple[str, ...] = ()
    """why the whole batch cannot be equal, or may not be"""

    @property
    def ok(self) -> bool:
        """Whether the pipeline has the loss and gradients of the unsplit model."""
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
                "the stages are right, but the numbers of the whole batch are not made of those of its microbatches: "
                "samples act on each other, or the loss is weighted otherwise (try reduction=...)"
            )
        return "the pipeline is WRONG"
