"""Listeners: the addresses on which processes wait for others to connect, as `ss` sees them."""

import shutil
import subprocess
from collections.abc import Iterable


def listeners(pids: Iterable[int]) -> list[str] | None:
    """The addresses; None where there is no `ss`."""
    if shutil.which("ss") is None:
        return None
    listed = subprocess.run(["ss", "-Hltnup"], capture_output=True, text=True, check=True).stdout.splitlines()
    own = [f"pid={pid}," for pid in pids]
    return [line.split()[4] for line in listed if any(pid in line for pid in own)]


def is_local(address: str) -> bool:
    """Whether only this machine can connect to an address."""
    return address.startswith(("127.", "[::1]"))
