"""Written: files of stages, imported as anybody would import them."""

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
    """The module that a file holds, in a namespace of its own."""
    spec = importlib.util.spec_from_file_location(f"written_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(captured: Captured, num_stages: int, directory: Path) -> ModuleType:
    """The model cut uniformly, written and imported."""
    path = directory / f"stages{num_stages}.py"
    return imported(penstock.generate_code(captured, uniform(captured.graph, num_stages), path))


def of_written(module: ModuleType, model: Any, batch: Batch) -> Outcome:
    """The outcome of the stages that a file holds."""
    return of_call(model, partial(module.run, model), batch)
