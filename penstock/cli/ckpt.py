"""ckpt: what checkpoints hold, whether they are whole, and the model of one for other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from penstock.cli.options import AsJson
from penstock.cli.screen import note, print_json, print_sheet
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.checkpoint import Stored

Where = Annotated[Path, Argument(metavar="PATH", help="A checkpoint, or the directory of several.")]
Out = Annotated[Path, Option("--hf", metavar="OUT", help="The directory to write, as save_pretrained does.")]
Config = Annotated[
    Path | None, Option(metavar="PATH", help="config.json or its directory; else that saved with the model.")
]


def ls(*, path: Where, as_json: AsJson = False) -> None:
    """List the checkpoints of a directory, the newest first.

    Manifests and sizes are looked at, the content of files is not: verify does that. Saves that never ended are listed
    too; the next save or load clears them away.
    """
    from penstock.checkpoint import listing

    entries = list(listing(path))
    if as_json:
        print_json([entry._asdict() for entry in entries])
        return
    header = ("checkpoint", "written", "size", "ranks", "schedule", "state")
    print_sheet(header, [entry.row for entry in entries])


def verify(*, path: Where, as_json: AsJson = False) -> None:
    """Compare every file with its digest.

    Of a directory, all checkpoints are looked at; if one is damaged the exit code is 6, and it is said which one a
    training would go on from.
    """
    from penstock.checkpoint import verified

    found = list(verified(path))
    good = [one.name for one in found if not one.problem]
    if as_json:
        print_json({"checkpoints": [one._asdict() for one in found], "newest_good": good[0] if good else None})
    else:
        for one in found:
            typer.echo(f"{one.name}: {one.problem or f'good, {one.files} files, {one.bytes:,} bytes'}")
    if len(good) == len(found):
        return
    problem = "a checkpoint is damaged" if len(found) == 1 else f"{len(found) - len(good)} checkpoints are damaged"
    hint = f"a training goes on from {good[0]}" if good else "no checkpoint here is good"
    raise CheckpointError(problem, path=path, hint=hint)


def show(*, path: Where, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds; of several, the newest."""
    from penstock.ir import printable

    with _newest(path) as stored:
        told = _told(stored)
    if as_json:
        print_json(told)
        return
    tensors = told.pop("tensors")
    lines = (f"{name}: {_spelled(value)}" for name, value in told.items() if value is not None)
    typer.echo("\n".join(map(printable, lines)))
    typer.echo("")
    print_sheet(
        ("tensor", "file", "type", "shape"), [(one["name"], one["file"], one["type"], one["shape"]) for one in tensors]
    )


def export(*, path: Where, out: Out, config: Config = None, as_json: AsJson = False) -> None:
    """Write the model of a checkpoint for from_pretrained.

    Of several checkpoints the newest is taken. Its files are compared with their digests first. The configuration is
    that of the model that was saved, if it was one of transformers.
    """
    from penstock.hf.exporting import export as exported

    with _newest(path) as stored:
        written = exported(stored, out, config)
        step = stored.manifest.step
    if as_json:
        print_json({"directory": str(out), "step": step, **written})
    else:
        note(f"wrote {out}: {written['tensors']} tensors of {written['model']}, step {step}")


def _newest(path: Path) -> "Stored":
    from penstock.checkpoint import Stored, candidates

    return Stored(candidates(path)[0])


def _told(stored: "Stored") -> dict[str, Any]:
    from penstock.checkpoint import RUN

    manifest = stored.manifest
    schedulers = stored.stems("scheduler")
    return {
        "checkpoint": str(stored.directory),
        "step": manifest.step,
        "written": manifest.written,
        "bytes": manifest.total_bytes,
        "plan": dict(manifest.plan),
        "versions": dict(manifest.versions),
        "model": manifest.model,
        "optimizer": stored.optimizer.kind if stored.stems("optimizer") else None,
        "scheduler": stored.plain(schedulers[0]) if schedulers else None,
        **{name: value for name, value in stored.plain(RUN).items() if value is not None},
        "tied": [list(group) for group in manifest.tied] or None,
        "tensors": [
            {"name": name, "file": file, "type": kind, "shape": str(list(shape))}
            for name, (file, kind, shape) in manifest.tensors.items()
        ],
    }


def _spelled(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {found}" for name, found in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
