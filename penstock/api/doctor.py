"""Checks this machine and this launch for what would slow a pipeline down or stop it, each with a suggested fix.

Started by torchrun or another launcher, every rank runs the checks. The ranks exchange their descriptions through the
store that `init_process_group` would use, as JSON.
"""

import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock.api.measuring import measure_links
from penstock.errors import PenstockError
from penstock.ir import bytes_text, seconds_text
from penstock.launch import host_id, launch, num_cores, one_line

_TESTED_PYTHON, _TESTED_TORCH = "3.11", "2.13"
_MIN_MEMORY = 2 * 2**30
_RANKS = 2
_REDUCED_BYTES = 4 * 2**20
_THREADS = "OMP_NUM_THREADS"
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""those that `init_process_group` needs"""
_TORCHRUN = "torchrun --nproc-per-node N script.py, which sets them"
_KEY = "penstock/doctor"
_MAX_PORT = 65535
_MAX_SHOWN = 16
_LOOPBACK = ("127.", "localhost", "::1")


class Finding(NamedTuple):
    """The result of one check. A warning comes with a hint how to fix it."""

    name: str
    value: str
    warning: str = ""
    hint: str = ""
    is_fatal: bool = False
    """whether a pipeline cannot run like this, rather than run slowly"""


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


# ----------------------------------------------------------------------------------------------------------- the launch


class Launched(NamedTuple):
    """One rank of a launch."""

    rank: int
    host: str
    host_id: int
    """differs between containers of one name"""
    local_rank: int
    device: str
    """the device that LOCAL_RANK selects, and its name"""
    torch: str
    penstock: str
    python: str

    def __str__(self) -> str:
        software = f"torch {self.torch}, penstock {self.penstock}, Python {self.python}"
        return f"{self.host}, local rank {self.local_rank}, {self.device}, {software}"


def is_launched() -> bool:
    """Whether a launcher set any of the variables, complete or not."""
    return any(name in os.environ for name in VARIABLES)


def check_variables(environment: Mapping[str, str], num_devices: int) -> Iterator[Finding]:
    """Check the variables alone: whether they are complete, valid and consistent.

    `num_devices` is the number of accelerators that this process sees.
    """
    shown = ", ".join(f"{name}={environment[name]}" for name in (*VARIABLES, "LOCAL_RANK") if name in environment)
    finding = Finding("launch", shown or "not started by a launcher")
    if missing := [name for name in VARIABLES if name not in environment]:
        if len(missing) < len(VARIABLES):
            yield finding._replace(warning=f"{', '.join(missing)} not set", hint=_TORCHRUN, is_fatal=True)
        elif "SLURM_PROCID" in environment:
            hint = "srun with torchrun on every node, as in docs/slurm.md"
            yield finding._replace(warning="srun started this process, and no rank is set", hint=hint, is_fatal=True)
        else:
            yield finding
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, world, local, local_world = (_number(environment.get(name)) for name in names)
    if rank is None or world is None or not 0 <= rank < world:
        warning = "RANK must be a whole number from 0 to WORLD_SIZE - 1"
        hint = "the same WORLD_SIZE and a RANK of its own for each"
        yield finding._replace(warning=warning, hint=hint, is_fatal=True)
        return
    yield finding
    yield _address(environment, world, local_world)
    yield _local_rank(environment, local, local_world, num_devices)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _address(environment: Mapping[str, str], world: int, local_world: int | None) -> Finding:
    address, port = environment["MASTER_ADDR"], _number(environment["MASTER_PORT"])
    finding = Finding("address", f"{address}:{environment['MASTER_PORT']}", is_fatal=True)
    if port is None or not 0 < port <= _MAX_PORT:
        warning = f"MASTER_PORT must be a whole number from 1 to {_MAX_PORT}"
        return finding._replace(warning=warning, hint="a free port, such as 29500")
    try:
        socket.getaddrinfo(address, port, proto=socket.IPPROTO_TCP)
    except OSError as error:
        hint = "the name or address of the host of rank 0, as this host resolves it"
        return finding._replace(warning=f"MASTER_ADDR is unknown here: {error.strerror or error}", hint=hint)
    if address.startswith(_LOOPBACK) and local_world is not None and local_world < world:
        hint = "the name or address of the host of rank 0; torchrun: --rdzv-endpoint HOST:29500"
        return finding._replace(warning="other hosts cannot reach a loopback address", hint=hint)
    return finding._replace(is_fatal=False)


def _local_rank(environment: Mapping[str, str], local: int | None, world: int | None, num_devices: int) -> Finding:
    finding = Finding("local rank", environment.get("LOCAL_RANK", "not set"))
    if "LOCAL_RANK" not in environment:
        if not num_devices:
            return finding
        hint = "torchrun, or export LOCAL_RANK (under srun: $SLURM_LOCALID)"
        return finding._replace(warning="no variable selects the GPU of this rank", hint=hint)
    if local is None or (world is not None and local >= world):
        warning = "LOCAL_RANK must be a whole number from 0 to LOCAL_WORLD_SIZE - 1"
        return finding._replace(warning=warning, hint=_TORCHRUN, is_fatal=True)
    if num_devices and local >= num_devices:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        shown = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        warning = f"there is no device {local}: this process sees {num_devices}{shown}"
        hint = f"--nproc-per-node {num_devices}, or more visible devices"
        return finding._replace(warning=warning, hint=hint, is_fatal=True)
    return finding


def describe_rank(environment: Mapping[str, str]) -> Launched:
    """Describe this process, for the other ranks."""
    local = _number(environment.get("LOCAL_RANK")) or 0
    device, accelerator = "cpu", torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.device_count() > local:
        device = f"{accelerator.type}:{local}"
        if accelerator.type == "cuda":
            device = f"{device} {torch.cuda.get_device_name(local)}"
    rank = _number(environment.get("RANK")) or 0
    software = (str(torch.__version__), version("penstock"), platform.python_version())
    return Launched(rank, socket.gethostname(), host_id(), local, device, *software)


def compare_ranks(ranks: Sequence[Launched]) -> Iterator[Finding]:
    """A finding per rank, and one for each difference that would break or slow a pipeline."""
    for each in ranks[:_MAX_SHOWN]:
        yield Finding(f"rank {each.rank}", str(each))
    if len(ranks) > _MAX_SHOWN:
        yield Finding("ranks", f"and {len(ranks) - _MAX_SHOWN} more")
    for name, is_fatal in (("torch", True), ("penstock", True), ("python", False)):
        versions = {getattr(each, name): each.rank for each in reversed(ranks)}
        if len(versions) > 1:
            shown = ", ".join(f"{version} on rank {rank}" for version, rank in sorted(versions.items()))
            hint = "the same environment on every host"
            yield Finding(name, shown, "the ranks have different versions", hint, is_fatal)
    kinds = {each.device.partition(":")[0]: each.rank for each in reversed(ranks)}
    if len(kinds) > 1:
        shown = ", ".join(f"{kind} on rank {rank}" for kind, rank in sorted(kinds.items()))
        hint = "the same kind of device on every rank"
        yield Finding("devices", shown, "the ranks have different kinds of devices", hint, is_fatal=True)
    # Ranks on the CPU may have no LOCAL_RANK: they have no device to share.
    taken = Counter((each.host_id, each.local_rank) for each in ranks if each.device != "cpu")
    if shared := [place for place, times in taken.items() if times > 1]:
        same = [each for each in ranks if (each.host_id, each.local_rank) == shared[0]]
        value = f"{same[0].local_rank} for {len(same)} ranks on {same[0].host}"
        warning = f"ranks {', '.join(str(each.rank) for each in same)} would share one device"
        yield Finding("local ranks", value, warning, "a LOCAL_RANK of its own for each", is_fatal=True)


def check_launch(environment: Mapping[str, str], timeout: float) -> Iterator[Finding]:
    """Check the variables, then connect to the other ranks and compare them. Collective: every rank calls it."""
    found = list(check_variables(environment, torch.accelerator.device_count()))
    yield from found
    if any(finding.is_fatal for finding in found):
        return
    rank, world, seconds = int(environment["RANK"]), int(environment["WORLD_SIZE"]), timedelta(seconds=timeout)
    try:
        # The agent of torchrun hosts the store; with another launcher rank 0 does.
        is_host = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = dist.TCPStore(address, port, world, is_host, seconds, wait_for_workers=False)
        own = describe_rank(environment)
        store.set(f"{_KEY}/{rank}", json.dumps(own))
    except (RuntimeError, OSError, ValueError) as error:
        hint = "rank 0 must run, and its port be open to this host: a firewall, another address, or a port in use"
        address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        yield Finding("store", f"no connection to {address}", one_line(error), hint, is_fatal=True)
        return
    ranks, absent = _received(store, world, seconds)
    yield Finding("store", f"{len(ranks)} of {world} ranks connected")
    yield from compare_ranks(ranks)
    if absent:
        shown = f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent[:_MAX_SHOWN]))}"
        warning = f"{shown}{', ...' if len(absent) > _MAX_SHOWN else ''} did not connect within {timeout:g} s"
        hint = "the output of these ranks, on their hosts"
        yield Finding("ranks", f"{len(absent)} missing", warning, hint, is_fatal=True)
        return
    yield _messages(store, rank, world, seconds)


def _received(store: Any, world: int, timeout: timedelta) -> tuple[list[Launched], list[int]]:
    """The descriptions of the ranks that connected in time, and the ranks that did not."""
    ranks, absent = [], []
    for rank in range(world):
        try:
            # Once a rank is missing, the others have had the time to connect.
            store.wait([f"{_KEY}/{rank}"], timedelta(seconds=0.2) if absent else timeout)
            ranks.append(Launched(*json.loads(store.get(f"{_KEY}/{rank}"))))
        except RuntimeError:
            absent.append(rank)
    return ranks, absent


def _messages(store: Any, rank: int, world: int, timeout: timedelta) -> Finding:
    """Whether the ranks reach each other: one all-reduce over gloo, which connects all pairs."""
    try:
        # Not the default group, which the caller may have.
        group = dist.ProcessGroupGloo(dist.PrefixStore(_KEY, store), rank, world, timeout=timeout)
        group.allreduce([torch.ones(1)]).wait()
    except RuntimeError as error:
        hint = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: the interface that connects the hosts, such as eth0"
        return Finding("messages", "the ranks cannot reach each other", one_line(error), hint, is_fatal=True)
    return Finding("messages", f"all-reduce over {world} ranks")
