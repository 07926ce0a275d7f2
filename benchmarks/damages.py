"""Functions that damage or forge the files of a checkpoint, for tests and benchmarks."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from penstock.checkpoint.manifest import NAME, document_with_digest


def cut(newest: Path, rng: random.Random) -> None:
    """Truncates a file."""
    path = rng.choice(sorted(newest.iterdir()))
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def swap(newest: Path, rng: random.Random) -> None:
    """Swaps the contents of two files."""
    one, other = rng.sample(sorted(newest.iterdir()), 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def remove(newest: Path, rng: random.Random) -> None:
    """Removes a file."""
    rng.choice(sorted(newest.iterdir())).unlink()


def flip(newest: Path, rng: random.Random) -> None:
    """Flips one bit of a file."""
    path = rng.choice(sorted(newest.iterdir()))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def edit(newest: Path, rng: random.Random) -> None:
    """Changes one or two characters of the manifest."""
    text = (newest / NAME).read_text()
    place = rng.choice([place for place, letter in enumerate(text) if letter.isalnum()])
    (newest / NAME).write_text(text[:place] + rng.choice("0aX\n ") * (1 + rng.randrange(2)) + text[place + 1 :])


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (cut, swap, remove, flip, flip, edit)


def damaged(good: Path, target: Path, number: int) -> Path:
    """Copies a directory of checkpoints and damages the newest one, in a way that `number` selects."""
    shutil.copytree(good, target)
    newest, rng = max(target.glob("step-*")), random.Random(number)
    before = {path.name: path.read_bytes() for path in newest.iterdir()}
    while before == {path.name: path.read_bytes() for path in newest.iterdir()}:  # `edit` may write the same character
        DAMAGES[number % len(DAMAGES)](newest, rng)
    return target


LINK = "a link"
ELSEWHERE = ("../plan.json", "/etc/passwd", "in/plan.json", "..", "", "a\\b", NAME, "a\0b", ".x", LINK)
"""file names that a forged manifest has instead of plan.json; LINK makes plan.json a symbolic link"""


def forged(directory: Path, name: str) -> None:
    """Makes the plan of a checkpoint refer to another file, with a valid digest of the manifest."""
    if name == LINK:
        (directory / "plan.json").rename(directory / "elsewhere")
        (directory / "plan.json").symlink_to("elsewhere")
        return
    manifest = json.loads((directory / NAME).read_bytes())["manifest"]
    manifest["files"] = {name if file == "plan.json" else file: found for file, found in manifest["files"].items()}
    (directory / NAME).write_bytes(document_with_digest(manifest))
