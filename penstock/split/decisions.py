"""Decisions: cuts that would separate what the model decides or remembers from where it does so."""

from typing import Any

from penstock.errors import PartitionError
from penstock.ir.partition import Partition
from penstock.ir.record import Guard, refs


def check_state(recording: Any, partition: Partition) -> None:
    """Refuse to use a buffer that the forward writes in more than one stage: each would have its own."""
    for name in sorted(recording.written_state):
        users = [node.name for node in recording.graph.nodes if name in node.buffers]
        stages = sorted({partition.stage_of(user) for user in users})
        if len(stages) > 1:
            raise PartitionError(
                "a buffer that the forward writes is used in several stages",
                buffer=name,
                stages=stages,
                nodes=users[:4],
            )


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
