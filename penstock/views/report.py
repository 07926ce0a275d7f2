"""report: a plan, what it predicts and what came of it, as one HTML file that needs nothing else.

Choose it to hand to others: it opens in any browser, from a disk and without a network, on light or dark paper, on a
phone and printed. Timelines can be zoomed and pointed at; without JavaScript they are pictures. It is never larger than
300 KB: where there is too much to show, less is shown, and it says so.
"""

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from penstock.errors import ViewError
from penstock.ir import Plan, bytes_text, counted
from penstock.views.base import View, check_positive
from penstock.views.drawing import Drawing
from penstock.views.page import course, still, tables
from penstock.views.page.cards import cards
from penstock.views.page.chart import chart, colors_of
from penstock.views.page.contents import Contents
from penstock.views.page.detail import DETAILS, Detail, left_out
from penstock.views.page.idle import CAUSES, idle_rows, sentence
from penstock.views.page.lanes import lanes
from penstock.views.page.ribbon import hues, ribbon
from penstock.views.page.theme import rules

MAX_BYTES = 300_000
_FOLDER = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Report(View[Contents, str]):
    """HTML text."""

    name = "report"
    noun = Plan
    suffix = ".html"
    width: int = 1100
    """pixels of the pictures, which a page scales"""

    def __post_init__(self) -> None:
        check_positive(width=self.width)

    def __call__(self, contents: Contents) -> str:
        given: object = contents
        if not isinstance(given, Contents):
            raise ViewError("a report needs contents", got=type(given).__name__, hint="penstock.report(plan)")
        pages = (self._page(contents, detail) for detail in DETAILS)
        page = next((page for page in pages if len(page.encode()) <= MAX_BYTES), None)
        if page is None:
            raise ViewError("the plan has too much to show in one page", limit=MAX_BYTES, hint="penstock explain FILE")
        return page

    def _page(self, contents: Contents, detail: Detail) -> str:
        plan, traces = contents.plan, contents.traces
        found = lanes(traces) if detail.zoom else None
        pictures = self._pictures(contents, detail)
        return _template().render(
            contents=contents,
            cards=cards(contents),
            headline=_headline(plan),
            hues=hues(),
            bands=ribbon(plan),
            lanes=found,
            left_out=left_out(contents, found is not None, detail),
            pictures={name: chart(drawing, name) for name, drawing in pictures.items()},
            idle=[(name, idle_rows(trace), sentence(trace)) for name, trace in traces.items()],
            causes=CAUSES,
            tables=tables,
            bytes_text=bytes_text,
            **_trusted(tuple(dict.fromkeys(chain.from_iterable(map(colors_of, pictures.values()))))),
        )

    def _pictures(self, contents: Contents, detail: Detail) -> dict[str, Drawing]:
        """The drawings by name, as far as there is something to draw."""
        shown = dict(list(contents.traces.items())[: detail.stills])
        limits = contents.plan.cluster.limits
        found = {
            "timeline": still.timeline(shown, self.width) if shown else None,
            "memory": still.memory(contents.traces, self.width, limits) if detail.memory else None,
            "loss": course.losses(contents.run) if contents.run else None,
            "seconds": course.durations(contents.run) if contents.run else None,
        }
        return {name: drawing for name, drawing in found.items() if drawing}


def _headline(plan: Plan) -> str:
    words = (
        f"{counted(plan.num_stages, 'stage')} on {counted(plan.num_ranks, 'rank')}",
        counted(plan.num_microbatches, "microbatch"),
        f"schedule {tables.clipped(plan.choices.schedule)}",
        f"cuts {tables.clipped(plan.choices.partitioner)}",
    )
    return " · ".join(words)


@cache
def _trusted(colors: tuple[str, ...]) -> dict[str, Any]:
    """Style and script, the only parts of a page that are not data; a browser runs no script of another digest."""
    script = (_FOLDER / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = (_FOLDER / "report.css").read_text(encoding="utf-8")
    themed = f"{rules(colors)}@media (prefers-color-scheme:dark){{{rules(colors, is_dark=True)}}}"
    return {"script": Markup(script), "digest": digest, "style": Markup(style + themed)}


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template("report.html")
