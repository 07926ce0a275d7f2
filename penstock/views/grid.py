"""grid: a trace as plain text, one line per rank and one cell per step of time.

Choose it for docstrings, tests, logs and issues: plain ASCII, the same on every machine, exact for small schedules. A
cell is the kind and the microbatch, `F0`; where a rank holds several stages the stage stands before them, `4F0` (the
text of the action in schedules and their CSV); `.` is idle. A pass that takes two steps fills two cells. Overlapped
pairs put their backward pass on a second line below their forward pass.

    rank 0 | F0 F1 .  B0 B0 B1 B1
    rank 1 | .  F0 B0 B0 F1 B1 B1
"""

from dataclasses import dataclass

from penstock.ir import Trace
from penstock.views.base import Traces, View, check_positive, named
from penstock.views.blocks import Blocks
from penstock.views.cells import IDLE, cells, common_step, num_steps, typical_step


@dataclass(frozen=True)
class Grid(View[Traces, str]):
    """Text lines without trailing blanks."""

    step: float | None = None
    """seconds per cell; None: the largest that all passes are multiples of, or else one that most passes fill"""
    width: int = 200
    """characters per line; what does not fit is cut off, and a last line says so"""
    name = "grid"
    noun = Trace
    suffix = ".txt"

    def __post_init__(self) -> None:
        check_positive(width=self.width, **({} if self.step is None else {"step": self.step}))

    def __call__(self, traces: Traces) -> str:
        parts = []
        for name, trace in named(traces).items():
            title = [name.encode("ascii", "replace").decode()] if name else []
            parts.append("\n".join([*title, *self._lines(trace)]))
        return "\n\n".join(parts)

    def _lines(self, trace: Trace) -> list[str]:
        blocks = Blocks.of(trace)
        exact = common_step(blocks)
        step = self.step or exact or typical_step(blocks)
        digits = len(str(trace.num_ranks - 1))
        cell_width = max(map(len, blocks.labels), default=1)
        steps = num_steps(blocks, step)
        shown = min(steps, max(1, (self.width - len("rank  | ") - digits + 1) // (cell_width + 1)))
        rows = _rows(blocks, step, shown, cell_width)
        lines = []
        for rank in range(trace.num_ranks):
            lines.append(f"rank {rank:>{digits}} | {rows[2 * rank]}".rstrip())
            if blocks.has_pairs:
                lines.append(f"{' ' * (5 + digits)} | {rows[2 * rank + 1].replace('.', ' ')}".rstrip())
        return lines + _notes(step, exact, steps, shown)


def _rows(blocks: Blocks, step: float, columns: int, cell_width: int) -> list[str]:
    texts = {block: label.ljust(cell_width) for block, label in enumerate(blocks.labels)}
    texts[IDLE] = ".".ljust(cell_width)
    return [" ".join(texts[block] for block in row) for row in cells(blocks, step, columns).tolist()]


def _notes(step: float, exact: float | None, steps: int, shown: int) -> list[str]:
    notes = []
    if exact is None or abs(step - exact) > 1e-6 * step:
        notes.append(f"a cell is {step:.4g} s and shows what fills most of it")
    if shown < steps:
        notes.append(f"clipped: {shown} of {steps} cells shown")
    return notes
