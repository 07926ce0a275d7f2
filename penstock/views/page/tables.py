"""Tables: the stages, the candidates of the search, and the advice, as rows of text."""

from typing import NamedTuple

from penstock.ir import Candidate, Plan, bytes_text, count_text, counted, percent_text, seconds_text
from penstock.views.page.contents import Advice
from penstock.views.palette import STAGES
from penstock.views.parts import shown, weight

MAX_ROWS = 128
MAX_REASONS = 12
MAX_TEXT = 400


class StageRow(NamedTuple):
    """A stage, its cells, and which hue it has."""

    hue: int
    cells: tuple[str, ...]


STAGE_COLUMNS = ("stage", "rank", "nodes", "parameters", "forward", "backward", "activations", "sends", "first node")
CANDIDATE_COLUMNS = ("", "step", "bubble", "peak", "schedule", "stages", "microbatches", "cuts", "why not")


def stage_rows(plan: Plan) -> list[StageRow]:
    """As many as there is room for."""
    specs = {value.name: value.spec for value in plan.graph.parameters}
    sends = _sends(plan)
    rows = []
    for stage, names in enumerate(plan.partition.stages[:MAX_ROWS]):
        costs = plan.costs
        own = weight((plan.graph[name] for name in names), plan.graph, specs)
        again = ", recomputed" if plan.choices.recompute[stage] else ""
        cells = (
            str(stage),
            str(plan.schedule.placement[stage]),
            str(len(names)),
            f"{count_text(own.num_parameters)}, {bytes_text(own.bytes)}",
            seconds_text(costs.forward[stage], 3),
            seconds_text(costs.backward[stage], 3),
            bytes_text(costs.activation_bytes[stage]) + again,
            sends.get(stage, "nothing"),
            shown(names[0]),
        )
        rows.append(StageRow(stage % len(STAGES), cells))
    return rows


def _sends(plan: Plan) -> dict[int, str]:
    """Per stage what leaves it for one microbatch, and to which stages."""
    found: dict[int, list[str]] = {}
    for crossing in plan.partition.crossings(plan.graph):
        what = f"{counted(len(crossing.values), 'tensor')}, {bytes_text(crossing.forward_bytes)} → {crossing.consumer}"
        found.setdefault(crossing.producer, []).append(what)
    return {stage: "; ".join(texts[:4]) + ("; …" if len(texts) > 4 else "") for stage, texts in found.items()}


def candidate_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The plans that were looked at, the chosen one first."""
    return [_candidate(place, candidate) for place, candidate in enumerate(plan.search.candidates[:MAX_ROWS])]


def _candidate(place: int, candidate: Candidate) -> tuple[str, ...]:
    seen, chosen = candidate.predicted, candidate.choices
    return (
        str(place + 1),
        seconds_text(seen.makespan, 3),
        percent_text(seen.bubble),
        bytes_text(max(seen.peaks)),
        clipped(chosen.schedule),
        f"{len(chosen.recompute)} {chosen.placement}"
        + (f", {sum(chosen.recompute)} recomputed" if any(chosen.recompute) else ""),
        str(candidate.num_microbatches),
        clipped(chosen.partitioner),
        clipped(candidate.lost) or "chosen",
    )


def reasons(plan: Plan) -> list[str]:
    """Why the plan was chosen, a sentence each."""
    return [clipped(reason) for reason in plan.search.reasons[:MAX_REASONS]]


def advice_rows(advice: tuple[Advice, ...]) -> list[tuple[str, str, str, str]]:
    """The change, its gain, what a step would take, and what that rests on."""
    return [
        (clipped(each.change), f"−{percent_text(each.gain)}", seconds_text(each.seconds, 3), clipped(each.note))
        for each in advice
    ]


def clipped(text: str) -> str:
    """The text, cut off where it is very long."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
