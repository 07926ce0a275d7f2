"""`penstock demo --schedules`: every schedule proven, simulated, drawn and compared with known formulas."""

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

from typer import Option

from penstock.cli.files import write
from penstock.cli.options import Outputs, Sizes, Times
from penstock.cli.output import RUN_FAILED, echo, failed, print_json, print_table, print_view
from penstock.cli.simulate import Simulated, documents, named_schedules, simulate_schedule
from penstock.cli.train_log import make_directory

Out = Annotated[Path, Option(metavar="DIRECTORY", help="The directory to write into; created if missing.")]
DRAWN = ("1f1b", "zbv", "dualpipe_v")
TRY_NEXT = """\
try next
  penstock simulate zbv --ranks 8 --microbatches 32
      a larger one
  penstock simulate all --sweep 4,8,16,32
      the bubble with more microbatches
  penstock simulate all --forward 1 --input-grad 1.3 --weight-grad 0.6 --latency 0.1
      passes of unequal length, and messages that take time
  penstock check {out}/orders/zbv.csv
      the proof of any order, also your own
  penstock trace {out}/orders/zbv.csv {out}/zbv.json
      a Chrome trace, for ui.perfetto.dev"""


class Formula(NamedTuple):
    """A published formula for a schedule with P ranks and M microbatches, F = I = W = 1, and v = 2 stages per rank."""

    schedule: str
    metric: str
    """a field of Summary"""
    text: str
    value: Callable[[int, int], float]


def _bubble(seconds: Callable[[int], float]) -> Callable[[int, int], float]:
    """The bubble if every rank works 3 M seconds and idles for the given seconds."""
    return lambda p, m: seconds(p) / (3 * m + seconds(p))


