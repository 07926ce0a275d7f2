"""Every schedule side by side, proven, simulated, drawn and compared with known formulas, in a few seconds."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from typer import Option

from penstock.cli.claims import Finding, findings
from penstock.cli.files import write
from penstock.cli.options import Outputs, Sizes, Times
from penstock.cli.outcome import RUN_FAILED, failed
from penstock.cli.runs import Run, chosen, run
from penstock.cli.screen import look, print_json, print_sheet
from penstock.cli.simulate import documents
from penstock.errors import PenstockError

Out = Annotated[Path, Option(metavar="DIRECTORY", help="The directory to write into; made if it is missing.")]
DRAWN = ("1f1b", "zbv", "dualpipe_v")
TRY_NEXT = """\
try next
  penstock simulate zbv --ranks 8 --microbatches 32
      a larger one
  penstock simulate all --sweep 4,8,16,32
      how the bubble shrinks with more microbatches
  penstock simulate all --forward 1 --input-grad 1.3 --weight-grad 0.6 --latency 0.1
      passes of unequal length, and messages that take time
  penstock check {out}/orders/zbv.csv
      the proof of any order, also one that you wrote
  penstock trace {out}/orders/zbv.csv {out}/zbv.json
      a trace to zoom and measure in, at ui.perfetto.dev"""


def compare_schedules(out: Path, as_json: bool) -> None:
    """Build each for 4 ranks and 8 microbatches, prove, simulate, draw, and compare it with what is known of it."""
    started = perf_counter()
    sizes, times = Sizes(ranks=4, microbatches=8), Times()
    runs = [run(name, sizes, times) for name in chosen("all", sizes)[0]]
    seconds = perf_counter() - started
    found = findings(runs)
    files = _write(runs, out)
    if as_json:
        print_json(
            {
                "runs": [each.figures() for each in runs],
                "claims": [finding.plain() for finding in found],
                "files": [str(path) for path in files],
            }
        )
    else:
        _print(runs, found, seconds)
        typer.echo("\n".join(["written", *(f"  {path}" for path in files), "", TRY_NEXT.format(out=out)]))
    if wrong := [finding.claim for finding in found if not finding.agrees]:
        names = ", ".join(f"{claim.schedule} {claim.figure}" for claim in wrong)
        raise failed(f"the simulator disagrees with what is known ({names})", RUN_FAILED)


def _print(runs: Sequence[Run], found: Sequence[Finding], seconds: float) -> None:
    from penstock.views import Table, Terminal

    program = runs[0].trace.program
    typer.echo(
        f"{len(runs)} schedules for {program.num_ranks} ranks and {program.num_microbatches} microbatches, each built, "
        f"proven free of deadlock and simulated: {seconds:.2f} s in all"
    )
    look(Table(), {each.name: each.trace for each in runs})
    for each in runs:
        if each.name in DRAWN:
            look(Terminal(color=False), {each.name: each.trace})
            typer.echo()
    rows = [
        (finding.claim.schedule, finding.claim.figure.replace("_", " "), finding.claim.formula, *_pair(finding))
        for finding in found
    ]
    agreeing = sum(finding.agrees for finding in found)
    typer.echo(f"known formulas (P ranks, M microbatches, v stages per rank): {agreeing} of {len(found)} agree")
    print_sheet(("schedule", "figure", "formula", "known", "simulated"), rows)


def _pair(finding: Finding) -> tuple[str, str]:
    if finding.claim.figure == "in_flight":
        return f"{finding.claimed:g}", f"{finding.simulated:g}"
    return f"{finding.claimed:.1%}", f"{finding.simulated:.1%}"


def _write(runs: Sequence[Run], out: Path) -> list[Path]:
    if out.exists() and not out.is_dir():
        raise PenstockError("a file stands where the directory should go", out=out, hint="--out another-directory")
    orders = out / "orders"
    orders.mkdir(parents=True, exist_ok=True)
    # A PNG needs matplotlib, which is an extra; the SVG shows the same.
    png = out / "schedules.png" if find_spec("matplotlib") else None
    outputs = Outputs(out / "schedules.svg", png, out / "memory.svg", out / "trace.json.gz")
    wanted = documents(runs, outputs)
    wanted |= {orders / f"{each.name}.csv": each.schedule.to_csv for each in runs}
    for path, document in wanted.items():
        write(path, document())
    return [path for path in wanted if path.parent == out] + [orders / "*.csv"]
