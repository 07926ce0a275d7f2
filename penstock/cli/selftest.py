"""`penstock selftest`: parity, prediction, memory and failures on this machine, as JSON and as one page."""

from pathlib import Path
from typing import Annotated

from typer import Option

from penstock.cli.files import check_targets, write
from penstock.cli.options import AsJson
from penstock.cli.output import RUN_FAILED, echo, failed, note
from penstock.cli.train_log import make_directory


def selftest(
    *,
    device: Annotated[str, Option(metavar="TYPE", help="cpu, cuda, or another accelerator of torch.")] = "cpu",
    ranks: Annotated[int, Option(min=2, metavar="P", help="Processes, each with a device of its own.")] = 2,
    quick: Annotated[bool, Option("--quick", help="A smaller model, fewer schedules and fewer steps.")] = False,
    out: Annotated[Path, Option(metavar="DIR", help="Directory of selftest.json and selftest.md.")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """Test penstock on this machine, and write a page to post.

    Trains a small GPT on local processes: compares six schedules with the unsplit model, the predicted with the
    measured time and memory of a step, and checks that a rank that hangs or is killed is noticed and named. Takes about
    a minute. Exit code 5 if gradients differ or a failure is not noticed.
    """
    import torch

    from penstock.demo.selftest import run_selftest

    make_directory(out)
    files = out / "selftest.json", out / "selftest.md"
    check_targets(files)
    torch.set_num_threads(1)  # as each of the ranks will have
    result = run_selftest(device, ranks, quick, note)
    for path, text in zip(files, (result.to_json(), result.page()), strict=True):
        write(path, text)
    echo(result.to_json() if as_json else result.page())
    note(f"written: {', '.join(map(str, files))}")
    if result.problems:
        raise failed(f"failed: {', '.join(result.problems)}", RUN_FAILED)
