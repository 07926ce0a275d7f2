"""Generates files of stages and imports them as a user would."""

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import penstock
from penstock.capture import Captured
from penstock.partitioners import uniform
from tests.parity import Batch, Values, WholeModel, one_step


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


def step_of_file(module: ModuleType, model: Any, batch: Batch) -> Values:
    """The values of one step through the stages of a file."""
    return one_step(WholeModel(model, batch.loss_fn, forward=partial(module.run, model)), batch)
