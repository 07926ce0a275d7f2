"""The door from a plan or a run to its report."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.api.advice import advise
from penstock.api.planning import simulate
from penstock.errors import ViewError
from penstock.ir import Plan, Run, to_json, write_atomic
from penstock.views import Contents, Report

_PACKAGES = ("penstock", "torch", "numpy")


def report(plan_or_run: Plan | Run, path: str | Path | None = None) -> str:
    """The report as one HTML document, at most 300 KB and needing no network; with a path it is also written there.

    The plan is simulated again, so that its timeline can be shown, and changes that may make it faster are tried.
    """
    document = Report()(contents_of(plan_or_run))
    if path is not None:
        write_atomic(path, document)
    return document


def contents_of(plan_or_run: Plan | Run) -> Contents:
    """All that a report shows, computed."""
    if not isinstance(plan_or_run, Plan | Run):
        hint = "penstock.report(plan), or the Run of a training"
        raise ViewError("a report is of a plan or a run", given=type(plan_or_run).__name__, hint=hint)
    run = plan_or_run if isinstance(plan_or_run, Run) else None
    plan = run.plan if run else plan_or_run
    return Contents(plan, simulate(plan), run, advise(plan), digest_of(plan), _versions())


def digest_of(plan: Plan) -> str:
    """SHA-256 of the plan as it is saved: two plans with the same digest are the same."""
    return hashlib.sha256(to_json(plan).encode()).hexdigest()


def _versions() -> tuple[tuple[str, str], ...]:
    """Of what the report is made with; torch is not loaded to ask it."""
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)
