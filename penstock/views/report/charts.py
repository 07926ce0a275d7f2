"""The pictures of a report: timelines, memory and metrics per step, as SVG elements in the colours of the page.

Timelines are also given as compact numbers, for the script of the page that zooms into them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from penstock.ir import Ints, Kind, Span, Trace, critical_path, number_text, round_step, seconds_unit
from penstock.views.bars import LETTERS, WORDS, Bars
from penstock.views.drawing import BASELINE, Area, Box, Drawing, Label, Line, Point, rank_label
from penstock.views.memory import GROUND, Memory
from penstock.views.palette import (
    ALARM,
    FAINT,
    IDLE,
    INK,
    KIND_COLORS,
    MARK,
    PAPER,
    RULE,
    STAGE_COLORS,
    contrast,
    fill,
    mix,
    text_on,
)
from penstock.views.report.panels import Contents
from penstock.views.timeline import Timeline

MAX_PASSES = 16_000
"""of all timelines together that are drawn or zoomed into one by one: about 150 KB"""
MAX_MEMORY_STEPS, ALL_MEMORY_STEPS, LEAST_MEMORY_STEPS = 160, 1600, 24
"""of the memory curve of a rank, of all ranks together, and of a rank in any case"""


def draw_all(contents: Contents, width: int, timelines: int, with_memory: bool) -> dict[str, Drawing]:
    """The pictures for which there are values, by name."""
    found: dict[str, Drawing | None] = {}
    if shown := dict(list(contents.traces.items())[:timelines]):
        # Narrow passes can be seen when the page is enlarged, so they are merged only where they are too many.
        is_large = sum(len(Bars.of(trace)) for trace in shown.values()) > MAX_PASSES
        found["timeline"] = Timeline(width=width, critical=True).drawing(shown, merge_narrow=is_large)
    with_curves = {n: trace for n, trace in contents.traces.items() if any(curve.peak for curve in trace.memory)}
    if with_memory and with_curves:
        rows = sum(trace.num_ranks for trace in with_curves.values())
        steps = max(LEAST_MEMORY_STEPS, min(MAX_MEMORY_STEPS, ALL_MEMORY_STEPS // rows))
        limits = contents.plan.cluster.limits
        limit = limits[0] if len(set(limits)) == 1 else None
        found["memory"] = Memory(width=width, limit=limit).drawing(with_curves, max_steps=steps)
    if run := contents.run:
        found["loss"] = _curve([(each.step, each.loss) for each in run.steps if each.loss is not None])
        # The first step includes warm-up. The prediction is a dashed line.
        later = run.steps[1:]
        scale, unit = seconds_unit(max((each.seconds for each in later), default=0.0))
        points = [(each.step, each.seconds / scale) for each in later]
        found["seconds"] = _curve(points, run.predicted_seconds / scale, f" {unit}")
    return {name: drawing for name, drawing in found.items() if drawing}


# ------------------------------------------------------------------------------------------------ a metric per step

CURVE_WIDTH, CURVE_HEIGHT = 540.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 14.0, 30.0
SIZE = 12.0
MAX_POINTS = 400
CURVE = KIND_COLORS[Kind.FORWARD]
AREA = mix(CURVE, PAPER, 0.8)
"""below a curve"""


def _curve(points: Sequence[tuple[int, float]], reference: float | None = None, unit: str = "") -> Drawing | None:
    """A line through the points, and a dashed one at the reference; None for fewer than two points."""
    if len(points) < 2:
        return None
    # More points than pixels would only make the page larger.
    points = points[:: max(1, len(points) // MAX_POINTS)]
    values = [value for _, value in points]
    # The axis reaches from a round value below the least to one above the largest; with a reference, from 0.
    least = min(values) if reference is None else 0.0
    largest = max(values) if reference is None else max(*values, reference)
    step = round_step(largest - least or abs(values[0]) or 1.0, 4)
    low, high = step * (least // step), step * -(-largest // step)
    high = high if high > low else low + step
    first, last = points[0][0], points[-1][0]

    def at(step: float, value: float) -> Point:
        across = (step - first) / (last - first)
        return (
            LEFT + (CURVE_WIDTH - LEFT - RIGHT) * across,
            TOP + (CURVE_HEIGHT - TOP - BOTTOM) * (high - value) / (high - low),
        )

    lines, labels = [], []
    tick = round_step(high - low, 4)
    for number in range(round((high - low) / tick) + 1):
        value = low + number * tick
        y = at(first, value)[1]
        lines.append(Line(((LEFT, y), (CURVE_WIDTH - RIGHT, y)), RULE, 0.7))
        labels.append(Label(LEFT - 8, y, f"{number_text(value, 3)}{unit}", FAINT, SIZE, "end"))
    curve = tuple(at(*point) for point in points)
    lines.append(Line(curve, CURVE, 2.0))
    floor = CURVE_HEIGHT - BOTTOM + 16
    labels.append(Label(LEFT, floor, f"step {first}", FAINT, SIZE))
    labels.append(Label(CURVE_WIDTH - RIGHT, floor, str(last), FAINT, SIZE, "end"))
    if reference is not None:
        lines.append(Line((at(first, reference), at(last, reference)), FAINT, 1.5, dashed=True))
        labels.append(Label(CURVE_WIDTH / 2, floor, "dashed: predicted", FAINT, SIZE, "middle"))
    ground = Area((at(first, low), *curve, at(last, low)), AREA)
    return Drawing(CURVE_WIDTH, CURVE_HEIGHT, (), (ground,), tuple(lines), tuple(labels))


# -------------------------------------------------------------------------------------- light and dark colours

DARK_PAPER = "#12161c"
LEAST_CONTRAST = 3.2
"""of shapes against dark paper; the web guidelines ask for 3"""
_DARK = {
    INK: "#e9edf2",
    MARK: "#ffffff",
    FAINT: "#9ba6b4",
    RULE: "#3b444f",
    IDLE: "#232a33",
    PAPER: DARK_PAPER,
    ALARM: "#ff7185",
    GROUND: mix(CURVE, DARK_PAPER, 0.35),
    AREA: mix(CURVE, DARK_PAPER, 0.65),
}
_SHADES = 20


def dark(color: str) -> str:
    """The colour on dark paper: its counterpart, or itself with as much white as the contrast requires."""
    if color in _DARK:
        return _DARK[color]
    shades = (mix(color, PAPER, step / _SHADES) for step in range(_SHADES + 1))
    return next(shade for shade in shades if contrast(shade, DARK_PAPER) >= LEAST_CONTRAST)


def stage_hues() -> list[tuple[str, str, str, str]]:
    """The colour of stages on light and on dark paper, each followed by the colour of text on it."""
    return [(hue, text_on(hue), dark(hue), text_on(dark(hue))) for hue in STAGE_COLORS]


def color_rules(drawings: Iterable[Drawing]) -> str:
    """The style rules that give the class of every colour its light and its dark value."""
    colors: dict[str, None] = {}
    for drawing in drawings:
        colors |= dict.fromkeys(box.fill for box in drawing.boxes)
        colors |= dict.fromkeys(area.fill for area in drawing.areas)
        colors |= dict.fromkeys(line.color for line in drawing.lines)
        colors |= dict.fromkeys(label.color for label in drawing.labels)
    light = "".join(f".{_color_class(color)}{{--c:{color}}}" for color in colors)
    darker = "".join(f".{_color_class(color)}{{--c:{dark(color)}}}" for color in colors)
    return f"{light}@media (prefers-color-scheme:dark){{{darker}}}"


def _color_class(color: str) -> str:
    return f"c{color.removeprefix('#')}"


# ------------------------------------------------------------------------------------------------ SVG in a page


def svg_element(drawing: Drawing, title: str) -> Markup:
    """The drawing as an SVG element, with equal shapes merged to keep the page small.

    Colours are classes, so that they follow the theme of the page.
    """
    size = f"{_short(drawing.width)} {_short(drawing.height)}"
    areas = (f'<path class="{_color_class(a.fill)}" d="{_path(a.points)}z"/>' for a in drawing.areas)
    shapes = "".join((*_boxes(drawing.boxes), *areas, *_lines(drawing.lines), *_labels(drawing.labels)))
    # Every text among the shapes is escaped in `_labels`.
    return Markup(f'<svg viewBox="0 0 {size}" role="img" aria-label="{escape(title)}">{shapes}</svg>')


def _boxes(boxes: Iterable[Box]) -> Iterator[str]:
    """Boxes of one colour, top and height as one thick dashed line: less than half the size of rectangles."""
    rows: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for x, y, width, height, color, _ in boxes:
        left = round(10 * x)
        row = rows.setdefault((color, _short(y + height / 2), _short(height)), [])
        row.append((left, round(10 * (x + width)) - left))
    for (color, middle, thickness), row in rows.items():
        steps, end = [f"M0 {middle}"], 0
        for left, length in row:
            steps.append(f"m{_short((left - end) / 10)} 0h{_short(length / 10)}")
            end = left + length
        yield f'<path class="l {_color_class(color)}" stroke-width="{thickness}" d="{"".join(steps)}"/>'


def _lines(lines: Iterable[Line]) -> Iterator[str]:
    paths: dict[tuple[str, float, bool], list[str]] = {}
    for points, color, width, dashed in lines:
        paths.setdefault((color, width, dashed), []).append(_path(points))
    for (color, width, dashed), path in paths.items():
        dashes = ' stroke-dasharray="5 3"' if dashed else ""
        yield f'<path class="l {_color_class(color)}" stroke-width="{_short(width)}"{dashes} d="{"".join(path)}"/>'


def _path(points: Iterable[Point]) -> str:
    """A path through the points; a point level with the previous one, or straight above it, is one number."""
    before: tuple[str, str] | None = None
    steps = []
    for x, y in points:
        here = _short(x), _short(y)
        if before is None:
            steps.append(f"M{here[0]} {here[1]}")
        elif here != before:
            level, above = here[1] == before[1], here[0] == before[0]
            steps.append(f"H{here[0]}" if level else f"V{here[1]}" if above else f"L{here[0]} {here[1]}")
        before = here
    return "".join(steps)


def _labels(labels: Iterable[Label]) -> Iterator[str]:
    """SVG groups of the labels with one colour, size and anchor, which are then written once."""
    groups: dict[tuple[str, float, str], list[str]] = {}
    for x, y, text, color, size, anchor in labels:
        place = f'x="{_short(x)}" y="{_short(y + BASELINE * size)}"'
        groups.setdefault((color, round(size, 1), anchor), []).append(f"<text {place}>{escape(text)}</text>")
    for (color, size, anchor), texts in groups.items():
        # Black and white texts are on boxes, which keep their lightness on dark paper.
        paint = f'fill="{color}"' if color in (MARK, PAPER) else f'class="{_color_class(color)}"'
        yield f'<g {paint} font-size="{_short(size)}" text-anchor="{anchor}">{"".join(texts)}</g>'


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# ---------------------------------------------------------------------------------------------- zooming into timelines

TICKS = 100_000
"""of the longest trace: times are whole numbers of them"""


def zoom_data(traces: Mapping[str, Trace]) -> dict[str, Any] | None:
    """The data that report.js reads; None where the passes are too many for it.

    A pass is one number for its kind, stage and microbatch, the ticks since the end of the previous pass on its rank,
    and its own ticks. Traces of one program share the list of their passes.
    """
    bars = {name: Bars.of(trace) for name, trace in traces.items()}
    if sum(map(len, bars.values())) > MAX_PASSES:
        return None
    first = next(iter(bars.values()))
    tick = max(trace.makespan for trace in traces.values()) / TICKS or 1.0
    kinds = tuple(dict.fromkeys(kind for content in bars.values() for kind in content.kinds))
    fills = [[fill(kind, chunk, first.num_chunks) for chunk in range(first.num_chunks)] for kind in kinds]
    sizes = (first.trace.program.num_stages, max(trace.program.num_microbatches for trace in traces.values()))

    number_of = {int(kind): number for number, kind in enumerate(kinds)}
    shared: Ints | None = None
    entries = []
    for name, content in bars.items():
        sequence = np.lexsort((content.half, content.start, content.rank))
        entry = _trace_entry(name, content, sequence, tick)
        number = np.asarray([number_of[kind] for kind in content.passes.kind.tolist()], dtype=np.int64)
        codes = ((number * sizes[0] + content.passes.stage) * sizes[1] + content.passes.microbatch)[sequence]
        if shared is None or not np.array_equal(codes, shared):
            entry["codes"] = codes.tolist()
        shared = codes if shared is None else shared
        entries.append(entry)
    return {
        "tick": tick,
        "kinds": [(LETTERS[kind], WORDS[kind]) for kind in kinds],
        "sizes": sizes,
        "chunks": first.chunk_of_stage.tolist(),
        "light": fills,
        "dark": [[dark(color) for color in row] for row in fills],
        "inks": [[text_on(color) for color in row] for row in fills],
        "ranks": [rank_label(first.trace, rank) for rank in range(first.trace.num_ranks)],
        "traces": entries,
    }


def _trace_entry(name: str, bars: Bars, sequence: Ints, tick: float) -> dict[str, Any]:
    """One trace; `sequence` orders its bars by rank and start."""
    rank = bars.rank[sequence]
    start = np.round(bars.start[sequence] / tick).astype(np.int64)
    end = np.round(bars.end[sequence] / tick).astype(np.int64)
    # Differences between neighbours are short numbers, which keeps the page small.
    is_first = np.diff(rank, prepend=-1) != 0
    before = np.where(is_first, 0, np.concatenate(([0], end[:-1])))
    # Rank and tick at which each item of the critical path begins, and at which it ends.
    path: list[int] = []
    for item in critical_path(bars.trace):
        ranks = (item.rank, item.rank) if isinstance(item, Span) else (item.source, item.target)
        path += (ranks[0], round(item.start / tick), ranks[1], round(item.end / tick))
    entry: dict[str, Any] = {
        "name": name,
        "end": round(bars.trace.makespan / tick),
        "counts": np.bincount(rank, minlength=bars.trace.num_ranks).tolist(),
        "gaps": (start - before).tolist(),
        "lengths": (end - start).tolist(),
        "path": path,
    }
    if bars.has_pairs:
        entry["halves"] = bars.half[sequence].tolist()
    return entry
