"""The door from stages to a Python file that shows and runs them."""

from pathlib import Path

from penstock.capture import Captured
from penstock.codegen import write_stages
from penstock.errors import CodeError
from penstock.ir import Partition, Placement, Plan
from penstock.stages import Ownership


def generate_code(captured: Captured, cut: Partition | Plan, path: str | Path) -> Path:
    """Write a Python file with one class per stage, in plain PyTorch and with the model's own names.

    `cut` is a Partition of the captured graph, each stage on a rank of its own, or a Plan. `run(model, ...)` of the
    file is called like the model and returns what it returns. Nothing is written if a part of the model cannot be.
    """
    if not isinstance(captured, Captured) or not isinstance(cut, Partition | Plan) or not isinstance(path, str | Path):
        raise CodeError(
            "generate_code takes a captured model and a partition or plan of it, and a path",
            given=(type(captured).__name__, type(cut).__name__, type(path).__name__),
            hint="generate_code(capture(model, args), plan, 'stages.py')",
        )
    if isinstance(cut, Partition):
        return write_stages(captured, cut, Placement.loop(cut.num_stages), path)
    partition = Ownership(cut.graph, cut.partition).fit(captured.graph)
    return write_stages(captured, partition, cut.schedule.placement, path)
