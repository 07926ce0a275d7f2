"""The doors from a model to its stages: capture, split, explain."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from penstock.capture import Captured
from penstock.capture import capture as record_model
from penstock.errors import CaptureError, PartitionError
from penstock.ir import Graph, Partition
from penstock.stages import Stage
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
    """Record the model's forward on one example batch; `.graph` is its Graph. The model is left exactly as it was.

    By default blocks, the elements of the outermost lists of modules, stay whole. `depth` opens modules so many levels
    down; `basic_blocks`, names or classes, stay whole wherever they are.
    """
    if isinstance(basic_blocks, str):
        raise CaptureError("basic_blocks is a list of names or classes", given=repr(basic_blocks))
    return record_model(model, args, kwargs, depth=depth, basic_blocks=basic_blocks)


def split(captured: Captured, partition: Partition, *, check: bool = True) -> tuple[Stage, ...]:
    """The stages of a partition. Unless switched off, they are first run against the unsplit model on the example."""
    _check_kinds(captured, partition)
    stages = split_captured(captured, partition)
    if check:
        check_stages(captured, partition)
    return stages


def _check_kinds(captured: object, partition: object) -> None:
    if not isinstance(captured, Captured) or not isinstance(partition, Partition):
        raise PartitionError(
            "split takes a captured model and a partition of its graph",
            given=(type(captured).__name__, type(partition).__name__),
            hint="split(capture(model, args), uniform(captured.graph, 4)), uniform being of penstock.partitioners",
        )


def explain(captured: Captured | Graph, partition: Partition) -> str:
    """What crosses every cut, tensor by tensor with its bytes, and what is run again instead of being sent."""
    graph = captured if isinstance(captured, Graph) else captured.graph
    return CutsView()((graph, partition))
