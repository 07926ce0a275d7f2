"""penstock: any PyTorch model as a pipeline over several ranks, with the numbers of the unsplit model."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    CaptureError,
    CheckpointError,
    CodeError,
    CostError,
    DamagedError,
    FitError,
    FormatError,
    GraphError,
    NoLossError,
    PartitionError,
    PenstockError,
    PenstockWarning,
    PlanError,
    RunError,
    ScheduleError,
    ViewError,
)

if TYPE_CHECKING:
    from penstock.api.check import ParityReport, check
    from penstock.api.measuring import clear_profiles, measure, measure_links, measure_speed
    from penstock.api.models import capture, explain, generate_code, split
    from penstock.api.pipe_model import PartitionedGraph, pipe_model
    from penstock.api.pipeline import Pipeline
    from penstock.api.plan import plan
    from penstock.api.plan_together import plan_together
    from penstock.api.report import report
    from penstock.api.simulation import schedule, simulate
    from penstock.api.train_loop import StepReport, TrainEvent, fit
    from penstock.api.train_options import TrainOptions
    from penstock.auto.config import AutoPipelineConfig
    from penstock.auto.pipeline import AutoPipeline, ParallelizeFnProtocol, PipelineInfo
    from penstock.auto.planning import generate_hf_model_fqn_per_model_part
    from penstock.checkpoint import CheckpointOptions
    from penstock.ir import (
        Cluster,
        Cuts,
        DeviceSpeed,
        Graph,
        Link,
        MessageCost,
        Partition,
        Plan,
        Profile,
        Program,
        Ragged,
        Replicas,
        Rows,
        Run,
        Schedule,
        StageCosts,
        StateBytes,
        StepMetrics,
        Trace,
    )
    from penstock.launch import launch
    from penstock.loss import add_loss, added_losses
    from penstock.passes import lower, verify
    from penstock.runtime import GradScaler, Result, RunOptions

__version__ = "0.1.0"
# The module that defines each public name that is loaded at first use.
_HOMES = {
    "penstock.api.check": ("ParityReport", "check"),
    "penstock.api.measuring": ("clear_profiles", "measure", "measure_links", "measure_speed"),
    "penstock.api.models": ("capture", "explain", "generate_code", "split"),
    "penstock.api.pipe_model": ("PartitionedGraph", "pipe_model"),
    "penstock.api.pipeline": ("Pipeline",),
    "penstock.api.plan": ("plan",),
    "penstock.api.plan_together": ("plan_together",),
    "penstock.api.report": ("report",),
    "penstock.api.simulation": ("schedule", "simulate"),
    "penstock.api.train_loop": ("StepReport", "TrainEvent", "fit"),
    "penstock.api.train_options": ("TrainOptions",),
    "penstock.auto.config": ("AutoPipelineConfig",),
    "penstock.auto.pipeline": ("AutoPipeline", "ParallelizeFnProtocol", "PipelineInfo"),
    "penstock.auto.planning": ("generate_hf_model_fqn_per_model_part",),
    "penstock.checkpoint": ("CheckpointOptions",),
    "penstock.ir": (
        "Cluster",
        "Cuts",
        "DeviceSpeed",
        "Graph",
        "Link",
        "MessageCost",
        "Partition",
        "Plan",
        "Profile",
        "Program",
        "Ragged",
        "Replicas",
        "Rows",
        "Run",
        "Schedule",
        "StageCosts",
        "StateBytes",
        "StepMetrics",
        "Trace",
    ),
    "penstock.launch": ("launch",),
    "penstock.loss": ("add_loss", "added_losses"),
    "penstock.passes": ("lower", "verify"),
    "penstock.runtime": ("GradScaler", "Result", "RunOptions"),
}
_ERRORS = [name for name, value in globals().items() if getattr(value, "__module__", "") == "penstock.errors"]
__all__ = sorted([*_ERRORS, *(name for names in _HOMES.values() for name in names)])


class _Package(ModuleType):
    """Public names are loaded at first use: `penstock --help` needs no numpy, planning no torch."""

    def __getattr__(self, name: str) -> Any:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        value = vars(import_module(home))[name]
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a package such as `simulate` would put it in the place of the function of the same name.
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        # Ray and others serialise functions with the modules that they use; only plain modules go by name otherwise.
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted(("__version__", *__all__))


sys.modules[__name__].__class__ = _Package
