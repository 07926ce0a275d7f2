"""Decisions: cuts that would separate what the model decides from what it decides by."""

from typing import Any

from penstock.errors import PartitionError
from penstock.ir import Guard, Partition, refs, states


def check_guards(recording: Any, partition: Partition) -> None:
    """Refuse a cut after which no stage has all that the model looks at for one decision."""
    if partition.num_stages > 1:
        _check_state(recording)
    runs = [recording.available_values(node.name for node in nodes) for nodes in partition.runs(recording.graph)]
    for step in recording.record.steps:
        if isinstance(step, Guard):
            reads = {*refs(step.args), *refs(step.kwargs)}
            if not any(reads <= here for here in runs):
                raise PartitionError(
                    "the model decides by values of several stages",
                    module=step.scope or "the model",
                    read_by=step.name,
                    values=sorted(reads),
                    hint="cut elsewhere",
                )


def _check_state(recording: Any) -> None:
    """Every stage must decide alike before it runs, and only one knows what was written in the last forward."""
    for step in recording.record.steps:
        if isinstance(step, Guard):
            written = {*states(step.args), *states(step.kwargs)} & recording.graph.updated.keys()
            if written:
                raise PartitionError(
                    "the model decides by a buffer that it writes, which only one stage would know",
                    module=step.scope or "the model",
                    read_by=step.name,
                    buffers=sorted(written),
                    hint="keep the module that decides whole (basic_blocks)",
                )
