"""Ribbon: the model from its first node to its last, in the colours of its stages and as wide as they cost."""

from typing import NamedTuple

from penstock.ir import Plan, counted, percent_text, seconds_text
from penstock.views.flow import Flow
from penstock.views.page.theme import dark
from penstock.views.palette import STAGES, text_on
from penstock.views.parts import Part

LEAST_WIDTH = 0.4
"""per cent of the ribbon that a stage has in any case, so that it can be seen"""
MAX_PARTS = 400
GLUE = 0.12
"""how wide functions between blocks are, beside a block"""


class Segment(NamedTuple):
    """A block of a stage; `width` is its share of the stage in per cent."""

    title: str
    kind: str
    width: float


class Band(NamedTuple):
    """A stage; `width` is its share of the ribbon in per cent."""

    stage: int
    rank: int
    width: float
    share: str
    tip: str
    segments: tuple[Segment, ...]

    @property
    def hue(self) -> int:
        """Which of the hues of stages it has."""
        return self.stage % len(STAGES)


def ribbon(plan: Plan) -> tuple[Band, ...]:
    """A band per stage; blocks of one stage are equally wide, as a plan holds what its stages cost, not its nodes."""
    flow = Flow.of((plan.graph, plan.partition), 0 if len(plan.graph.nodes) <= MAX_PARTS else 2)
    parts = [part for part in flow.parts if not part.is_free]
    by_stage: list[list[Part]] = [[] for _ in range(plan.num_stages)]
    for part in parts:
        by_stage[part.stage].append(part)
    costs = [forward + backward for forward, backward in zip(plan.costs.forward, plan.costs.backward, strict=True)]
    total = sum(costs) or 1.0
    widths = [max(LEAST_WIDTH, 100 * cost / total) for cost in costs]
    is_whole = len(parts) <= MAX_PARTS
    return tuple(
        Band(
            stage,
            plan.schedule.placement[stage],
            100 * widths[stage] / sum(widths),
            percent_text(costs[stage] / total),
            _tip(plan, stage, costs[stage]),
            _segments(by_stage[stage]) if is_whole else (),
        )
        for stage in range(plan.num_stages)
    )


def _segments(parts: list[Part]) -> tuple[Segment, ...]:
    shares = [GLUE if part.is_glue else float(part.times) for part in parts]
    return tuple(
        Segment(part.title, part.kind, 100 * share / sum(shares)) for part, share in zip(parts, shares, strict=True)
    )


def _tip(plan: Plan, stage: int, seconds: float) -> str:
    nodes = counted(len(plan.partition.stages[stage]), "node")
    rank = plan.schedule.placement[stage]
    return f"stage {stage} on rank {rank}: {nodes}, {seconds_text(seconds, 3)} per microbatch"


def hues() -> list[tuple[str, str, str, str]]:
    """Every hue of stages on light and on dark paper, each with the text that is read on it."""
    return [(hue, text_on(hue), dark(hue), text_on(dark(hue))) for hue in STAGES]
