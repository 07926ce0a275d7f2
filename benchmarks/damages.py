"""Ways to damage or forge the files of a checkpoint."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from penstock.checkpoint.manifest import NAME, signed_document


def cut(newest: Path, rng: random.Random) -> None:
    """A file ends too early."""
    path = rng.choice(sorted(newest.iterdir()))
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def swap(newest: Path, rng: random.Random) -> None:
    """Two files have each other's content."""
    one, other = rng.sample(sorted(newest.iterdir()), 2)
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


def remove(newest: Path, rng: random.Random) -> None:
    """A file is missing."""
    rng.choice(sorted(newest.iterdir())).unlink()


def flip(newest: Path, rng: random.Random) -> None:
    """One bit of a file is flipped."""
    path = rng.choice(sorted(newest.iterdir()))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def edit(newest: Path, rng: random.Random) -> None:
    """The manifest is edited."""
    text = (newest / NAME).read_text()
    place = rng.choice([place for place, letter in enumerate(text) if letter.isalnum()])
    (newest / NAME).write_text(text[:place] + rng.choice("0aX\n ") * (1 + rng.randrange(2)) + text[place + 1 :])


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (cut, swap, remove, flip, flip, edit)


def damaged(good: Path, target: Path, number: int) -> Path:
    """A copy of a directory of checkpoints of which the newest has some damage."""
    shutil.copytree(good, target)
    newest, rng = max(target.glob("step-*")), random.Random(number)
    before = {path.name: path.read_bytes() for path in newest.iterdir()}
    while before == {path.name: path.read_bytes() for path in newest.iterdir()}:  # a letter may have stayed the same
        DAMAGES[number % len(DAMAGES)](newest, rng)
    return target


LINK = "a link"
ELSEWHERE = ("../plan.json", "/etc/passwd", "in/plan.json", "..", "", "a\\b", NAME, "a\0b", ".x", LINK)
"""what a forged manifest names instead of plan.json; or plan.json is a link"""


def forged(directory: Path, name: str) -> None:
    """Make the plan of a checkpoint lead elsewhere, with a manifest whose digest is right."""
    if name == LINK:
        (directory / "plan.json").rename(directory / "elsewhere")
        (directory / "plan.json").symlink_to("elsewhere")
        return
    manifest = json.loads((directory / NAME).read_bytes())["manifest"]
    manifest["files"] = {name if file == "plan.json" else file: found for file, found in manifest["files"].items()}
    (directory / NAME).write_bytes(signed_document(manifest))
