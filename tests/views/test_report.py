"""The report: the contents of a page, that all of it is data, and that it stays small."""

import html
import json
import re
from dataclasses import replace

import pytest

from penstock.errors import ViewError
from penstock.ir import Cluster, Kind, StepMetrics
from penstock.views import Contents, Report
from penstock.views.palette import FAINT, INK, KIND_COLORS, PAPER, STAGE_COLORS, contrast, fill, text_on
from penstock.views.report import MAX_BYTES
from penstock.views.report.charts import DARK_PAPER, dark, stage_hues
from tests.views.reports import contents, planned
from tests.views.samples import named, standing_still

TRAINED = Report()(contents())
PLANNED = Report()(contents(trained=False))
HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{{{ 7 * 7 }}}} {}"


def words(page: str) -> str:
    """The text of a page without its tags, script and style."""
    bare = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", bare)).split())


def zoom_data(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1]) if found else {}


@pytest.mark.parametrize(
    "text",
    [
        "2 stages on 2 ranks · 4 microbatches · schedule 1f1b · partitioner linear",
        "measured step 219 ms 1.03 × the prediction, with the optimizer 340 ms, median of 7 steps",
        "throughput 94.1 /s samples, 32 in a step",
        "of 64 MiB, measured, rank 0",
        "loss 6 → 4.25 8 steps",
        "largest difference 2.5e-7",
        "no order of these stages takes less than 50 ms",
        "schedule zb_h1 −12.5 % 100 ms another order",
        "Rank 1 has the most work.",
        "100 % slower: <waits>",
        "64, 256 B 10 ms 20 ms 1 MiB 1 tensor, 128 B → 1 layers.0",
        "plan 0123abcd",
        "trained with torch 2.13.0",
        "Measured peaks: 20 MiB, 20 MiB.",
    ],
)
def test_a_page_contains(text: str) -> None:
    assert text in words(TRAINED)


def test_a_plan_alone_has_nothing_measured() -> None:
    assert "measured" not in words(PLANNED)
    assert [trace["name"] for trace in zoom_data(PLANNED)["traces"]] == ["predicted"]
    assert "Plan report" in words(PLANNED)


def test_the_sections_are_in_the_order_of_reading() -> None:
    found = re.findall(r'<section id="(\w+)"', TRAINED)
    assert found == ["model", "timeline", "bubble", "memory", "training", "next", "stages", "search"]


def test_the_script_can_decode_every_pass() -> None:
    plan = planned("interleaved_zb", 2, 4, 2)
    shown = contents(plan)
    data = zoom_data(Report()(shown))
    (stages, microbatches), trace = data["sizes"], data["traces"][0]
    found, place = set(), 0
    for rank, count in enumerate(trace["counts"]):
        end = 0
        for number in range(place, place + count):
            kind, (stage, microbatch) = (
                trace["codes"][number] // microbatches // stages,
                divmod(trace["codes"][number] % (stages * microbatches), microbatches),
            )
            start = end + trace["gaps"][number]
            end = start + trace["lengths"][number]
            found.add((rank, f"{stage}{data['kinds'][kind][0]}{microbatch}", round(start * data["tick"], 4)))
        place += count
    spans = {(span.rank, str(span.action), round(span.start, 4)) for span in shown.predicted.spans}
    assert found <= spans
    assert len(found) == 3 * plan.num_stages * plan.num_microbatches


def test_traces_of_one_program_share_the_list_of_passes() -> None:
    predicted, measured = zoom_data(TRAINED)["traces"]
    assert "codes" in predicted
    assert "codes" not in measured
    assert len(measured["gaps"]) == len(predicted["gaps"])


def test_a_page_needs_nothing_from_elsewhere() -> None:
    for mark in ("http://", "https://", "src=", "@import", "url(", "<link", "fetch(", "XMLHttpRequest", "import("):
        assert mark not in TRAINED


def test_names_are_data() -> None:
    page = Report()(contents(planned(name=HOSTILE)))
    assert "<img" not in page
    assert "alert(1)&gt;" in page
    assert "49" not in re.findall(r"onerror=alert\(1\)&gt;.{40}", page)[0]
    assert page.count("</script>") == TRAINED.count("</script>")


