"""`penstock demo`: measure, plan, prove and train a small GPT on local processes, and write a report."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from penstock.cli.demo_schedules import Out, compare_schedules
from penstock.cli.options import AsJson
from penstock.cli.output import RUN_FAILED, failed, note, print_json, print_view
from penstock.cli.plan import Machine
from penstock.cli.train_log import make_directory, step_line, write_run

if TYPE_CHECKING:
    from penstock.api.train_loop import StepReport
    from penstock.ir import Plan, Run

Schedules = Annotated[bool, Option("--schedules", help="Only compare and draw every schedule, without training.")]
Ranks = Annotated[int, Option(min=1, max=10, metavar="P", help="Processes to train on.")]
Steps = Annotated[int, Option(min=1, metavar="N", help="Training steps.")]
Print = Callable[[str], None]
SEARCH_SECONDS = 5.0
PRINT_EVERY = 5  # steps
# Thirty steps of rounding stay below this; a wrong gradient is far above it.
MAX_DIFFERENCE = 1e-4
MAX_CANDIDATES = 6  # shown
TRY_NEXT = """\
try next
  open {out}/report.html
      the model, both timelines, memory and bubble, in a browser
  penstock explain {out}/plan.json
      why this cut and this order
  penstock plan hf:llama --ranks 8 --memory 24GiB
      a plan for a Hugging Face model, without its weights
  penstock train FILE.py:build --data FILE.py:batches --ranks 2
      your own model
  penstock demo --schedules
      every schedule side by side"""


def demo(
    *,
    out: Out = Path("penstock-demo"),
    ranks: Ranks = 4,
    steps: Steps = 30,
    schedules: Schedules = False,
    as_json: AsJson = False,
) -> None:
    """Plan and train a small GPT, and show the result.

    Measures the model, plans it for 4 ranks, trains it on 4 local processes on text that ships with Python, compares
    with the same training in one process, and writes a report. Downloads nothing; takes about a minute.
    """
    if schedules:
        compare_schedules(out, as_json)
        return
    make_directory(out)
    echo = note if as_json else typer.echo
    began = perf_counter()
    plan = _plan(ranks, echo)
    run = _train(plan, steps, echo)
    seconds = perf_counter() - began
    files = write_run(run, out)
    if as_json:
        print_json(
            {
                "schedule": plan.choices.schedule,
                "predicted_seconds": plan.predicted.makespan,
                "measured_seconds": run.step_seconds,
                "losses": list(run.losses),
                "largest_difference": run.largest_difference,
                "seconds": seconds,
                "files": [str(path) for path in files],
            }
        )
    else:
        _print_results(plan, run, files, out)
    if (run.largest_difference or 0.0) > MAX_DIFFERENCE:
        raise failed(f"the pipeline differs from one process ({run.largest_difference:.1e})", RUN_FAILED)


def _plan(ranks: int, echo: Print) -> "Plan":
    import torch

    import penstock
    from penstock.demo.training import SIZES, batches, model
    from penstock.ir import counted

    torch.set_num_threads(1)  # as each of the ranks will have
    gpt = model()
    tokens, _ = next(batches(SIZES, 1))
    count = f"{sum(value.numel() for value in gpt.parameters()):,}"
    echo(f"a GPT of {SIZES.layers} blocks and {count} parameters; a batch is {len(tokens)} x {SIZES.length} characters")
    cluster = Machine.here(ranks).cluster(ranks)
    if cluster.cores:
        echo(f"{ranks} ranks share {counted(cluster.cores, 'core')} here; the plan and its prediction account for that")
    plan = penstock.plan(gpt, (tokens,), ranks=cluster, microbatches=SIZES.microbatches, budget_seconds=SEARCH_SECONDS)
    echo(f"measured, and searched for the best of {counted(len(plan.search.candidates), 'plan')}:\n")
    best = replace(plan.search, candidates=plan.search.candidates[:MAX_CANDIDATES])
    echo(f"{best}\n\n{plan}\n")
    return plan


def _train(plan: "Plan", steps: int, echo: Print) -> "Run":
    """Prove the program, train on processes and in one process, and compare."""
    import penstock
    from penstock.demo.training import largest_difference, train_rank, train_unsplit
    from penstock.ir import Run, from_json

    def print_step(report: "StepReport") -> None:
        if report.metrics.step % PRINT_EVERY == 0 or report.metrics.step + 1 == report.num_steps:
            echo("  " + step_line(report, plan.predicted.makespan))

    penstock.verify(penstock.lower(plan.orders, cuts=plan.cuts))
    echo(f"proven: the program of {plan.choices.schedule} cannot deadlock")
    echo(f"training {steps} steps on {plan.num_ranks} processes")
    ranks = penstock.launch(train_rank, plan.num_ranks, plan, steps, print_step)
    echo(f"the same {steps} steps in one process, in plain PyTorch")
    plain = train_unsplit(steps)
    return replace(from_json(ranks[0].run, Run), largest_difference=largest_difference(ranks, plain))


def _print_results(plan: "Plan", run: "Run", files: list[Path], out: Path) -> None:
    import penstock
    from penstock.ir import seconds_text
    from penstock.views import Terminal

    measured, predicted = run.trace, plan.predicted.makespan
    typer.echo(
        f"\nlargest difference of a loss or a parameter after {len(run.steps)} steps: {run.largest_difference:.1e}"
    )
    if measured is not None:
        typer.echo(
            f"step: predicted {seconds_text(predicted)}, measured {seconds_text(measured.makespan)} "
            f"({measured.makespan / predicted:.2f} times as long)"
        )
        if plan.cluster.cores:
            typer.echo("switching between ranks that share cores takes time that is not predicted: try --ranks 2")
        typer.echo()
        print_view(Terminal(color=False), {"predicted": penstock.simulate(plan), "measured": measured})
    typer.echo("\n".join(["", "written", *(f"  {path}" for path in files), "", TRY_NEXT.format(out=out)]))
