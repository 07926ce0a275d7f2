"""Emulates two hosts on one machine: network namespaces with separate processes and /dev/shm, and a slow link."""

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
_POLL_SECONDS = 0.05
_REPOSITORY = Path(__file__).resolve().parents[1]
# The hosts must not see each other's processes and shared memory.
_ISOLATE = ("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
_MOUNT_AND_EXEC = 'mount -t tmpfs none /dev/shm && exec "$@"'


class NoHostsError(Exception):
    """Raised if this machine does not permit network namespaces; the message has the reason."""


@dataclass(frozen=True)
class Ended:
    """Exit code and output of torchrun on one host."""

    code: int
    text: str


@dataclass(frozen=True)
class Hosts:
    """Two running hosts."""

    names: tuple[str, str]
    """of the network namespaces"""
    devices: tuple[str, str]

    def torchrun(self, script: Path, ranks: int, directory: Path, args: Sequence[str], seconds: float) -> list[Ended]:
        """Runs a script on `ranks` ranks of each host, and kills it after `seconds`."""
        started = [self._start(host, script, ranks, directory, args) for host in range(2)]
        try:
            end = time.monotonic() + seconds
            while any(one.poll() is None for one in started) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
        finally:
            for one in started:
                # Killing the first process of a PID namespace ends all others in it.
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
        return [Ended(one.returncode, _log(directory, host).read_text()) for host, one in enumerate(started)]

    def connect(self, is_connected: bool) -> None:
        """Sets the link up or down."""
        for name, device in zip(self.names, self.devices, strict=True):
            _run("ip", "-n", name, "link", "set", device, "up" if is_connected else "down")

    def _start(
        self, host: int, script: Path, ranks: int, directory: Path, args: Sequence[str]
    ) -> "subprocess.Popen[bytes]":
        size = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(ranks)]
        address = ["--master-addr", ADDRESSES[0], "--master-port", str(_PORT)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *size, *address, str(script), *args]
        own = directory / f"host{host}"
        own.mkdir()
        settings = {"GLOO_SOCKET_IFNAME": self.devices[host], "TMPDIR": str(own), "PYTHONPATH": str(_REPOSITORY)}
        with _log(directory, host).open("wb") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *_ISOLATE, "sh", "-c", _MOUNT_AND_EXEC, "sh", *torchrun],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
                cwd=_REPOSITORY,
                start_new_session=True,
            )


@contextmanager
def two_hosts(rate: str = RATE) -> Iterator[Hosts]:
    """Creates two hosts with a link of the given rate; removes them and their processes at the end."""
    token = secrets.token_hex(4)
    hosts = Hosts((f"penstock-{token}-a", f"penstock-{token}-b"), (f"pen{token}a", f"pen{token}b"))
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        raise NoHostsError(f"{missing[0]} not found")
    try:
        _build(hosts, rate)
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_SECONDS)


def run_on_hosts(script: Path, ranks: int, task: object, seconds: float) -> list[Any]:
    """Runs `script DIRECTORY TASK`, with the task as JSON, on two hosts; returns what its ranks wrote to rankN.json."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ended = hosts.torchrun(script, ranks, directory, (name, json.dumps(task)), seconds)
        files = [directory / f"rank{rank}.json" for rank in range(2 * ranks)]
        if not all(file.exists() for file in files):
            raise RuntimeError("\n".join(one.text for one in ended))
        return [json.loads(file.read_text()) for file in files]


def _build(hosts: Hosts, rate: str) -> None:
    for name in hosts.names:
        _run("ip", "netns", "add", name)
    (one, other), (here, there) = hosts.names, hosts.devices
    _run("ip", "link", "add", here, "netns", one, "type", "veth", "peer", "name", there, "netns", other)
    for name, device, address in zip(hosts.names, hosts.devices, ADDRESSES, strict=True):
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", device, "up")
        limits = ("rate", rate, "burst", "32kbit", "latency", "400ms")
        _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limits)
    _run("ip", "netns", "exec", one, *_ISOLATE, "sh", "-c", _MOUNT_AND_EXEC, "sh", "true")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    if done.returncode:
        raise NoHostsError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _log(directory: Path, host: int) -> Path:
    return directory / f"host{host}.log"