def test_a_browser_runs_only_the_script_of_the_page() -> None:
    from base64 import b64encode
    from hashlib import sha256

    (script,) = re.findall(r"<script>(.*?)</script>", TRAINED, re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html.unescape(TRAINED)


def test_without_javascript_the_timelines_are_pictures() -> None:
    picture = re.search(r'<div class="scroll still">(<svg.*?</svg>)', TRAINED, re.DOTALL)
    assert picture
    assert {"predicted", "measured", "F0", "B3", "rank 1"} <= set(re.findall(r">([^<>]+)</text>", picture[1]))
    assert '<div id="zoom" hidden>' in TRAINED


def test_eight_ranks_and_64_microbatches_fit_with_everything() -> None:
    page = Report()(contents(planned("zb_h1", 8, 64)))
    assert len(page.encode()) <= MAX_BYTES
    assert [sum(trace["counts"]) for trace in zoom_data(page)["traces"]] == [3 * 64 * 8] * 2
    assert {"predicted", "measured"} <= set(re.findall(r">([^<>]+)</text>", page))
    assert "too many" not in words(page)


@pytest.mark.untraced
def test_where_there_is_little_room_one_timeline_is_a_picture_and_all_can_be_zoomed() -> None:
    page = Report()(contents(planned("interleaved_zb", 8, 64, 4)))
    assert len(page.encode()) <= MAX_BYTES
    assert [sum(trace["counts"]) for trace in zoom_data(page)["traces"]] == [3 * 64 * 8 * 4] * 2
    assert 'class="scroll still"' in page
    assert "are too many to also draw both without JavaScript in a page of this size" in words(page)


def test_a_timeline_too_large_to_zoom_is_a_picture_with_a_note() -> None:
    page = Report()(contents(planned("gpipe", 16, 600), trained=False))
    assert len(page.encode()) <= MAX_BYTES
    assert zoom_data(page) == {}
    assert "actions are too many to zoom into in a page of this size; penstock trace" in words(page)
    assert 'class="scroll still"' in page
    assert '<section id="memory">' in page


@pytest.mark.untraced
def test_a_very_large_program_is_shown_as_far_as_there_is_room() -> None:
    page = Report()(contents(planned("1f1b", 64, 300)))
    assert len(page.encode()) <= MAX_BYTES
    assert re.search(
        r"actions are too many to (zoom into or to draw other than as predicted|draw) in a page", words(page)
    )
    assert "loss 6 → 4.25" in words(page)


def test_a_limit_that_differs_between_ranks_is_not_drawn_as_one_line() -> None:
    plan = planned()
    uneven = replace(plan, cluster=Cluster(2, memory=(2**26, 2**27)))
    assert "dashed: limit" in words(TRAINED)
    assert "dashed: limit" not in words(Report()(contents(uneven, trained=False)))


def test_a_run_without_a_recorded_step_or_finite_losses_is_shown_without_them() -> None:
    shown = contents()
    steps = (StepMetrics(0, float("nan"), 0.4, 0),)
    page = words(Report()(replace(shown, run=replace(shown.run, steps=steps, traces=(), peaks=()))))
    assert "measured step 400 ms" in page
    assert "throughput" not in page
    assert "predicted, rank" in page


def test_steps_of_several_batches_are_compared_with_the_prediction_for_as_many() -> None:
    shown = contents()
    page = words(Report()(replace(shown, run=replace(shown.run, traces=(), batches_per_step=4))))
    assert "measured step 85 ms 0.401 × the prediction" in page
    assert "0 ms 500 ms 1000 ms" in page  # the axis reaches the prediction, 4 times 212 ms


@pytest.mark.parametrize("schedule", ["gpipe", "dualpipe_v", "zbv"])
def test_passes_that_overlap_and_stages_in_a_vee_are_drawn(schedule: str) -> None:
    data = zoom_data(Report()(contents(planned(schedule, 2, 4, 1 if schedule == "gpipe" else 2))))
    assert ("halves" in data["traces"][0]) == (schedule == "dualpipe_v")
    assert data["chunks"] == ([0, 0] if schedule == "gpipe" else [0, 0, 1, 1])


def test_without_a_limit_the_peak_is_compared_with_nothing() -> None:
    free = replace(planned(), cluster=Cluster(2, latency=1e-3))
    assert "no limit was given" in words(Report()(contents(free)))


def test_a_step_of_no_length_is_shown_without_shares() -> None:
    shown = contents(trained=False)
    page = words(Report()(replace(shown, predicted=standing_still(shown.predicted))))
    assert "Most of the bubble" not in page


def test_ranks_that_are_never_idle_have_a_sentence_about_it() -> None:
    assert "No rank is ever idle." in words(Report()(contents(planned(ranks=1), trained=False)))


def test_the_report_of_a_run_without_steps_is_that_of_its_plan() -> None:
    shown = contents()
    page = words(Report()(replace(shown, run=replace(shown.run, steps=(), traces=()))))
    assert "measured step" not in page


def test_a_page_that_cannot_be_small_enough_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.views.report.MAX_BYTES", 1000)
    with pytest.raises(ViewError, match="too large for one page"):
        Report()(contents())


def test_a_plan_without_advice_has_a_sentence_about_it() -> None:
    assert "No change that was tried makes a step" in words(Report()(replace(contents(), advice=())))


def test_contents_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ViewError, match="must have the ranks of the plan"):
        Contents(planned(), named("gpipe", 3, 2))
    with pytest.raises(ViewError, match="another plan"):
        replace(contents(), plan=planned("gpipe"))
    with pytest.raises(ViewError, match="a report must be given contents"):
        Report()(planned())


@pytest.mark.parametrize("color", [*KIND_COLORS.values(), *STAGE_COLORS])
def test_shapes_are_visible_on_dark_paper(color: str) -> None:
    assert contrast(dark(color), DARK_PAPER) >= 3


@pytest.mark.parametrize("kind", KIND_COLORS)
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_the_text_of_a_pass_is_readable_on_light_and_on_dark_paper(kind: Kind, chunks: int) -> None:
    for color in (fill(kind, chunk, chunks) for chunk in range(chunks)):
        assert min(contrast(text_on(color), shade) for shade in (color, dark(color))) >= 4


@pytest.mark.parametrize("color", [INK, FAINT])
def test_text_is_readable_on_light_and_on_dark_paper(color: str) -> None:
    assert contrast(color, PAPER) >= 4.5
    assert contrast(dark(color), DARK_PAPER) >= 4.5


def test_the_numbers_of_stages_are_readable_on_their_colours() -> None:
    assert min(min(contrast(light, ink), contrast(dim, dim_ink)) for light, ink, dim, dim_ink in stage_hues()) >= 4.5
