"""assess: how good a given partition is, and what moving one of its cuts by one node would cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Partition
from penstock.partitioners.atoms.uses import Ints
from penstock.partitioners.base import Division, Problem
from penstock.partitioners.search.judge import Judged
from penstock.partitioners.search.moves import windows
from penstock.partitioners.search.outcome import division


@dataclass(frozen=True)
class Move:
    """A node handed to a neighbouring stage, with all that must stay together with it, and what that would give."""

    node: str
    source: int
    target: int
    bottleneck_seconds: float
    cut_bytes: int
    is_fitting: bool
    """whether every rank keeps its limit of memory"""


def assess(problem: Problem, partition: Partition, why: str = "given") -> Division:
    """The loads of a partition that somebody else made; refused like one of our own if it does not fit."""
    found = division(problem, _stages(problem, partition), why, seeks_room=False)
    return replace(found, partition=partition)


def moves(problem: Problem, partition: Partition) -> tuple[Move, ...]:
    """For every two neighbouring stages the node that had best move on, and the one that had best move back."""
    judged = Judged(problem, problem.atoms, _stages(problem, partition))
    found: dict[tuple[int, int], Move] = {}
    for atom, target in _steps(judged):
        stage = judged.stage.copy()
        stage[atom] = target
        after = replace(judged, stage=stage)
        node = problem.graph.nodes[problem.atoms.nodes[atom][0]].name
        is_fitting = after.score.excess == 0
        move = Move(node, int(judged.stage[atom]), target, after.score.busiest, round(after.cut_bytes), is_fitting)
        key = (move.source, target)
        found[key] = min(found.get(key, move), move, key=_worth)
    return tuple(found[key] for key in sorted(found))


def _worth(move: Move) -> tuple[bool, float, int]:
    return not move.is_fitting, move.bottleneck_seconds, move.cut_bytes


def _steps(judged: Judged) -> Iterator[tuple[int, int]]:
    """The atoms that may go to a neighbouring stage, where they leave others behind."""
    first, last = windows(judged.atoms, judged.stage, judged.num_stages)
    sizes = np.bincount(judged.stage, minlength=judged.num_stages)
    for atom, stage in enumerate(judged.stage.tolist()):
        if sizes[stage] > 1:
            yield from ((atom, target) for target in (stage - 1, stage + 1) if first[atom] <= target <= last[atom])


def _stages(problem: Problem, partition: Partition) -> Ints:
    """The stage of every atom."""
    partition.check(problem.graph)
    if partition.num_stages != problem.num_stages:
        raise PartitionError(
            "the partition has another number of stages", partition=partition.num_stages, problem=problem.num_stages
        )
    names = [node.name for node in problem.graph.nodes]
    stages = [sorted({partition.stage_of(names[place]) for place in nodes}) for nodes in problem.atoms.nodes]
    for nodes, found in zip(problem.atoms.nodes, stages, strict=True):
        if len(found) > 1:
            raise PartitionError(
                "a cut between nodes that must stay together", nodes=[names[place] for place in nodes][:4], stages=found
            )
    return np.array([found[0] for found in stages])
