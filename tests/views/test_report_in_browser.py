"""The report in a headless browser: the script runs, pointing and zooming work; skipped without Chromium."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.views import Report
from tests.views.reports import contents, planned

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--window-size=1200,900", "--dump-dom"),
)
WATCH = """
window.troubles = [];
addEventListener("error", (event) => troubles.push(event.message));
addEventListener("securitypolicyviolation", (event) => troubles.push(event.violatedDirective));
console.error = (...words) => troubles.push(words.join(" "));
"""
DRIVE = """
(() => {
  const canvas = document.getElementById("canvas"), tip = document.getElementById("tip"), found = {};
  const view = () => [Number(canvas.dataset.from), Number(canvas.dataset.to)];
  const box = canvas.getBoundingClientRect();
  const at = (x, y) => ({ clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true });
  const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
  found.whole = view();
  canvas.dispatchEvent(new PointerEvent("pointermove", at(80, 40)));
  found.tip = tip.hidden ? "" : tip.textContent;
  const atEnd = () => [40, 68, 96].map((y) => {
    canvas.dispatchEvent(new PointerEvent("pointermove", at(canvas.clientWidth - 3, y)));
    return tip.hidden ? "" : tip.textContent;
  });
  found.end = atEnd();
  document.getElementById("stretch").click();
  found.stretched = atEnd();
  document.getElementById("stretch").click();
  canvas.dispatchEvent(new PointerEvent("pointerleave", at(0, 0)));
  found.left = tip.hidden;
  canvas.dispatchEvent(new WheelEvent("wheel", { ...at(300, 40), deltaY: -200, ctrlKey: true }));
  found.wheeled = view();
  const plain = new WheelEvent("wheel", { ...at(300, 40), deltaY: -200 });
  canvas.dispatchEvent(plain);
  found.scrolls = !plain.defaultPrevented;
  key("0");
  found.reset = view();
  key("+");
  key("ArrowRight");
  found.keyed = view();
  document.querySelector("[data-do=all]").click();
  document.querySelector("[data-do=in]").click();
  found.clicked = view();
  canvas.dispatchEvent(new MouseEvent("dblclick", at(200, 40)));
  canvas.dispatchEvent(new PointerEvent("pointerdown", at(400, 40)));
  canvas.dispatchEvent(new PointerEvent("pointermove", at(600, 40)));
  window.dispatchEvent(new PointerEvent("pointerup", at(600, 40)));
  found.dragged = view();
  found.legend = [...document.querySelectorAll("#legend span")].map((each) => each.textContent);
  found.still = getComputedStyle(document.querySelector(".still")).display;
  found.colors = new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size;
  found.troubles = troubles;
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
})();
"""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.xdist_group("browser"),  # one visit is enough for all tests
]


def driven(page: str) -> str:
    """The page with scripts around its own that watch and drive it; the page allows only scripts that it knows."""
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (WATCH, DRIVE)]
    known = " ".join(f"'sha256-{digest}'" for digest in digests)
    page = page.replace("script-src ", f"script-src {known} ").replace("<body>", f"<body><script>{WATCH}</script>")
    return page.replace("</body>", f"<script>{DRIVE}</script></body>")


def dumped(page: str, folder: Path) -> str:
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'user'}", (folder / "page.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240).stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of one visit to a page."""
    page = Report()(contents(planned("zb_h1", 3, 4, name="<b>{}</b></script>")))
    dom = dumped(driven(page), tmp_path_factory.mktemp("browser"))
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


def test_the_script_runs_without_an_error_and_is_allowed_to(seen: dict[str, Any]) -> None:
    assert seen["troubles"] == []


def test_the_timelines_are_drawn_in_place_of_the_picture(seen: dict[str, Any]) -> None:
    assert seen["still"] == "none"
    assert seen["legend"] == ["forward", "input gradient", "weight gradient"]
    assert seen["colors"] > 10


def test_pointing_at_a_pass_shows_its_details(seen: dict[str, Any]) -> None:
    what, where, when, measured = seen["tip"].split("\n")
    assert (what, where) == ("forward · microbatch 0", "rank 0 · stage 0")
    assert when == "start 0 s · length 10 ms"
    assert re.fullmatch(r"measured: start \S+ us · length 10\.\d+ ms \(predicted is 0\.9\d ×\)", measured)
    assert seen["left"]


def test_a_shorter_timeline_can_be_drawn_as_long_as_the_longest(seen: dict[str, Any]) -> None:
    assert seen["end"] == ["", "", ""]
    assert any(tip.startswith("weight gradient · microbatch 3\n") for tip in seen["stretched"])


def test_wheel_keys_buttons_and_dragging_zoom(seen: dict[str, Any]) -> None:
    first, last = seen["whole"]
    assert first == 0
    assert 0 < seen["wheeled"][0] < seen["wheeled"][1] < last
    assert seen["reset"] == seen["whole"]
    assert seen["keyed"] == pytest.approx([0.375 * last, 0.875 * last], rel=1e-6)
    assert seen["clicked"] == pytest.approx([0.25 * last, 0.75 * last], rel=1e-6)
    assert seen["dragged"][1] - seen["dragged"][0] == pytest.approx(0.2 * last, rel=0.15)


def test_a_wheel_without_a_key_scrolls_the_page(seen: dict[str, Any]) -> None:
    assert seen["scrolls"]
