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
        return "\n".join((self._summary, *parts, *self.notes))

    @property
    def _summary(self) -> str:
        if self.ok:
            return "the pipeline matches the unsplit model"
        if self.loop.ok:
            return (
                "the stages are right, but the loss and gradients of the whole batch are not sums of those of its "
                "microbatches: samples interact, or the loss is weighted differently (try reduction=...)"
            )
        return "the pipeline is WRONG"
