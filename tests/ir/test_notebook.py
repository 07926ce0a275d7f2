"""Records have a short repr and HTML for notebooks."""

import re
from html import unescape
from typing import Any
from xml.etree import ElementTree

import pytest

import penstock
from penstock.ir import Run, StepMetrics, Trace
from tests.plans import chain_plan

PLAN = chain_plan("1f1b", 2, 1, 4)
TRACE = penstock.simulate(PLAN)
RUN = Run(PLAN, (StepMetrics(0, 1.5, 0.1, 4), StepMetrics(1, None, 0.1, 4, 2.0)), (TRACE,))


@pytest.mark.parametrize("record", [PLAN, TRACE, RUN])
def test_a_repr_is_one_short_line(record: Any) -> None:
    assert "\n" not in repr(record)
    assert len(repr(record)) < 200


@pytest.mark.parametrize("record", [PLAN, TRACE, RUN])
def test_html_is_well_formed(record: Any) -> None:
    ElementTree.fromstring(f"<div>{record._repr_html_()}</div>")


def test_a_plan_is_shown_as_its_headline_and_a_table_of_stages() -> None:
    html = PLAN._repr_html_()
    assert "2 stages" in html
    assert html.count("<tr>") == 1 + PLAN.num_stages


def test_a_trace_is_shown_as_a_timeline() -> None:
    html = TRACE._repr_html_()
    # A forward and a backward per stage and microbatch.
    assert html.count("<title>") == 2 * PLAN.num_stages * PLAN.num_microbatches
    assert all(f"rank {rank}" in html for rank in range(2))
    assert "1F3: " in html


def test_a_long_trace_is_shown_as_a_table() -> None:
    trace = penstock.simulate(penstock.schedule("1f1b", 4, 600))
    assert isinstance(trace, Trace)
    html = trace._repr_html_()
    assert "<svg" not in html
    assert html.count("<tr>") == 1 + 4


def test_names_are_escaped() -> None:
    from penstock.ir.notebook import html_table, paragraph  # noqa: TID251

    assert paragraph("<b>") == "<p>&lt;b&gt;</p>"
    assert "<i>" not in html_table(("<i>",), [("<i>",)])


def test_a_report_is_shown_as_a_page() -> None:
    page = penstock.report(PLAN)
    shown = re.fullmatch(r'<iframe srcdoc="([^"]*)"[^>]*></iframe>', page._repr_html_())
    assert shown
    assert unescape(shown[1]) == page
    assert isinstance(page, str)
    assert page.lstrip().lower().startswith("<!doctype html>")


def test_ipython_displays_html() -> None:
    interactive = pytest.importorskip("IPython.core.formatters")
    formatter = interactive.DisplayFormatter()
    for record in (PLAN, TRACE, RUN, penstock.report(PLAN)):
        shown, _ = formatter.format(record)
        assert re.match(r"<(p|iframe)", shown["text/html"])
        assert "text/plain" in shown
