"""doctor: what this machine has for a pipeline, each warning with its mend."""

import typer

from penstock.cli.options import AsJson
from penstock.cli.screen import print_json, print_sheet


def doctor(*, as_json: AsJson = False) -> None:
    """Say what this machine has, and what is amiss.

    Versions, backends, cores, memory, threads, and how fast two local ranks reach each other; each warning comes with
    what to do about it.
    """
    from penstock.api.diagnosis import diagnosis

    findings = list(diagnosis())
    if as_json:
        print_json([finding._asdict() for finding in findings])
        return
    print_sheet(("what", "found"), [(finding.name, finding.found) for finding in findings])
    for finding in findings:
        if finding.warning:
            typer.echo(f"\nwarning: {finding.name}: {finding.warning}\ntry: {finding.mend}")
