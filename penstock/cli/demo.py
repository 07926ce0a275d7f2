"""demo: a small GPT measured, planned, proven, trained on local processes, checked, and shown in a report."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from penstock.cli.demo_schedules import Out, compare_schedules
from penstock.cli.options import AsJson
from penstock.cli.outcome import RUN_FAILED, failed
from penstock.cli.plan import Machine
from penstock.cli.run_files import check_directory, write_run
from penstock.cli.screen import look, note, print_json
from penstock.cli.step_line import step_line

if TYPE_CHECKING:
    from penstock.api.loop import StepReport
    from penstock.ir import Plan, Run

Schedules = Annotated[bool, Option("--schedules", help="Only compare and draw every schedule, without training.")]
Ranks = Annotated[int, Option(min=1, max=10, metavar="P", help="Processes to train on.")]
Steps = Annotated[int, Option(min=1, metavar="N", help="Training steps.")]
Say = Callable[[str], None]
SEARCH_SECONDS = 5.0
TOLD_EVERY = 5
LARGEST_DIFFERENCE = 1e-4
"""what thirty steps of rounding may come to; a wrong gradient is far above it"""
SHOWN_CANDIDATES = 6
TRY_NEXT = """\
try next
  open {out}/report.html
      the model, both timelines, the memory and the bubble, in a browser
  penstock explain {out}/plan.json
      why this cut and this order
  penstock plan hf:llama --ranks 8 --memory 24GiB
      a plan for a Hugging Face model, without its weights
  penstock train FILE.py:build --data FILE.py:batches --ranks 2
      your own model
  penstock demo --schedules
      every schedule side by side"""


@dataclass(frozen=True)
class Shown:
    """What the demo found out, for programs."""

    plan: "Plan"
    run: "Run"
    predicted_seconds: float
    seconds: float

    def plain(self) -> dict[str, Any]:
        """As values."""
        return {
            "schedule": self.plan.choices.schedule,
            "predicted_seconds": self.predicted_seconds,
            "measured_seconds": self.run.step_seconds,
            "losses": list(self.run.losses),
            "largest_difference": self.run.largest_difference,
            "seconds": self.seconds,
        }


def demo(
    *,
    out: Out = Path("penstock-demo"),
    ranks: Ranks = 4,
    steps: Steps = 30,
    schedules: Schedules = False,
    as_json: AsJson = False,
) -> None:
    """Plan and train a small GPT, and show what happened.

    It is measured, planned for 4 ranks, trained on as many local processes on text that ships with Python, compared
    with the same training in one process, and shown in a report. Nothing is downloaded; it takes about a minute.
    """
    if schedules:
        compare_schedules(out, as_json)
        return
    check_directory(out)
    say = note if as_json else typer.echo
    began = perf_counter()
    plan = _planned(ranks, say)
    run = _trained(plan, steps, say)
    predicted = plan.predicted.makespan
    found = Shown(plan, run, predicted, perf_counter() - began)
    files = write_run(run, out)
    if as_json:
        print_json({**found.plain(), "files": [str(path) for path in files]})
    else:
        _print_end(found, files, out)
    if (run.largest_difference or 0.0) > LARGEST_DIFFERENCE:
        raise failed(f"the pipeline trains otherwise than one process ({run.largest_difference:.1e})", RUN_FAILED)


def _planned(ranks: int, say: Say) -> "Plan":
    """Measure the model and search for a plan."""
    import torch

    import penstock
    from penstock.demo.text import batches
    from penstock.demo.training import SIZES, model
    from penstock.ir import counted

    torch.set_num_threads(1)  # as each of the ranks will have
    whole = model()
    tokens, _ = next(batches(SIZES, 1))
    count = f"{sum(value.numel() for value in whole.parameters()):,}"
    say(f"a GPT of {SIZES.layers} blocks and {count} parameters; a batch is {len(tokens)} x {SIZES.length} letters")
    cluster = Machine.here(ranks).cluster(ranks)
    if cluster.cores:
        say(f"{ranks} ranks share {counted(cluster.cores, 'core')} here, and are planned and predicted so")
    plan = penstock.plan(
        whole, (tokens,), ranks=cluster, microbatches=SIZES.microbatches, budget_seconds=SEARCH_SECONDS
    )
    say(f"measured, and searched for the best of {counted(len(plan.search.candidates), 'plan')}:\n")
    best = replace(plan.search, candidates=plan.search.candidates[:SHOWN_CANDIDATES])
    say(f"{best}\n\n{plan}\n")
    return plan


def _trained(plan: "Plan", steps: int, say: Say) -> "Run":
    """Prove the program, train on processes and in one, and compare."""
    import penstock
    from penstock.demo.training import in_one_process, largest_difference, on_rank
    from penstock.ir import Run, from_json

    penstock.verify(penstock.lower(plan.schedule, cuts=plan.cuts))
    say(f"proven: the program of {plan.choices.schedule} cannot deadlock")
    say(f"training {steps} steps on {plan.num_ranks} processes")
    ranks = penstock.launch(on_rank, plan.num_ranks, plan, steps, _teller(plan, say))
    say(f"the same {steps} steps in one process, in plain PyTorch")
    plain = in_one_process(steps)
    return replace(from_json(ranks[0].run, Run), largest_difference=largest_difference(ranks, plain))


def _teller(plan: "Plan", say: Say) -> "Callable[[StepReport], None]":
    def tell(report: "StepReport") -> None:
        if report.figures.step % TOLD_EVERY == 0 or report.figures.step + 1 == report.of:
            say("  " + step_line(report, plan.predicted.makespan))

    return tell


def _print_end(found: Shown, files: list[Path], out: Path) -> None:
    import penstock
    from penstock.ir import seconds_text
    from penstock.views import Terminal

    run, measured = found.run, found.run.trace
    typer.echo(
        f"\nlargest difference of a loss or a parameter after {len(run.steps)} steps: {run.largest_difference:.1e}"
    )
    if measured is not None:
        typer.echo(
            f"a step as predicted {seconds_text(found.predicted_seconds)}, as measured "
            f"{seconds_text(measured.makespan)}: {measured.makespan / found.predicted_seconds:.2f} times that"
        )
        if found.plan.cluster.cores:
            typer.echo("to switch between ranks that share cores takes time that no plan knows: --ranks 2 comes nearer")
        typer.echo()
        look(Terminal(color=False), {"predicted": penstock.simulate(found.plan), "measured": measured})
    typer.echo("\n".join(["", "written", *(f"  {path}" for path in files), "", TRY_NEXT.format(out=out)]))
