"""The directory of a run: its plan, what it came to, its trace and its report, each written whole."""

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.files import write
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.ir.run import Run

PLAN, RUN, TRACE, REPORT = "plan.json", "run.json", "trace.json.gz", "report.html"
BOARD = "board"
"""what the ranks note while they run"""


def check_directory(directory: Path) -> None:
    """Make the directory, before work is spent on what goes there."""
    if directory.exists() and not directory.is_dir():
        raise PenstockError("a file stands where the directory should go", directory=directory, hint="another name")
    directory.mkdir(parents=True, exist_ok=True)


def write_run(run: "Run", directory: Path) -> list[Path]:
    """The files of a run, predicted and measured one above the other where a step was recorded."""
    import penstock
    from penstock.api.reporting import report
    from penstock.ir import codec
    from penstock.views.chrome import Chrome

    traces = {"predicted": penstock.simulate(run.plan)}
    if run.trace is not None:
        traces["measured"] = run.trace
    documents = {
        PLAN: codec.to_json(run.plan),
        RUN: codec.to_json(run),
        TRACE: Chrome()(traces),
        REPORT: report(run),
    }
    for name, document in documents.items():
        write(directory / name, document)
    return [directory / name for name in documents]
