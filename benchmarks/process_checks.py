"""What a run leaves behind, and on which addresses its processes listen."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path


def left_over(scratch: Path, *directories: Path) -> list[str]:
    """Temporary files in a scratch directory, and processes whose working directory is one of the others."""
    places = {path.resolve() for path in directories}
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() in places:
                processes.append(f"process {process.name}")
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
    return [*map(str, sorted(scratch.rglob("penstock-*"))), *processes]


def listeners(pids: Iterable[int]) -> list[str] | None:
    """The addresses on which processes listen, as `ss` reports them; None if there is no `ss`."""
    if shutil.which("ss") is None:
        return None
    listed = subprocess.run(["ss", "-Hltnup"], capture_output=True, text=True, check=True).stdout.splitlines()
    own = [f"pid={pid}," for pid in pids]
    return [line.split()[4] for line in listed if any(pid in line for pid in own)]


def is_local(address: str) -> bool:
    """Whether only this machine can connect to an address."""
    return address.startswith(("127.", "[::1]"))
