"""Course: a figure of every step of a run, such as its loss or its seconds, as a drawing."""

from collections.abc import Sequence

from penstock.ir import Kind, Run, number_text, round_step, seconds_unit
from penstock.views.drawing import Area, Drawing, Label, Line
from penstock.views.page.theme import AREA
from penstock.views.palette import FAINT, KINDS, RULE

WIDTH, HEIGHT = 540.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 14.0, 30.0
SIZE = 12.0
MAX_POINTS = 400
LINE = KINDS[Kind.FORWARD]

Points = Sequence[tuple[int, float]]


def losses(run: Run) -> Drawing | None:
    """The loss of every step."""
    return _course([(each.step, each.loss) for each in run.steps if each.loss is not None])


def durations(run: Run) -> Drawing | None:
    """The seconds of every step after the first, which also warms up, beside the predicted ones."""
    later = run.steps[1:]
    scale, unit = seconds_unit(max((each.seconds for each in later), default=0.0))
    points = [(each.step, each.seconds / scale) for each in later]
    return _course(points, run.plan.predicted.makespan / scale, f" {unit}")


def _course(points: Points, reference: float | None = None, unit: str = "") -> Drawing | None:
    """A line through the points, and a dashed one at the reference; None where there are not two points."""
    if len(points) < 2:
        return None
    points = points[:: max(1, len(points) // MAX_POINTS)]
    figures = [value for _, value in points] + ([] if reference is None else [reference])
    low, high = _range(figures, reference is not None)
    first, last = points[0][0], points[-1][0]

    def at(step: float, value: float) -> tuple[float, float]:
        across = (step - first) / (last - first)
        return LEFT + (WIDTH - LEFT - RIGHT) * across, TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    curve = tuple(at(*point) for point in points)
    ground = Area((at(first, low), *curve, at(last, low)), AREA)
    lines, labels = _scale(low, high, unit)
    lines.append(Line(curve, LINE, 2.0))
    floor = HEIGHT - BOTTOM + 16
    labels.append(Label(LEFT, floor, f"step {first}", FAINT, SIZE))
    labels.append(Label(WIDTH - RIGHT, floor, str(last), FAINT, SIZE, "end"))
    if reference is not None:
        lines.append(Line((at(first, reference), at(last, reference)), FAINT, 1.5, dashed=True))
        labels.append(Label(WIDTH / 2, floor, "dashed: predicted", FAINT, SIZE, "middle"))
    return Drawing(WIDTH, HEIGHT, (), (ground,), tuple(lines), tuple(labels))


def _range(figures: list[float], from_zero: bool) -> tuple[float, float]:
    """Round figures below the least and above the largest."""
    least = 0.0 if from_zero else min(figures)
    step = round_step(max(figures) - least or abs(figures[0]) or 1.0, 4)
    low, high = step * (least // step), step * -(-max(figures) // step)
    return low, high if high > low else low + step


def _scale(low: float, high: float, unit: str) -> tuple[list[Line], list[Label]]:
    step = round_step(high - low, 4)
    lines, labels = [], []
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)
        lines.append(Line(((LEFT, y), (WIDTH - RIGHT, y)), RULE, 0.7))
        labels.append(Label(LEFT - 8, y, f"{number_text(value, 3)}{unit}", FAINT, SIZE, "end"))
    return lines, labels
