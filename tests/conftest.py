"""Settings that every test shares, made before torch is loaded."""

import atexit
import contextlib
import gc
import importlib
import logging
import os
import random
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The workers of the test run share the cores: more threads than one each only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some processors lack instructions that bfloat16 kernels would use; asked before torch is loaded, they do without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# Tests neither use nor change the profile cache of the user.
if "PENSTOCK_CACHE" not in os.environ:
    os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="penstock-test-profiles-")
    atexit.register(shutil.rmtree, os.environ["PENSTOCK_CACHE"], ignore_errors=True)
# Nor do they measure the messages of this machine: plans are the same on every machine.
os.environ.setdefault("PENSTOCK_MEASURE_RANKS", "0")

import coverage
import pytest
from hypothesis import settings

# With a handler, warnings of loggers are not printed to stderr.
logging.getLogger().addHandler(logging.NullHandler())

# The machine is shared and slow at times: a slow example is no failure, and every run tries the same examples.
settings.register_profile("penstock", deadline=None, derandomize=True)
settings.load_profile("penstock")

_TESTS = Path(__file__).parent
_PROJECT = tomllib.loads((_TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
_COVERAGE = pytest.StashKey[coverage.Coverage | None]()
_COVERED = {Path(pattern).parts[1].removesuffix(".py") for pattern in _PROJECT["tool"]["coverage"]["run"]["include"]}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run every combination, not only some that show every pair")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "whole: runs with --whole only; see tests/selection.py")
    config.addinivalue_line("markers", "all_combinations: runs with all combinations of its parameters by default too")
    config.addinivalue_line("markers", "gloo: runs on the long-lived processes of the session, all on one worker")
    config.addinivalue_line("markers", "untraced: runs without counting lines")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop tracing, but for tests of the planning packages: it doubles the time of the others and of loading torch."""
    # On a worker, pytest-cov has just started the measurement that it saves, and before that one that it throws away.
    session.config.stash[_COVERAGE] = measurement = coverage.Coverage.current()
    if measurement:
        # The lines that run when a planning package is imported count.
        for package in _COVERED:
            importlib.import_module(f"penstock.{package}")
    while running := coverage.Coverage.current():
        running.stop()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the full products, keeping each value of a parameter; run tests that share processes on one worker."""
    if not config.getoption("--whole"):
        from tests.selection import beyond_each_value

        left_out = {item for item in items if item.get_closest_marker("whole")}
        left_out.update(beyond_each_value([item for item in items if item not in left_out]))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("gloo"):
            item.add_marker(pytest.mark.xdist_group("gloo"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file on one worker, which makes their module fixtures once; groups are kept together too."""
    from xdist.scheduler import LoadGroupScheduling

    class ByGroupAndFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid else group

    return ByGroupAndFile(config, log) if config.getoption("dist") == "loadgroup" else None


def _is_traced(item: pytest.Item) -> bool:
    return item.path.relative_to(_TESTS).parts[0] in _COVERED and not item.get_closest_marker("untraced")


def pytest_collection_finish() -> None:
    """Exclude the million objects loaded by now from garbage collection, which would visit them repeatedly."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed all generators, so that no model depends on the tests that ran before in this process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Trace a test and its fixtures if it is one of a planning package."""
    measurement = item.config.stash[_COVERAGE]
    if measurement and _is_traced(item):
        with measurement.collect():
            return (yield)
    return (yield)


@pytest.fixture(scope="session")
def is_whole(request: pytest.FixtureRequest) -> bool:
    """Whether the full products run."""
    return bool(request.config.getoption("--whole"))


@pytest.fixture(scope="session", autouse=True)
def _quick_advice() -> Iterator[None]:
    """Every training ends with a report, which searches for a better order: here the search need not be thorough."""
    from penstock.api import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "SEARCH_SECONDS", 0.05)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_measurements() -> Iterator[None]:
    """Tests that plan need a profile, but no exact one."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:  # else nothing is measured
            from penstock.api import measuring
            from penstock.measure import timing

            patch.setitem(measuring.measure.__kwdefaults__, "iterations", 1)
            patch.setattr(timing, "_MAX_REPEATS", 4)
        yield


@pytest.fixture(scope="session")
def pools() -> Iterator[Any]:
    """Pools of processes to run jobs on, by number of ranks."""
    from penstock.launch import scratch_directory
    from tests.process_pool import Pools

    # The processes are forked: what is loaded here, none of them loads again.
    for name in ("matplotlib.pyplot", "pydantic"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with scratch_directory() as directory:
        pools = Pools(directory)
        yield pools
        pools.close()


@pytest.fixture(params=["local", pytest.param("processes", marks=pytest.mark.gloo)])
def execution(request: pytest.FixtureRequest, pools: Any) -> Any:
    """Runs the jobs of a test in this process or on several; see `tests/parity.py`."""
    from tests.parity import Execution

    return Execution(request.param, pools)
