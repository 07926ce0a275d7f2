"""`penstock doctor`: check this machine."""

import typer

from penstock.cli.options import AsJson
from penstock.cli.output import print_json, print_table


def doctor(*, as_json: AsJson = False) -> None:
    """Check whether this machine is ready for pipelines.

    Versions, backends, cores, memory, threads, and the link between two local ranks. Each warning comes with a fix.
    """
    from penstock.api.doctor import diagnosis

    findings = list(diagnosis())
    if as_json:
        print_json([finding._asdict() for finding in findings])
        return
    print_table(("check", "result"), [(finding.name, finding.value) for finding in findings])
    for finding in findings:
        if finding.warning:
            typer.echo(f"\nwarning: {finding.name}: {finding.warning}\ntry: {finding.hint}")
