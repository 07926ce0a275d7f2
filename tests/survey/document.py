"""docs/architectures.md, written from the stored results."""

from collections import Counter
from pathlib import Path
from textwrap import fill

from tests.survey.cases import RESULTS
from tests.survey.results import Entry, Part

DOCUMENT = Path(__file__).parents[2] / "docs" / "architectures.md"

_HEAD = """# Architectures

Every model below was trained for one step as a pipeline and compared with the unsplit model by `penstock.check`, on 2
ranks with 2 microbatches. Loss, gradients and buffers are:

- **exact**: those of the unsplit model on the whole batch, or, if the model draws random numbers, those of the unsplit
  model from the same seeds;
- **warned**: those of the unsplit model on the same microbatches, one after another, with a warning that this is not
  the whole batch, because samples interact (batch norm, contrastive losses, load-balancing losses of experts);
- **refused** with the reason, before anything was trained;
- **wrong** or **broken** otherwise: errors in penstock.

*Stages exact* counts the models whose stages, without microbatches, are those of the unsplit model.

"""
_ZOO = """## Zoo

Models from configurations of transformers, models written by hand, and situations that cutting a model can get wrong.
Each is also cut into 2, 3 and 4 stages, between blocks and between single functions, and run with labels (where it
takes any) and without. *Difference* is the largest relative difference over all cuts between the stages and the model:
in any output, any gradient of a parameter or any buffer, in float32 unless the name says otherwise; *none* is no
difference in any bit. A value that several stages read gets its gradient summed in parts, which may differ in the last
bit. *Nodes* are those of both recordings, *sent* is how many tensors cross each of the cuts between blocks when there
are four stages. `tests/stages/test_architectures.py` makes the same comparisons.

"""
_TAIL = """
## Run it

`make survey` installs the libraries into `.venv/survey`, runs all models (10 to 30 minutes) and writes this page.
They are installed without their dependencies, as timm and torchvision would replace torch: the list is
`tests/survey/requirements.txt`. timm cannot be imported without torchvision, and torchvision from a package index is
built for CUDA; with torch for CPUs its operators do not load, so the survey declares two of them before the import
(`tests/survey/__init__.py`). A library that is not installed is skipped, and its results remain.

`python -m tests.survey timm` runs one part, `--model NAME` one model of it, and `--corpus FILE` reads results of the
model tests of transformers: lines of JSON with `case`, `model`, `result`, and `error` or `report`.
"""


def render(parts: dict[str, Part]) -> str:
    """The page."""
    totals = [_total(name, part.models) for name, part in parts.items()]
    everything = {f"{name} {model}": entry for name, part in parts.items() for model, entry in part.models.items()}
    head = ["models", "tried", *RESULTS, "stages exact"]
    table = [_row(*head), "|---|" + "---:|" * (len(head) - 1), *totals, _total("all", everything)]
    sections = [_zoo(part) if name == "zoo" else _section(name, part) for name, part in parts.items()]
    return _HEAD + "\n".join(table) + "\n\n" + "\n".join(sections) + _TAIL


def _total(name: str, models: dict[str, Entry]) -> str:
    counts = Counter(entry.result for entry in models.values())
    staged = sum(entry.stages == "exact" for entry in models.values())
    return _row(name, len(models), *(counts[result] for result in RESULTS), staged)


def _zoo(part: Part) -> str:
    lines = [_row("model", "nodes", "sent", "difference", "pipeline"), "|---|---|---|---|---|"]
    for model, entry in part.models.items():
        nodes, sent = (", ".join(map(str, figures)) for figures in (entry.nodes, entry.sent))
        difference = f"{entry.difference:.0e}" if entry.difference else "none"
        lines.append(_row(model, nodes, sent, difference, entry.result))
    return _ZOO + "\n".join(lines) + "\n\n" + _reasons(part.models)


def _section(name: str, part: Part) -> str:
    versions = ", ".join(f"{library} {version}" for library, version in part.versions.items())
    exact = ", ".join(model for model, entry in part.models.items() if entry.result == "exact")
    found = f"## {name}\n\n" + (f"{versions}.\n\n" if versions else "")
    return found + (fill(f"Exact: {exact}.", 120) + "\n\n" if exact else "") + _reasons(part.models)


def _reasons(models: dict[str, Entry]) -> str:
    """The models that are not exact, by reason."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for model, entry in models.items():
        if entry.result != "exact":
            # The names of the modules that follow a colon differ from model to model.
            reason = entry.reason.partition(": ")[0] if entry.result == "warned" else entry.reason
            grouped.setdefault((entry.result, reason), []).append(model)
    if not grouped:
        return ""
    rows = [_row(result, reason.replace("|", "\\|"), ", ".join(names)) for (result, reason), names in grouped.items()]
    return "\n".join([_row("result", "reason", "models"), "|---|---|---|", *rows]) + "\n"


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
