"""A plan, its prediction and the run that followed it, as one HTML file that loads nothing else.

Choose it to hand to others: it opens in any browser, from a disk and without a network, in light or dark mode, on a
phone and in print. Timelines can be zoomed; without JavaScript they are pictures. The page never exceeds 300 KB: a
large plan is shown in less detail, with a note about it. Each section of the page is a function in `panels` or `charts`
and a section in `report.html`.
"""

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from penstock.errors import ViewError
from penstock.ir import Plan, bytes_text
from penstock.views.base import View, check_positive
from penstock.views.report import charts, panels
from penstock.views.report.panels import Contents

MAX_BYTES = 300_000
_FOLDER = Path(__file__).parent


class Detail(NamedTuple):
    """How much a page shows of a plan that may be too large for it."""

    zoom: bool = True
    """whether the timelines can be zoomed into"""
    pictures: int = 2
    """number of timelines that are also pictures, for browsers without JavaScript"""
    memory: bool = True
    """whether the memory of every rank is drawn"""


DETAILS = (
    Detail(),
    Detail(pictures=1),
    Detail(zoom=False),
    Detail(zoom=False, pictures=1),
    Detail(zoom=False, pictures=1, memory=False),
    Detail(zoom=False, pictures=0, memory=False),
)
"""from the most to the least; a page uses the first that makes it small enough"""


@dataclass(frozen=True)
class Report(View[Contents, str]):
    """HTML text."""

    width: int = 1100
    """pixels of the pictures, which the page scales"""
    name = "report"
    record = Plan
    suffix = ".html"

    def __post_init__(self) -> None:
        check_positive(width=self.width)

    def __call__(self, contents: Contents) -> str:
        given: object = contents
        if not isinstance(given, Contents):
            raise ViewError("a report must be given contents", got=type(given).__name__, hint="penstock.report(plan)")
        # The size of a page is known only when it is written; the first attempt is nearly always small enough.
        pages = (self._page(contents, detail) for detail in DETAILS)
        page = next((page for page in pages if len(page.encode()) <= MAX_BYTES), None)
        if page is None:
            raise ViewError("the plan is too large for one page", limit=MAX_BYTES, hint="penstock explain FILE")
        return page

    def _page(self, contents: Contents, detail: Detail) -> str:
        zoom = charts.zoom_data(contents.traces) if detail.zoom else None
        drawings = charts.draw_all(contents, self.width, detail.pictures, detail.memory)
        script, style = (_FOLDER / "report.js").read_text("utf-8"), (_FOLDER / "report.css").read_text("utf-8")
        return _template().render(
            contents=contents,
            panels=panels,
            zoom=zoom,
            omitted=_omitted(contents, zoom is not None, detail),
            pictures={name: charts.svg_element(drawing, name) for name, drawing in drawings.items()},
            bytes_text=bytes_text,
            hues=charts.stage_hues(),
            # Style and script are the only parts of a page that are not data, and so are not escaped. The browser
            # runs no script with another digest, whatever a name in the plan may contain.
            script=Markup(script),
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=Markup(style + charts.color_rules(drawings.values())),
        )


def _omitted(contents: Contents, is_zoomed: bool, detail: Detail) -> str:
    """A sentence about everything that is not shown; empty if nothing is missing."""
    missing = []
    if not is_zoomed:
        missing.append("zoom into" if detail.pictures else "draw")
    if 0 < detail.pictures < len(contents.traces):
        missing.append("draw other than as predicted" if not is_zoomed else "also draw both without JavaScript")
    if not missing:
        return ""
    actions = sum(len(trace.starts) for trace in contents.traces.values())
    memory = "" if detail.memory else " Memory over time is left out as well."
    return (
        f"{actions:,} actions are too many to {' or to '.join(missing)} in a page of this size;"
        f" penstock trace writes them for a viewer that has room.{memory}"
    )


@cache
def _template() -> Template:
    environment: Any = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    template: Template = environment.get_template("report.html")
    return template
