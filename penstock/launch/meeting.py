"""Where the ranks of a group keep their boards: the launcher's directory, or one that the group agrees on."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.launch.rank import board_directory
from penstock.launch.scratch import place, remove_at_end

_LONGEST = 4096


def shared_directory(group: Any = None) -> Path:
    """A directory of the same name on every rank; called by all ranks of the group, removed at the end of who made it.

    A rank on another host makes its own of that name, and sees the boards of its host only.
    """
    known = board_directory()
    if known is not None:
        return known
    first = dist.get_rank(group) == 0
    made = tempfile.mkdtemp(prefix="penstock-", dir=place()) if first else ""
    directory = Path(_told_by_first(made, group))
    if first or _make(directory):
        remove_at_end(directory)
    return directory


def _told_by_first(text: str, group: Any) -> str:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    data = text.encode().ljust(_LONGEST, b"\0")
    box = torch.tensor(list(data), dtype=torch.uint8, device=device)
    dist.broadcast(box, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return bytes(box.tolist()).rstrip(b"\0").decode()


def _make(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700)
    except OSError:
        return False
    return True
