"""Decisions: cuts that would separate what the model decides from what it decides by."""

from typing import Any

from penstock.errors import PartitionError
from penstock.ir.partition import Partition
from penstock.ir.record import Guard, refs


def check_guards(recording: Any, partition: Partition) -> None:
    """Refuse a cut after which no stage has all that the model looks at for one decision."""
    runs = [recording.at_hand(node.name for node in nodes) for nodes in partition.runs(recording.graph)]
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
