"""Runs the survey, all or the named parts, and writes docs/architectures.md: `python -m tests.survey [PART ...]`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# As in conftest.py: before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

from tests.survey import diffusers_models, results, sequence_models, timm_models, torchvision_models
from tests.survey.cases import RANDOM, RESULTS, Case, Outcome, run
from tests.survey.document import DOCUMENT, render
from tests.survey.results import Entry, Part
from tests.survey.zoo import survey_zoo_model
from tests.zoo import ZOO

LIBRARIES = {
    "timm": timm_models,
    "torchvision": torchvision_models,
    "diffusers": diffusers_models,
    "x-transformers and mambapy": sequence_models,
}
PARTS = ("zoo", *LIBRARIES)
CORPUS = "tests of transformers"


def survey_model(build: Callable[[], Case]) -> Entry:
    """The entry of a model; one that is not right as a pipeline is tried again without microbatches."""
    outcome = run(build())
    if outcome.result in ("exact", "warned"):
        return Entry(outcome.result, outcome.reason)
    stages = run(build(), microbatches=1).result
    return Entry(outcome.result, outcome.reason, "exact" if stages == "warned" else stages)


def read_corpus(path: Path) -> Part:
    """The part of the model tests of transformers; cases that plain PyTorch does not train are left out."""
    part = Part()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        outcome = _corpus_outcome(row)
        if outcome.result in RESULTS:
            family, test = row["case"].split(".")[2], row["case"].rpartition(".")[2]
            name = f"{family} {row['model']}"
            stages = "exact" if outcome.result in ("exact", "warned") else "unknown"
            part.models[name if name not in part.models else f"{name} ({test})"] = Entry(*astuple(outcome), stages)
    part.models = {name: _completed(entry, part.models.values()) for name, entry in sorted(part.models.items())}
    return part


def _completed(entry: Entry, others: Iterable[Entry]) -> Entry:
    """The tool cuts off reports: a reason that begins as the reason of another entry is taken for that one."""
    longer = (other.reason for other in others if other.reason.startswith(entry.reason))
    return replace(entry, reason=max(longer, key=len, default=entry.reason)) if entry.reason else entry


def _corpus_outcome(row: dict[str, str]) -> Outcome:
    """The outcome of a case; one that is exact but has warnings, as with batch norm, counts as warned of."""
    summary, *lines = row.get("report", "").splitlines() or [""]
    if row["result"] == "late":
        return Outcome("broken", "out of time")
    if row["result"] != "exact":
        return Outcome(row["result"], row.get("error", summary))
    notes = [line for line in lines[1:] if not line.startswith((" ", RANDOM))]
    is_whole = any(line.startswith("the whole batch: ") for line in notes)
    return Outcome("warned", notes[0]) if notes and not is_whole else Outcome("exact")


def _versions(packages: tuple[str, ...]) -> dict[str, str] | None:
    try:
        return {package: version(package) for package in packages}
    except PackageNotFoundError:
        return None


def main(arguments: list[str]) -> int:
    """0 if no model is wrong or broken, 1 if one is, 2 for an unknown part."""
    options = argparse.ArgumentParser(prog="python -m tests.survey", description=__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)} (all)")
    options.add_argument("--model", help="only this model of each part")
    options.add_argument("--corpus", type=Path, help="results of the model tests of transformers, a file of JSON lines")
    options.add_argument("--write", type=Path, default=DOCUMENT, help="the document (docs/architectures.md)")
    given = options.parse_args(arguments)
    if unknown := [part for part in given.parts if part not in PARTS]:
        print(f"unknown part (name: {unknown[0]})\ntry: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    stored = results.load()
    found: list[Entry] = []
    for name in given.parts or (() if given.corpus else PARTS):
        packages = ("torch", "transformers") if name == "zoo" else LIBRARIES[name].PACKAGES
        versions = _versions(packages)
        if versions is None:
            print(f"{name}: not installed, skipped (packages: {', '.join(packages)})")
            continue
        before = stored.get(name, Part()).models
        part = stored[name] = Part(versions)
        for model in ZOO if name == "zoo" else LIBRARIES[name].MODELS:
            if given.model in (None, model):
                is_zoo = name == "zoo"
                part.models[model] = survey_zoo_model(model) if is_zoo else survey_model(LIBRARIES[name].MODELS[model])
                found.append(part.models[model])
                print(f"{name} {model}: {part.models[model].result} {part.models[model].reason}", flush=True)
            elif model in before:
                part.models[model] = before[model]
        results.save(stored)
    if given.corpus:
        stored[CORPUS] = read_corpus(given.corpus)
    order = (*PARTS, CORPUS)
    stored = {name: stored[name] for name in order if name in stored}
    results.save(stored)
    given.write.write_text(render(stored), encoding="utf-8")
    return int(any(entry.result in ("wrong", "broken") for entry in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
