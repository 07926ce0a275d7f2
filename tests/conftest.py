"""Settings that every test shares, made before torch is loaded."""

import atexit
import gc
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The workers of the test run share the cores: more threads than one each only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some processors lack instructions that bfloat16 kernels would use; asked before torch is loaded, they do without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# What is measured here is of no use to the user, and what the user measured of none here.
if "PENSTOCK_CACHE" not in os.environ:
    os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="penstock-test-profiles-")
    atexit.register(shutil.rmtree, os.environ["PENSTOCK_CACHE"], ignore_errors=True)

import pytest
from hypothesis import settings

# The machine is shared and slow at times: a slow example is no failure, and every run tries the same examples.
settings.register_profile("penstock", deadline=None, derandomize=True)
settings.load_profile("penstock")

_TESTS = Path(__file__).parent
_PROJECT = tomllib.loads((_TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
_COUNTED = {Path(pattern).parts[1] for pattern in _PROJECT["tool"]["coverage"]["run"]["include"]}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run every combination, not only some that show every pair")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "whole: runs with --whole only; see tests/selection.py")
    config.addinivalue_line("markers", "gloo: runs on the long-lived processes of the session, all on one worker")
    config.addinivalue_line("markers", "no_cover: runs without counting lines")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Lines are counted while the pure rooms are tested: elsewhere it would double the time and show nothing."""
    if not config.getoption("--whole"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    for item in items:
        if item.path.relative_to(_TESTS).parts[0] not in _COUNTED:
            item.add_marker(pytest.mark.no_cover)
        if item.get_closest_marker("gloo"):
            item.add_marker(pytest.mark.xdist_group("gloo"))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector of cycles need not look at a million objects again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def is_whole(request: pytest.FixtureRequest) -> bool:
    """Whether every combination is asked for."""
    return bool(request.config.getoption("--whole"))


@pytest.fixture(scope="session")
def pools() -> Iterator[Any]:
    """Processes to run jobs on, by their number."""
    from penstock.launch import scratch_directory
    from tests.runtime.workers import Pools

    with scratch_directory() as boards:
        made = Pools(boards)
        yield made
        made.close()
