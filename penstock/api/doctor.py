"""Checks this machine and this launch for what would slow a pipeline down or stop it, each with a suggested fix."""

import os
import platform
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from penstock.api.launch_environment import Finding, check_launch, check_variables, is_launched
from penstock.api.measuring import measure_links
from penstock.errors import PenstockError
from penstock.ir import bytes_text, seconds_text
from penstock.launch import launch, num_cores

_TESTED_PYTHON, _TESTED_TORCH = "3.11", "2.13"
_MIN_MEMORY = 2 * 2**30
_RANKS = 2
_REDUCED_BYTES = 4 * 2**20
_THREADS = "OMP_NUM_THREADS"


def diagnosis(timeout: float = 30.0) -> Iterator[Finding]:
    """Run all checks, the quick ones first.

    The last ones start two processes; as a rank of a launch, they connect to the other ranks instead, for at most
    `timeout` seconds.
    """
    yield _version("python", platform.python_version(), _TESTED_PYTHON, "Python 3.11")
    yield _version("torch", torch.__version__, _TESTED_TORCH, "pip install torch==2.13.0")
    yield _backends()
    yield _cores()
    yield _memory()
    yield _threads()
    if is_launched():
        yield from check_launch(os.environ, timeout)
    else:
        yield from check_variables(os.environ, torch.accelerator.device_count())
        yield from _loopback()


def _version(name: str, installed: str, tested: str, hint: str) -> Finding:
    if installed.split(".")[:2] == tested.split("."):
        return Finding(name, installed)
    return Finding(name, installed, "not the version that penstock is tested with", hint)


def _backends() -> Finding:
    available = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    accelerator = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    devices = f"{count} {'GPU' if count == 1 else 'GPUs'} ({accelerator.type})" if accelerator and count else "no GPU"
    finding = Finding("backends", f"{', '.join(available) or 'none'}; {devices}")
    if "gloo" in available:
        return finding
    warning = "ranks synchronise over gloo, which is missing"
    return finding._replace(warning=warning, hint="a build of torch with gloo", is_fatal=True)


def _cores() -> Finding:
    count = num_cores()
    finding = Finding("cores", str(count))
    if count >= _RANKS:
        return finding
    return finding._replace(warning="ranks here share one core", hint="more cores, or ranks on other machines")


def _memory() -> Finding:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    finding = Finding("memory", bytes_text(size))
    if size >= _MIN_MEMORY:
        return finding
    return finding._replace(warning="every rank loads torch, about 300 MB each", hint="fewer local ranks")


def _threads() -> Finding:
    given = os.environ.get(_THREADS)
    finding = Finding("threads", f"{torch.get_num_threads()} per process, {_THREADS} {given or 'not set'}")
    if given is not None or num_cores() == 1:
        return finding
    warning = "each rank on this machine starts that many threads, which then compete for cores"
    return finding._replace(warning=warning, hint=f"export {_THREADS}=1")


def _loopback() -> Iterator[Finding]:
    """Latency and bandwidth between two local processes, or why they cannot connect."""
    try:
        latency, bandwidth, seconds = launch(_measure_on_rank, _RANKS)[0]
    except (PenstockError, OSError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        fix = "allow sockets on 127.0.0.1: a firewall or sandbox may block them"
        yield Finding("loopback", "no connection", first, fix, is_fatal=True)
        return
    rate = f", {bytes_text(int(bandwidth))}/s" if bandwidth else ""
    yield Finding("messages", f"{seconds_text(latency)}{rate} between {_RANKS} local ranks")
    yield Finding("all-reduce", f"{bytes_text(_REDUCED_BYTES)} in {seconds_text(seconds)} on {_RANKS} local ranks")


def _measure_on_rank() -> tuple[float, float | None, float]:
    """On each rank: latency and bandwidth of a message, and seconds of an all-reduce."""
    link = measure_links(progress=False).link(0, 1)
    values = torch.ones(_REDUCED_BYTES // 4)
    dist.all_reduce(values)
    start = time.perf_counter()
    dist.all_reduce(values)
    return link.latency, link.bandwidth, time.perf_counter() - start
