"""Records as HTML, for `_repr_html_` in notebooks and small pages: tables, and a timeline.

`penstock.views` has larger pictures and the report.
"""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from penstock.ir.action import Kind
from penstock.ir.units import percent_text, printable, seconds_text

if TYPE_CHECKING:
    from penstock.ir.trace import Trace

PASS_COLORS = {
    Kind.FORWARD: "#1f5fa8",
    Kind.BACKWARD: "#e69f00",
    Kind.INPUT_GRAD: "#d55e00",
    Kind.WEIGHT_GRAD: "#8fd0b5",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradients",
    Kind.WEIGHT_GRAD: "weight gradients",
}
_OTHER = "#8a6fb0"
_WIDTH, _ROW, _LABEL = 900.0, 20, 50.0
_MAX_PASSES = 4000
"""longer traces are shown as a table of ranks only"""
_MAX_RANKS = 64
_STYLE = (
    "body { margin: 2rem; font-family: sans-serif; } "
    "svg { max-width: 100%; height: auto; background: white; } "
    "td, th { padding: .2em 1em; text-align: left; }"
)


def paragraph(text: str) -> str:
    """A line of text."""
    return f"<p>{escape(printable(text))}</p>"


def preformatted(text: str) -> str:
    """Text whose lines and columns are kept."""
    return f"<pre>{escape(printable(text))}</pre>"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a line of column names."""
    head = "".join(f"<th>{escape(printable(name))}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(printable(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_page(title: str, *parts: str) -> str:
    """A whole page of HTML elements, such as those of this file or an SVG picture, which are not escaped again."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(printable(title))}</title>\n<style>{_STYLE}</style>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def timeline(trace: "Trace") -> str:
    """The passes of every rank over time as SVG, below a line with the length of the step."""
    summary = f"step {seconds_text(trace.makespan)}, bubble {percent_text(trace.bubble)}"
    drawn = [span for span in trace.spans if span.end > span.start and span.action.kind in (*PASS_COLORS, Kind.OVERLAP)]
    if len(drawn) > _MAX_PASSES or trace.num_ranks > _MAX_RANKS or not trace.makespan:
        work = [(str(rank), seconds_text(seconds)) for rank, seconds in enumerate(trace.work)]
        return paragraph(summary) + html_table(("rank", "compute"), work[:_MAX_RANKS])
    scale = (_WIDTH - _LABEL) / trace.makespan
    parts = [
        f'<text x="0" y="{rank * _ROW + 14}">rank {rank}</text>'
        f'<rect x="{_LABEL}" y="{rank * _ROW + 2}" width="{_WIDTH - _LABEL}" height="{_ROW - 4}" fill="#eef0f3"/>'
        for rank in range(trace.num_ranks)
    ]
    for span in drawn:
        x, width = _LABEL + span.start * scale, max(0.5, (span.end - span.start) * scale)
        color, y = PASS_COLORS.get(span.action.kind, _OTHER), span.rank * _ROW + 2
        title = f"{span.action}: {seconds_text(span.start)} to {seconds_text(span.end)}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" fill="{color}" stroke="#ffffff" '
            f'stroke-width="0.4"><title>{escape(title)}</title></rect>'
        )
    height = trace.num_ranks * _ROW
    for place, kind in enumerate(kind for kind in _NAMES if any(span.action.kind is kind for span in drawn)):
        x = _LABEL + 140 * place
        parts.append(f'<rect x="{x}" y="{height + 6}" width="10" height="10" fill="{PASS_COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 15}" y="{height + 15}">{_NAMES[kind]}</text>')
    return (
        f'{paragraph(summary)}<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{height + 22}" '
        f'font-family="sans-serif" font-size="12" style="background:#ffffff">{"".join(parts)}</svg>'
    )