FORMULAS = (
    Formula("gpipe", "bubble", "(P-1)(F+B) idle", _bubble(lambda p: 3 * (p - 1))),
    Formula("gpipe", "in_flight", "M", lambda p, m: m),
    Formula("1f1b", "bubble", "(P-1)(F+B) idle", _bubble(lambda p: 3 * (p - 1))),
    Formula("1f1b", "in_flight", "min(M, P)", lambda p, m: min(m, p)),
    Formula("interleaved", "bubble", "(P-1)(F+B)/v idle", _bubble(lambda p: 3 * (p - 1) / 2)),
    Formula("interleaved", "in_flight", "P(1+(P-1)/(Pv))", lambda p, m: p + (p - 1) / 2),
    Formula("looped_bfs", "bubble", "(P-1)(F+B)/v idle", _bubble(lambda p: 3 * (p - 1) / 2)),
    Formula("looped_bfs", "in_flight", "M", lambda p, m: m),
    Formula("zb_h1", "bubble", "(P-1)(F+I-W) idle", _bubble(lambda p: p - 1)),
    Formula("zb_h1", "in_flight", "min(M, P)", lambda p, m: min(m, p)),
    Formula("zb_h2", "span_bubble", "0", lambda p, m: 0.0),
    Formula("zb_h2", "in_flight", "2P-1", lambda p, m: 2 * p - 1),
    Formula("interleaved_zb", "bubble", "(P-1)(F+I-W)/v idle", _bubble(lambda p: (p - 1) / 2)),
    Formula("interleaved_zb", "in_flight", "P", lambda p, m: p),
    Formula("zbv", "bubble", "(P-1)(F+I-W)/v idle", _bubble(lambda p: (p - 1) / 2)),
    Formula("zbv", "span_bubble", "0", lambda p, m: 0.0),
    Formula("zbv", "in_flight", "P", lambda p, m: p),
    Formula("v_half", "in_flight", "(P+2)//2", lambda p, m: (p + 2) // 2),
    Formula("v_min", "in_flight", "(P+4)//3", lambda p, m: (p + 4) // 3),
    Formula("dualpipe_v", "bubble", "(P-1)(F&B+B-3W)/v idle", _bubble(lambda p: p - 1)),
    Formula("dualpipe_v", "in_flight", "P+1/2", lambda p, m: p + 0.5),
)


class Comparison(NamedTuple):
    """The value of a formula and the simulated value."""

    formula: Formula
    known: float
    simulated: float

    @property
    def agrees(self) -> bool:
        """Whether the two are equal up to rounding."""
        return abs(self.known - self.simulated) < 1e-9

    def as_dict(self) -> dict[str, Any]:
        formula = self.formula
        names = {"schedule": formula.schedule, "metric": formula.metric, "formula": formula.text}
        return {**names, "known": self.known, "simulated": self.simulated, "agrees": self.agrees}

    @property
    def texts(self) -> tuple[str, str]:
        """Both values as they are printed."""
        spec = "g" if self.formula.metric == "in_flight" else ".1%"
        return format(self.known, spec), format(self.simulated, spec)


def compare_formulas(runs: Iterable[Simulated]) -> list[Comparison]:
    """Compare every formula with the simulated schedules."""
    simulated = {run.name: (run.schedule, run.metrics()) for run in runs}
    compared = []
    for formula in FORMULAS:
        schedule, metrics = simulated[formula.schedule]
        known = formula.value(schedule.num_ranks, schedule.num_microbatches)
        compared.append(Comparison(formula, float(known), float(metrics[formula.metric])))
    return compared


def compare_schedules(out: Path, as_json: bool) -> None:
    """Build, prove, simulate and draw every schedule for 4 ranks and 8 microbatches, and compare with formulas."""
    started = perf_counter()
    sizes, times = Sizes(ranks=4, microbatches=8), Times()
    runs = [simulate_schedule(name, sizes, times) for name in named_schedules("all", sizes)[0]]
    seconds = perf_counter() - started
    compared = compare_formulas(runs)
    files = _write(runs, out)
    if as_json:
        print_json(
            {
                "runs": [each.metrics() for each in runs],
                "formulas": [each.as_dict() for each in compared],
                "files": [str(path) for path in files],
            }
        )
    else:
        _print(runs, compared, seconds)
        echo("\n".join(["written", *(f"  {path}" for path in files), "", TRY_NEXT.format(out=out)]))
    if wrong := [each.formula for each in compared if not each.agrees]:
        names = ", ".join(f"{formula.schedule} {formula.metric}" for formula in wrong)
        raise failed(f"the simulation disagrees with the known formulas ({names})", RUN_FAILED)


def _print(runs: Sequence[Simulated], compared: Sequence[Comparison], seconds: float) -> None:
    from penstock.views import Table, Terminal

    program = runs[0].trace.program
    echo(
        f"{len(runs)} schedules for {program.num_ranks} ranks and {program.num_microbatches} microbatches, each built, "
        f"proven deadlock-free and simulated: {seconds:.2f} s in total"
    )
    print_view(Table(), {each.name: each.trace for each in runs})
    for each in runs:
        if each.name in DRAWN:
            print_view(Terminal(color=False), {each.name: each.trace})
            echo()
    rows = [
        (each.formula.schedule, each.formula.metric.replace("_", " "), each.formula.text, *each.texts)
        for each in compared
    ]
    agreeing = sum(each.agrees for each in compared)
    echo(f"known formulas (P ranks, M microbatches, v stages per rank): {agreeing} of {len(compared)} agree")
    print_table(("schedule", "metric", "formula", "known", "simulated"), rows)


def _write(runs: Sequence[Simulated], out: Path) -> list[Path]:
    make_directory(out)
    orders = out / "orders"
    orders.mkdir(exist_ok=True)
    # PNG needs matplotlib, an extra; the SVG shows the same.
    png = out / "schedules.png" if find_spec("matplotlib") else None
    outputs = Outputs(out / "schedules.svg", png, out / "memory.svg", out / "trace.json.gz")
    contents = documents(runs, outputs)
    contents |= {orders / f"{each.name}.csv": each.schedule.to_csv for each in runs}
    for path, document in contents.items():
        write(path, document())
    return [path for path in contents if path.parent == out] + [orders / "*.csv"]
