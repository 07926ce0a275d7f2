"""The measured costs of a model, a line per node: times in ms and memory in MB.

Choose it to see where a model spends time and memory before it is cut. Times are of one microbatch; `input` and
`weight` are the two parts of a split backward. `kept` is held until the backward, `waiting` between its two parts;
`peak` is the most while the node runs, `size` parameters and buffers, `in` and `out` the tensors it reads and makes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.errors import ViewError
from penstock.ir import PASS_KINDS, NodeCost, counted, percent_text, seconds_text
from penstock.ir import Profile as ProfileRecord
from penstock.views.base import short_name
from penstock.views.condense import DOTS, check_collapse
from penstock.views.table import TableView, TextTable

Row = tuple[str, ...]
# fmt: off
_HEADER = (
    "node", "forward", "backward", "input", "weight", "share", "kept", "waiting", "peak", "size", "in", "out",
)
# fmt: on
_UNITS = ("", "ms", "ms", "ms", "ms", "", "MB", "MB", "MB", "MB", "MB", "MB")


@dataclass(frozen=True)
class Profile(TableView[ProfileRecord]):
    """A Markdown table under two lines about the whole; the last line is the sum, and the maximum of the peaks."""

    collapse: int = 4
    """number of nodes in a row with equal costs from which they are one line; 0 lists every node"""
    name = "profile"
    record = ProfileRecord

    def __post_init__(self) -> None:
        check_collapse(self.collapse)

    def content(self, profile: ProfileRecord) -> tuple[Sequence[str], Iterable[TextTable]]:
        """Two lines, and a table with a row per node, or per run of nodes with equal costs, and one for all."""
        heading = _heading(profile)
        lines: list[tuple[str, NodeCost]] = []
        for _, group in groupby(profile.costs, lambda c: (*_seconds(c), c.memory)):
            costs = list(group)
            if self.collapse and len(costs) >= self.collapse:
                title = f"{short_name(costs[0].node)}{DOTS}{short_name(costs[-1].node)}, {len(costs)} x"
                lines.append((title, costs[0]))
            else:
                lines += ((short_name(cost.node), cost) for cost in costs)
        rows = []
        for title, cost in lines:
            share = cost.seconds / profile.seconds if profile.seconds else 0.0
            rows.append(_row(title, _seconds(cost), share, (*_sizes(cost), cost.memory.inputs, cost.memory.outputs)))
        seconds = [sum(column) for column in zip(*map(_seconds, profile.costs), strict=True)] or [0.0] * 4
        kept, waiting, peaks, size = list(zip(*map(_sizes, profile.costs), strict=True)) or [()] * 4
        sizes = (sum(kept), sum(waiting), max(peaks, default=0), sum(size))
        rows.append((*_row("all", seconds, 1.0, sizes), "", ""))
        header = tuple(f"{word} {unit}".rstrip() for word, unit in zip(_HEADER, _UNITS, strict=True))
        return heading, [TextTable(header, tuple(rows))]


def _heading(profile: ProfileRecord) -> list[str]:
    if not isinstance(profile, ProfileRecord):
        raise ViewError(
            "this view must be given a profile", got=type(profile).__name__, hint="penstock.measure(captured)"
        )
    step = f"{counted(len(profile), 'node')}, a step of one microbatch {seconds_text(profile.step_seconds)}"
    versions = (f"{short_name(name)} {short_name(value)}" for name, value in profile.versions)
    return [step, "; ".join((short_name(profile.device), *versions))]


def _seconds(cost: NodeCost) -> tuple[float, ...]:
    return tuple(map(cost.seconds_of, PASS_KINDS))


def _sizes(cost: NodeCost) -> tuple[int, ...]:
    memory = cost.memory
    return memory.kept, memory.kept_for_weight_grad, memory.peak, memory.parameters + memory.buffers


def _row(title: str, seconds: Sequence[float], share: float, sizes: Sequence[int]) -> Row:
    times, bytes_held = (f"{1e3 * each:.3f}" for each in seconds), (f"{each / 1e6:.3f}" for each in sizes)
    return title, *times, percent_text(share), *bytes_held
