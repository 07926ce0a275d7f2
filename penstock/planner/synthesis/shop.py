"""Shop: a Problem as plain lists, which the inner loops read.

Microbatches are alike, so of any order there is one as good in which every stage takes them in turn: the k-th forward
of a stage is that of microbatch k, and so are its k-th input gradient and its k-th weight gradient (sorted rows keep
every inequality between them). An order of a rank is then a *word* of letters, each a stage and a kind of pass.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.ir import Kind
from penstock.planner.synthesis.problem import Problem

Word = list[int]
Words = list[Word]
"""one word per rank"""

F, B, I, W = (int(kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))  # noqa: E741


def letter(kind: int, stage: int) -> int:
    """The letter of a pass."""
    return stage << 2 | kind


class Message(NamedTuple):
    """What goes from a stage to another once it is made; `link` is -1 between stages of one rank."""

    target: int
    link: int
    seconds: float
    latency: float


@dataclass(frozen=True)
class Shop:
    """Seconds and bytes by letter, messages by stage, everything that waits counted."""

    problem: Problem
    seconds: tuple[float, ...]
    """by letter"""
    taken: tuple[float, ...]
    """bytes by letter; below 0 they are given back"""
    outputs: tuple[tuple[Message, ...], ...]
    """by stage, where its output goes"""
    gradients: tuple[tuple[Message, ...], ...]
    """by stage, where its input gradient goes"""
    num_links: int

    @classmethod
    def of(cls, problem: Problem) -> "Shop":
        """The lists of a problem."""
        costs = problem.costs
        kept, late = costs.activation_bytes, costs.weight_grad_bytes
        seconds = zip(costs.forward, costs.backward, costs.input_grad, costs.weight_grad, strict=True)
        taken = ((float(a), -float(a), float(w - a), -float(w)) for a, w in zip(kept, late, strict=True))
        links: dict[tuple[int, int], int] = {}
        outputs: list[list[Message]] = [[] for _ in kept]
        gradients: list[list[Message]] = [[] for _ in kept]
        for producer, consumer in problem.cuts.edges:
            outputs[producer].append(_message(problem, links, producer, consumer))
        for producer, consumer in problem.cuts.gradient_edges:
            gradients[consumer].append(_message(problem, links, consumer, producer))
        return cls(
            problem,
            tuple(float(each) for row in seconds for each in row),
            tuple(each for row in taken for each in row),
            tuple(map(tuple, outputs)),
            tuple(map(tuple, gradients)),
            len(links),
        )

    @cached_property
    def num_microbatches(self) -> int:
        """How many microbatches there are."""
        return self.problem.num_microbatches

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.problem.placement.num_ranks

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank."""
        return self.problem.placement.stages

    @cached_property
    def home(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return self.problem.placement.ranks

    @cached_property
    def room(self) -> tuple[float, ...]:
        """Bytes per rank that activations may take; inf without a limit."""
        return self.problem.room

    @cached_property
    def num_inputs(self) -> tuple[int, ...]:
        """How many outputs of other stages each stage reads."""
        return tuple(len(self.problem.cuts.producers(stage)) for stage in range(len(self.home)))

    @cached_property
    def num_returns(self) -> tuple[int, ...]:
        """How many input gradients of other stages each stage waits for."""
        return tuple(len(self.problem.cuts.gradient_consumers(stage)) for stage in range(len(self.home)))


def _message(problem: Problem, links: dict[tuple[int, int], int], source: int, target: int) -> Message:
    here, there = problem.placement[source], problem.placement[target]
    if here == there:
        return Message(target, -1, 0.0, 0.0)
    link = problem.cluster.link(here, there)
    size = problem.costs.message_bytes(np.array([source]), np.array([target]))[0]
    # As the simulator does it: times the seconds of a byte, so that both round alike.
    seconds = 0.0 if link.bandwidth is None else float(size * (1.0 / link.bandwidth))
    return Message(target, links.setdefault((here, there), len(links)), seconds, float(link.latency))
