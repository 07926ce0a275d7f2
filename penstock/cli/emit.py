"""emit: a plan as the files that another tool reads, printed or written."""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.cli.files import check_targets, write
from penstock.cli.screen import note, print_json
from penstock.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.ir import Plan, Schedule

PRINTED = "schedule.csv"
"""what the order is called where it is printed"""


def check_tool(name: str, out: Path | None) -> None:
    """Refuse a tool that is not known and files that cannot be written, before a plan is searched for."""
    from penstock.views import EMITTERS

    if name not in EMITTERS:
        close = get_close_matches(name.lower(), EMITTERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(EMITTERS)}"
        raise PlanError("unknown tool", emit=repr(name), hint=hint)
    if out:
        check_targets((out, orders_beside(out)))


def orders_beside(out: Path) -> Path:
    """The CSV that belongs to a configuration."""
    return out.with_suffix(".csv")


def with_whole_modules(plan: "Plan", again: "Callable[[list[list[str]], Schedule], Plan]") -> "Plan":
    """A plan whose stages are lists of modules: the same, or one made `again` with its cuts moved to module borders."""
    from penstock.partitioners import by_modules
    from penstock.views import check_can_run, module_lists

    lists = module_lists(plan)
    if by_modules(plan.graph, lists) != plan.partition:
        note("cuts were moved to where modules begin, as lists of names can say")
        plan = again(lists, plan.schedule)
    check_can_run(plan)
    return plan


def emit(plan: "Plan", name: str, out: Path | None, as_json: bool) -> None:
    """Print the configuration and the order, or write the one to the file and the other beside it."""
    from penstock.views import EMITTERS, module_lists

    csv = str(orders_beside(out)) if out else PRINTED
    config, orders = EMITTERS[name](plan, csv), plan.schedule.to_csv()
    if out:
        write(orders_beside(out), orders)
        write(out, config)
        note(f"wrote {out} and {csv}")
    if as_json:
        lists = {"module_fqns_per_model_part": module_lists(plan), "schedule_csv": orders, "config": config}
        print_json({"tool": name, **lists})
    elif not out:
        typer.echo(f"{config}\n# {csv}\n{orders}", nl=False)
