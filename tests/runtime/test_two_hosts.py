"""Two hosts: torchrun trains exactly over a slow cable, over which the plan sends less, and a dead host is noticed."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import two_hosts as benchmark
from benchmarks.hosts import Ended, NoHostsError, two_hosts
from tests.parity import TOLERANCE

# One run is enough for all tests; it starts torchrun twice, which tests/cli/test_train.py does by default.
pytestmark = [pytest.mark.xdist_group("two hosts"), pytest.mark.whole]
DEADLINE_SECONDS = 150.0
TASK = {"flops": 1e11, "schedule": "1f1b", "budget_seconds": 60.0, "kills_last_rank": True}
"""with one schedule all cuts are looked at in a moment, however busy the machine is"""


class Found(NamedTuple):
    """What the ranks wrote, and how torchrun ended on each host."""

    first: dict[str, Any]
    second: dict[str, Any]
    words: str
    ended: list[Ended]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """One run on two hosts with a rank each, of which the second dies at the end."""
    directory = tmp_path_factory.mktemp("hosts")
    try:
        with two_hosts() as hosts:
            script, args = Path(benchmark.__file__), (str(directory), json.dumps(TASK))
            ended = hosts.torchrun(script, 1, directory, args, DEADLINE_SECONDS)
    except NoHostsError as reason:
        pytest.skip(f"no network namespaces: {reason}")
    pages = [directory / f"rank{rank}.json" for rank in range(2)]
    if not all(page.exists() for page in pages):
        pytest.fail("\n".join(one.text for one in ended), pytrace=False)
    words = pages[0].with_suffix(".txt")
    return Found(*(json.loads(page.read_text()) for page in pages), words.read_text() if words.exists() else "", ended)


def test_training_over_the_cable_is_exact(found: Found) -> None:
    for rank in (found.first, found.second):
        for plan in ("without links", "with links"):
            assert rank[plan]["losses"] == pytest.approx(rank[plan]["expected"], rel=TOLERANCE, abs=0)
            assert rank[plan]["error"] < TOLERANCE


def test_the_measured_links_are_no_faster_than_the_cable(found: Found) -> None:
    assert len(found.first["links"]) == 2
    assert all(link["bandwidth"] < 1.1 * 200e6 / 8 for link in found.first["links"])


def test_the_plan_that_knows_the_links_sends_less_over_them(found: Found) -> None:
    blind, seeing = found.first["without links"], found.first["with links"]
    assert seeing["bytes"] < blind["bytes"] / 10
    assert seeing["predicted"] < blind["predicted"]


def test_the_benchmark_shows_both_plans(found: Found, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(benchmark, "measured", lambda task, ranks: found.first)
    for table in (benchmark.links(ranks=1), benchmark.gains(ranks=1)):
        table.show()
    assert len(re.findall(r"(PASS|FAIL)$", capsys.readouterr().out, re.MULTILINE)) == 5


def test_ranks_that_wait_for_a_dead_host_report_it_and_exit(found: Found) -> None:
    assert "rank 0 lost contact with rank 1" in found.words
    assert [one.code for one in found.ended] == [1, 1]
