"""`penstock ckpt`: list, verify, show and export checkpoints."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from penstock.cli.options import AsJson
from penstock.cli.output import echo, note, print_json, print_table
from penstock.errors import CheckpointError

Where = Annotated[Path, Argument(metavar="PATH", help="A checkpoint, or a directory of checkpoints.")]
Out = Annotated[Path, Option("--hf", metavar="OUT", help="The directory to write, in the format of save_pretrained.")]
Config = Annotated[
    Path | None, Option(metavar="PATH", help="config.json or its directory; default: the one saved with the model.")
]


def ls(*, path: Where, as_json: AsJson = False) -> None:
    """List the checkpoints of a directory, newest first.

    Looks at manifests and file sizes, not at contents: verify does that. Incomplete saves are listed too; the next save
    removes them.
    """
    from penstock.checkpoint import list_checkpoints

    entries = list_checkpoints(path)
    if as_json:
        print_json([entry._asdict() for entry in entries])
        return
    header = ("checkpoint", "written", "size", "ranks", "schedule", "state")
    print_table(header, [entry.row for entry in entries])


def verify(*, path: Where, as_json: AsJson = False) -> None:
    """Compare every file with its digest.

    For a directory, verifies all checkpoints. If one is damaged the exit code is 6, and the message names the
    checkpoint that a run would resume from.
    """
    from penstock.checkpoint import verify_checkpoints
    from penstock.ir import counted

    results = verify_checkpoints(path)
    good = [result.name for result in results if not result.problem]
    if as_json:
        checkpoints = [result._asdict() for result in results]
        print_json({"checkpoints": checkpoints, "newest_good": good[0] if good else None})
    else:
        for result in results:
            echo(f"{result.name}: {result.problem or f'good, {result.files} files, {result.bytes:,} bytes'}")
    if len(good) == len(results):
        return
    number = len(results) - len(good)
    problem = f"{number} of {counted(len(results), 'checkpoint')} {'is' if number == 1 else 'are'} damaged"
    hint = f"a run resumes from {good[0]}" if good else "no checkpoint here is good"
    raise CheckpointError(problem, path=path, hint=hint)


def show(*, path: Where, as_json: AsJson = False) -> None:
    """Show the contents of a checkpoint, or of the newest in a directory."""
    from penstock.checkpoint import with_checkpoints

    contents = with_checkpoints(path, lambda found: _contents(found[0]))
    if as_json:
        print_json(contents)
        return
    tensors = contents.pop("tensors")

    def text(value: object) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {item}" for name, item in value.items())
        return f"{value:,}" if isinstance(value, int) else str(value)

    lines = (f"{name}: {text(value)}" for name, value in contents.items() if value is not None)
    echo("\n".join(lines))
    echo()
    print_table(("tensor", "file", "type", "shape"), [tuple(tensor.values()) for tensor in tensors])


def export(*, path: Where, out: Out, config: Config = None, as_json: AsJson = False) -> None:
    """Write the model of a checkpoint for from_pretrained.

    Takes the newest checkpoint of a directory, and compares its files with their digests first. Uses the configuration
    saved with the model, if it is a transformers model.
    """
    from penstock.checkpoint import open_newest
    from penstock.hf.export import export as export_checkpoint

    with open_newest(path) as checkpoint:
        written = export_checkpoint(checkpoint, out, config)
        step = checkpoint.manifest.step
    if as_json:
        print_json({"directory": str(out), "step": step, **written})
    else:
        note(f"wrote {out}: {written['tensors']} tensors of {written['model']}, step {step}")


def _contents(directory: Path) -> dict[str, Any]:
    """What `show` prints of a checkpoint, as JSON values."""
    from penstock.checkpoint import RUN, CheckpointReader

    with CheckpointReader(directory) as checkpoint, checkpoint.documents():
        manifest = checkpoint.manifest
        # Shown in another form: the bytes of all files together, and tensors and tied names at the end.
        described = asdict(replace(manifest, files={}, tensors={}, tied=()))
        del described["files"], described["tensors"], described["tied"]
        schedulers = checkpoint.stems("scheduler")
        return {
            "checkpoint": str(checkpoint.directory),
            "step": manifest.step,
            "written": manifest.written,
            "bytes": manifest.total_bytes,
            "plan": described["plan"],
            "versions": manifest.versions,
            "model": manifest.model,
            # Other fields of the manifest; those above keep their places.
            **described,
            "optimizer": checkpoint.optimizer.kind if checkpoint.stems("optimizer") else None,
            "scheduler": checkpoint.json_object(schedulers[0]) if schedulers else None,
            **{name: value for name, value in checkpoint.json_object(RUN).items() if value is not None},
            "tied": [list(group) for group in manifest.tied] or None,
            "tensors": [
                {"name": name, "file": record.file, "type": record.dtype, "shape": str(list(record.shape))}
                for name, record in manifest.tensors.items()
            ],
        }
