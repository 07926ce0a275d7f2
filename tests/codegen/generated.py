"""Generates files of stages and imports them as a user would."""

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import penstock
from penstock.capture import Captured
from penstock.partitioners import uniform
from tests.stages.parity import Batch, Outcome, of_call


def imported(path: Path) -> ModuleType:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location(f"generated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated(captured: Captured, num_stages: int, directory: Path) -> ModuleType:
    """The generated file of a model that is cut uniformly, imported."""
    path = directory / f"stages{num_stages}.py"
    return imported(penstock.generate_code(captured, uniform(captured.graph, num_stages), path))


def outcome_of_file(module: ModuleType, model: Any, batch: Batch) -> Outcome:
    """The outcome of a step through the stages of a file."""
    return of_call(model, partial(module.run, model), batch)
