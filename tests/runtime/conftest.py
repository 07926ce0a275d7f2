"""Tests marked `gloo` share long-lived processes, and all run on one worker of a parallel test session."""

from collections.abc import Iterator

import pytest

from tests.leftovers import tidy
from tests.runtime.workers import Pools

__all__ = ["tidy"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gloo: runs on the long-lived processes of the session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gloo"):
            item.add_marker(pytest.mark.xdist_group("gloo"))


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Processes to run jobs on, by their number."""
    made = Pools(tmp_path_factory.mktemp("boards"))
    yield made
    made.close()
