"""Two network namespaces joined by a slow link, each with processes and shared memory of its own."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATE = "200mbit"
_PORT = 29400
_COMMAND_SECONDS = 20.0
_LOOK_SECONDS = 0.05
_REPOSITORY = Path(__file__).resolve().parents[1]
# As on another machine: other processes, and files in memory that the first host does not see.
_OWN = ("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
_INSIDE = 'mount -t tmpfs none /dev/shm && exec "$@"'


class NoHostsError(Exception):
    """Why this machine does not let us make hosts."""


@dataclass(frozen=True)
class Ended:
    """How torchrun ended on one host, and all that was printed there."""

    code: int
    text: str


@dataclass(frozen=True)
class Hosts:
    """Two hosts by the names of their namespaces and network devices."""

    names: tuple[str, str]
    devices: tuple[str, str]

    def torchrun(self, script: Path, ranks: int, directory: Path, args: Sequence[str], seconds: float) -> list[Ended]:
        """Run a script on so many ranks of each host; whatever still runs after the seconds is killed."""
        started = [self._start(host, script, ranks, directory, args) for host in range(2)]
        try:
            end = time.monotonic() + seconds
            while any(one.poll() is None for one in started) and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)
        finally:
            for one in started:
                # With the first process of its namespace every other one there ends.
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
        return [Ended(one.returncode, _log(directory, host).read_text()) for host, one in enumerate(started)]

    def connect(self, is_connected: bool) -> None:
        """Plug the link in, or out."""
        for name, device in zip(self.names, self.devices, strict=True):
            _do("ip", "-n", name, "link", "set", device, "up" if is_connected else "down")

    def _start(
        self, host: int, script: Path, ranks: int, directory: Path, args: Sequence[str]
    ) -> "subprocess.Popen[bytes]":
        places = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(ranks)]
        meeting = ["--master-addr", ADDRESSES[0], "--master-port", str(_PORT)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *places, *meeting, str(script), *args]
        own = directory / f"host{host}"
        own.mkdir()
        settings = {"GLOO_SOCKET_IFNAME": self.devices[host], "TMPDIR": str(own), "PYTHONPATH": str(_REPOSITORY)}
        with _log(directory, host).open("wb") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *_OWN, "sh", "-c", _INSIDE, "sh", *torchrun],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
                cwd=_REPOSITORY,
                start_new_session=True,
            )


@contextmanager
def two_hosts(rate: str = RATE) -> Iterator[Hosts]:
    """Two hosts whose cable carries so much in each direction; gone at the end with all that runs there."""
    token = secrets.token_hex(4)
    hosts = Hosts((f"penstock-{token}-a", f"penstock-{token}-b"), (f"pen{token}a", f"pen{token}b"))
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        raise NoHostsError(f"there is no {missing[0]} here")
    try:
        _build(hosts, rate)
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_SECONDS)


def run_on_hosts(script: Path, ranks: int, task: object, seconds: float) -> list[Any]:
    """What each rank of `script DIRECTORY TASK` on two hosts wrote to `DIRECTORY/rankN.json`; the task is JSON."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ended = hosts.torchrun(script, ranks, directory, (name, json.dumps(task)), seconds)
        pages = [directory / f"rank{rank}.json" for rank in range(2 * ranks)]
        if not all(page.exists() for page in pages):
            raise RuntimeError("\n".join(one.text for one in ended))
        return [json.loads(page.read_text()) for page in pages]


def _build(hosts: Hosts, rate: str) -> None:
    for name in hosts.names:
        _do("ip", "netns", "add", name)
    (one, other), (here, there) = hosts.names, hosts.devices
    _do("ip", "link", "add", here, "netns", one, "type", "veth", "peer", "name", there, "netns", other)
    for name, device, address in zip(hosts.names, hosts.devices, ADDRESSES, strict=True):
        _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
        _do("ip", "-n", name, "link", "set", "lo", "up")
        _do("ip", "-n", name, "link", "set", device, "up")
        limits = ("rate", rate, "burst", "32kbit", "latency", "400ms")
        _do("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limits)
    _do("ip", "netns", "exec", one, *_OWN, "sh", "-c", _INSIDE, "sh", "true")


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    if done.returncode:
        raise NoHostsError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _log(directory: Path, host: int) -> Path:
    return directory / f"host{host}.log"
