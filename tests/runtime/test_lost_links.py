"""Two hosts: a link that is down for five seconds delays a training, and one that stays down ends it on both sides."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import Hosts, NoHostsError, two_hosts
from tests.runtime import lost_link_rank

pytestmark = [pytest.mark.xdist_group("two hosts"), pytest.mark.whole]
DEADLINE_SECONDS, DOWN_SECONDS, MOST_SECONDS = 20.0, 5.0, 200.0


class Unplugging(threading.Thread):
    """Unplugs the link for a while, then for good."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        super().__init__(daemon=True)
        self._hosts, self._directory = hosts, directory
        self.after_first: dict[str, Any] = {}
        """of rank 0, some steps after the link was plugged in again"""

    def run(self) -> None:
        before = self._wait_for(5)["steps"]
        self._hosts.connect(False)
        time.sleep(DOWN_SECONDS)
        self._hosts.connect(True)
        self.after_first = self._wait_for(before + 20)
        self._hosts.connect(False)

    def _wait_for(self, steps: int) -> dict[str, Any]:
        page, end = self._directory / "rank0.json", time.monotonic() + MOST_SECONDS
        while time.monotonic() < end:
            found: dict[str, Any] = json.loads(page.read_text()) if page.exists() else {"steps": 0, "error": ""}
            if found["steps"] >= steps or found["error"]:
                return found
            time.sleep(0.05)
        raise AssertionError("the training does not continue")


def test_a_link_that_is_down_for_a_while_delays_and_one_that_stays_down_ends_all_ranks(tmp_path: Path) -> None:
    try:
        with two_hosts() as hosts:
            unplugging = Unplugging(hosts, tmp_path)
            unplugging.start()
            script, args = Path(lost_link_rank.__file__), (str(tmp_path), str(DEADLINE_SECONDS))
            ended = hosts.torchrun(script, 1, tmp_path, args, MOST_SECONDS)
            unplugging.join(1.0)
    except NoHostsError as reason:
        pytest.skip(f"no network namespaces: {reason}")
    assert unplugging.after_first.get("error") == "", unplugging.after_first or [one.text for one in ended]
    assert unplugging.after_first["steps"] > 20
    pages = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for page in pages:
        assert len(page["losses"]) == 1
        assert page["error"]
        assert page["last"] < DEADLINE_SECONDS + 15
    assert pages[0]["losses"] == pages[1]["losses"]
