"""capture, split, explain and generate_code: a model, its graph and its stages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from penstock.capture import Captured, Granularity
from penstock.capture import capture as record_model
from penstock.codegen import write_stages
from penstock.errors import CodeError, PartitionError
from penstock.ir import Graph, Partition, Placement, Plan
from penstock.stages import Ownership, Stage
from penstock.stages import check as check_stages
from penstock.stages import split as split_captured
from penstock.views import Cuts as CutsView


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    depth: int | None = None,
    basic_blocks: Sequence[str | type] = (),
) -> Captured:
    """Record the model's forward on one example batch. The model is left exactly as it was.

    By default blocks, the elements of the outermost module lists, stay whole.

    Args:
        model: any module
        args: the positional arguments of the batch
        kwargs: its keyword arguments
        depth: open modules this many levels deep; None: down to the blocks
        basic_blocks: modules that always stay whole, by name or class

    Returns:
        The captured model; its `graph` is the Graph.

    Raises:
        CaptureError: if the model cannot be recorded; it names the module and the reason
    """
    return record_model(model, args, kwargs, Granularity(depth, basic_blocks))


def split(captured: Captured, partition: Partition, *, check: bool = True) -> tuple[Stage, ...]:
    """Cut a captured model into the stages of a partition.

    Args:
        captured: the model, from `capture`
        partition: the nodes of every stage
        check: whether the stages are first compared with the unsplit model on the example

    Returns:
        The stages, as modules.

    Raises:
        PartitionError: if the graph cannot be cut like this
        CaptureError: if the stages do not reproduce the model
    """
    if not isinstance(captured, Captured) or not isinstance(partition, Partition):
        raise PartitionError(
            "split needs a captured model and a partition of its graph",
            got=(type(captured).__name__, type(partition).__name__),
            hint="split(captured, penstock.partitioners.uniform(captured.graph, 4))",
        )
    stages = split_captured(captured, partition)
    if check:
        check_stages(captured, partition)
    return stages


def explain(captured: Captured | Graph, partition: Partition) -> str:
    """List every tensor that crosses a cut with its bytes, and the calls that are repeated instead of being sent.

    Args:
        captured: a captured model or its graph
        partition: the nodes of every stage

    Returns:
        A text, a line per tensor.

    Raises:
        PartitionError: if the graph cannot be cut like this
    """
    graph = captured if isinstance(captured, Graph) else captured.graph
    return CutsView()((graph, partition))


def generate_code(captured: Captured, cut: Partition | Plan, path: str | Path) -> Path:
    """Write a Python file with one class per stage, in plain PyTorch and with the model's own names.

    `run(model, ...)` in the file is called like the model and returns the same.

    Args:
        captured: the model, from `capture`
        cut: a Partition of the captured graph, with one rank per stage, or a Plan
        path: the file to write

    Returns:
        The path.

    Raises:
        CodeError: if a part of the model cannot be expressed; nothing is written then
    """
    if not isinstance(captured, Captured) or not isinstance(cut, Partition | Plan) or not isinstance(path, str | Path):
        raise CodeError(
            "generate_code needs a captured model, a partition or plan of it, and a path",
            got=(type(captured).__name__, type(cut).__name__, type(path).__name__),
            hint="generate_code(capture(model, args), plan, 'stages.py')",
        )
    if isinstance(cut, Partition):
        return write_stages(captured, cut, Placement.loop(cut.num_stages), path)
    partition = Ownership(cut.graph, cut.partition).fit(captured.graph)
    return write_stages(captured, partition, cut.schedule.placement, path)
