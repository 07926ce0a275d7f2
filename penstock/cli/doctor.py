"""`penstock doctor`: check this machine, or as a rank of a launch all ranks."""

import os
from typing import Annotated

import typer

from penstock.cli.options import AsJson
from penstock.cli.output import RUN_FAILED, echo, print_json, print_table


def doctor(
    *,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Under torchrun: how long to wait for the other ranks.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine, or this launch, is ready for pipelines.

    Versions, backends, devices, cores, memory, threads, and the link between two local ranks. Started by torchrun or
    another launcher, it checks MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK, connects to the other ranks,
    and compares their versions and devices. Each warning comes with a fix. Exit code 5 if a pipeline cannot run.
    """
    from penstock.api.doctor import diagnosis

    findings = list(diagnosis(timeout))
    fatal = [finding for finding in findings if finding.is_fatal]
    # One rank prints what all of them have found; a rank without a connection prints its own findings.
    is_alone = any(finding.name in ("launch", "address", "local rank", "store") for finding in fatal)
    if os.environ.get("RANK", "0") == "0" or is_alone:
        if as_json:
            print_json([finding._asdict() for finding in findings])
        else:
            print_table(("check", "result"), [(finding.name, finding.value) for finding in findings])
            for finding in findings:
                if finding.warning:
                    word = "error" if finding.is_fatal else "warning"
                    echo(f"\n{word}: {finding.name}: {finding.warning}\ntry: {finding.hint}")
    if fatal:
        raise typer.Exit(RUN_FAILED)
