"""profile: the measured costs of a model, a line per node: seconds in ms and memory in MB.

Choose it to see where a model spends its time and memory, before it is cut. Times are of one microbatch: `input` and
`weight` are the parts of a split backward. `kept` is what stays until the backward, `waiting` between its two parts,
`peak` the most while the node runs; `size` are parameters and buffers, `in` and `out` what the node reads and makes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Group
from rich.text import Text

from penstock.errors import ViewError
from penstock.ir import NodeCost, counted, percent_text, seconds_text
from penstock.ir import Profile as Costs
from penstock.views.base import RichView
from penstock.views.parts import DOTS, check_alike, shown
from penstock.views.sheet import Sheet

Row = tuple[str, ...]
_HEADER = (
    *("node", "forward", "backward", "input", "weight", "share"),
    *("kept", "waiting", "peak", "size", "in", "out"),
)
_UNITS = ("", "ms", "ms", "ms", "ms", "", "MB", "MB", "MB", "MB", "MB", "MB")


@dataclass(frozen=True)
class Profile(RichView[Costs]):
    """A Markdown table under two lines about the whole; the last line is the sum, or the largest for the peak."""

    alike: int = 4
    """how many nodes in a row with the same figures are one line, with those of each; 0: every node by itself"""
    name = "profile"
    noun = Costs
    suffix = ".txt"

    def __post_init__(self) -> None:
        check_alike(self.alike)

    def __call__(self, profile: Costs) -> str:
        return "\n".join([*_heading(profile), "", self._sheet(profile).markdown()])

    def renderable(self, profile: Costs) -> Group:
        return Group(*map(Text, _heading(profile)), self._sheet(profile).rich())

    def _sheet(self, profile: Costs) -> Sheet:
        rows = [_row(title, cost, profile.seconds) for title, cost in self._lines(profile)]
        header = tuple(f"{word} {unit}".rstrip() for word, unit in zip(_HEADER, _UNITS, strict=True))
        return Sheet(header, (*rows, _total(profile)))

    def _lines(self, profile: Costs) -> Iterator[tuple[str, NodeCost]]:
        for _, group in groupby(profile.costs, _figures):
            costs = list(group)
            if self.alike and len(costs) >= self.alike:
                title = f"{shown(costs[0].node)}{DOTS}{shown(costs[-1].node)}, {len(costs)} x"
                yield title, costs[0]
            else:
                yield from ((shown(cost.node), cost) for cost in costs)


def _figures(cost: NodeCost) -> tuple[object, ...]:
    return cost.forward, cost.backward, cost.input_grad, cost.weight_grad, cost.memory


def _heading(profile: Costs) -> list[str]:
    if not isinstance(profile, Costs):
        raise ViewError("this view needs a profile", got=type(profile).__name__, hint="penstock.measure(captured)")
    step = f"{counted(len(profile), 'node')}, a step of one microbatch {seconds_text(profile.step_seconds)}"
    words = [shown(profile.device), *(f"{shown(name)} {shown(value)}" for name, value in profile.versions)]
    return [step, "; ".join(words)]


def _row(title: str, cost: NodeCost, total: float) -> Row:
    memory = cost.memory
    seconds = (cost.forward, cost.backward, cost.input_grad, cost.weight_grad)
    share = (cost.forward + cost.backward) / total if total else 0.0
    sizes = (memory.kept, memory.kept_for_weight_grad, memory.peak)
    return _texts(title, seconds, share, (*sizes, memory.parameters + memory.buffers, memory.inputs, memory.outputs))


def _total(profile: Costs) -> Row:
    costs, memory = profile.costs, [cost.memory for cost in profile.costs]
    seconds = [sum(getattr(c, name) for c in costs) for name in ("forward", "backward", "input_grad", "weight_grad")]
    sizes = (
        sum(each.kept for each in memory),
        sum(each.kept_for_weight_grad for each in memory),
        max((each.peak for each in memory), default=0),
        sum(each.parameters + each.buffers for each in memory),
    )
    return (*_texts("all", seconds, 1.0, sizes), "", "")


def _texts(title: str, seconds: Sequence[float], share: float, sizes: Sequence[int]) -> Row:
    return (
        title,
        *(f"{1e3 * each:.3f}" for each in seconds),
        percent_text(share),
        *(f"{each / 1e6:.3f}" for each in sizes),
    )
