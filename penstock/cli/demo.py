"""`penstock demo`: measure, plan, prove and train a small GPT on local processes, and write a report."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cli.demo_schedules import Out, compare_schedules
from penstock.cli.options import AsJson
from penstock.cli.output import RUN_FAILED, echo, failed, note, print_json, print_view
from penstock.cli.train_log import make_directory, number_text, write_run

if TYPE_CHECKING:
    from penstock.api.train_loop import StepReport
    from penstock.ir import Plan, Run

MOST_RANKS = 8  # the GPT has as many blocks
Schedules = Annotated[bool, Option("--schedules", help="Only compare and draw every schedule, without training.")]
Ranks = Annotated[
    int | None, Option(min=1, max=10, metavar="P", help="Processes to train on; default: one per core, 2 to 8.")
]
Steps = Annotated[int, Option(min=1, metavar="N", help="Training steps.")]
Print = Callable[[str], None]
SEARCH_SECONDS = 3.5  # measuring included
PRINT_EVERY = 10  # steps
TIMED_STEPS = 10  # of plain PyTorch with several threads, which is only timed
ONE_THREAD = "plain PyTorch, 1 thread"
MAX_RATIO = 1.15  # of measured and predicted time, on a machine that is idle and has a core for each rank
# Thirty steps of rounding stay below this; a wrong gradient is far above it.
MAX_DIFFERENCE = 1e-4
TRY_NEXT = """\
what next
  open {out}/report.html           the model, both timelines, memory and bubble, in a browser
  penstock explain {out}/plan.json the stages, why this cut and this order, and the other candidates
  penstock train FILE.py:build --data FILE.py:batches --loss cross_entropy --ranks {ranks}    your own model
  penstock plan hf:llama --ranks 8 --memory 24GiB    a plan for a Hugging Face model, without its weights
  penstock demo --schedules        every schedule side by side"""


def demo(
    *,
    out: Out = Path("penstock-demo"),
    ranks: Ranks = None,
    steps: Steps = 30,
    schedules: Schedules = False,
    as_json: AsJson = False,
) -> None:
    """Plan and train a small GPT, and show the result.

    Measures the model, plans it, trains it on as many local processes as there are cores, on text that ships with
    Python, compares numbers and tokens per second with the same training in one process of plain PyTorch, and writes a
    report. Downloads nothing; takes about a minute.
    """
    from penstock.launch import num_cores

    if schedules:
        compare_schedules(out, as_json)
        return
    make_directory(out)
    show = note if as_json else echo
    began, cores, load = perf_counter(), num_cores(), os.getloadavg()[0]
    plan = _plan(ranks or min(max(cores, 2), MOST_RANKS), cores, show)
    run, rates = _train(plan, steps, cores, show)
    seconds = perf_counter() - began
    files = write_run(run, out)
    if as_json:
        print_json(
            {
                "ranks": plan.num_ranks,
                "schedule": plan.choices.schedule,
                "predicted_seconds": plan.predicted.makespan,
                "measured_seconds": run.step_seconds,
                "tokens_per_second": rates,
                "losses": list(run.losses),
                "largest_difference": run.largest_difference,
                "seconds": seconds,
                "files": [str(path) for path in files],
            }
        )
    else:
        _print_results(plan, run, rates, load, out)
    if (run.largest_difference or 0.0) > MAX_DIFFERENCE:
        raise failed(f"the pipeline differs from one process ({run.largest_difference:.1e})", RUN_FAILED)


def _plan(ranks: int, cores: int, echo: Print) -> "Plan":
    import torch

    import penstock
    from penstock.demo.gpt import loss
    from penstock.demo.training import SIZES, batches, model
    from penstock.ir import counted

    torch.set_num_threads(1)  # as each of the ranks will have
    gpt = model()
    tokens, target = next(batches(SIZES, 1))
    count = f"{sum(value.numel() for value in gpt.parameters()):,}"
    echo(f"a GPT of {SIZES.layers} blocks and {count} parameters; a batch is {len(tokens)} x {SIZES.length} characters")
    plan = penstock.plan(
        gpt,
        (tokens,),
        ranks=ranks,
        microbatches=SIZES.microbatches,
        loss_fn=loss,
        target=target,
        budget_seconds=SEARCH_SECONDS,
    )
    if plan.cluster.cores:
        echo(f"{ranks} ranks share {counted(cores, 'core')} here; the plan and its prediction account for that")
    headline = str(plan).partition("\n\n")[0]
    candidates = counted(len(plan.search.candidates), "plan")
    echo(f"measured it, and compared {candidates} for {counted(ranks, 'rank')}; the best:\n{headline}")
    return plan


def _train(plan: "Plan", steps: int, cores: int, echo: Print) -> "tuple[Run, dict[str, float]]":
    """Prove the program, train on processes and in one process, and compare; the rates are tokens per second."""
    # Creating an optimizer imports it; the ranks are forked from this process and need not import it again.
    import torch._dynamo  # noqa: F401

    import penstock
    from penstock.demo.training import SIZES, largest_difference, train_rank, train_unsplit
    from penstock.ir import Run, counted, from_json, seconds_text

    def print_step(report: "StepReport") -> None:
        metrics = report.metrics
        if metrics.step % PRINT_EVERY == 0 or metrics.step + 1 == report.num_steps:
            rate = f"{report.tokens / max(metrics.seconds, 1e-9):,.0f} tokens/s"
            number = f"{metrics.step + 1}/{report.num_steps}"
            echo(f"  step {number:<6} loss {number_text(metrics.loss)}  {seconds_text(metrics.seconds)}  {rate}")

    penstock.verify(penstock.lower(plan.orders, cuts=plan.cuts))
    echo(f"proven: the program of {plan.choices.schedule} cannot deadlock")
    echo(f"training {steps} steps on {plan.num_ranks} processes, then the same in one process, in plain PyTorch")
    ranks = penstock.launch(train_rank, plan.num_ranks, plan, steps, print_step)
    run, plain = from_json(ranks[0].run, Run), train_unsplit(steps)
    # After the processes were forked: the threads of this process do not exist in a copy of it.
    timed = train_unsplit(min(steps, TIMED_STEPS), num_threads=cores) if cores > 1 else plain
    seconds = {
        f"pipeline, {counted(plan.num_ranks, 'rank')}": run.step_seconds or math.inf,
        f"plain PyTorch, {counted(cores, 'thread')}": timed.step_seconds,
        ONE_THREAD: plain.step_seconds,
    }
    rates = {name: SIZES.tokens / value for name, value in seconds.items()}
    return replace(run, largest_difference=largest_difference(ranks, plain)), rates


def _print_results(plan: "Plan", run: "Run", rates: dict[str, float], load: float, out: Path) -> None:
    import penstock
    from penstock.ir import align_columns, seconds_text
    from penstock.views import Terminal

    measured, predicted = run.trace, plan.predicted.makespan
    rows = [(name, f"{rate:,.0f}", f"{rate / rates[ONE_THREAD]:.2f}") for name, rate in rates.items()]
    echo("\n" + "\n".join(align_columns([("", "tokens/s", "speedup"), *rows])))
    echo(f"largest difference to plain PyTorch after {len(run.steps)} steps: {run.largest_difference:.1e}")
    if measured is not None:
        ratio = f"{measured.makespan / predicted:.2f} times the prediction"
        echo(f"step: predicted {seconds_text(predicted)}, measured {seconds_text(measured.makespan)}, {ratio}")
        if plan.cluster.cores:
            echo("switching between ranks that share cores takes time that is not predicted")
        elif measured.makespan > MAX_RATIO * predicted and load > 0.5:
            echo(f"other programs were using {load:.1f} cores; predictions assume an idle machine")
        echo()
        print_view(Terminal(color=False, width=100), {"predicted": penstock.simulate(plan), "measured": measured})
    echo(f"\nwrote plan.json, run.json, trace.json.gz and report.html to {out}")
    echo(TRY_NEXT.format(out=out, ranks=plan.num_ranks))
