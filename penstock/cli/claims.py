"""Claims: what is known of the schedules at F = I = W = 1 per rank, beside what the simulator finds."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from penstock.cli.runs import Run


class Claim(NamedTuple):
    """A figure of a schedule as a formula of P ranks and M microbatches, with two stages per rank if it has several."""

    schedule: str
    figure: str
    """a field of Summary"""
    formula: str
    value: Callable[[int, int], float]


def _bubble(seconds: Callable[[int], float]) -> Callable[[int, int], float]:
    """The share of a step that is idle when every rank works 3 M seconds and is idle for so many."""
    return lambda p, m: seconds(p) / (3 * m + seconds(p))


CLAIMS = (
    Claim("gpipe", "bubble", "(P-1)(F+B) idle", _bubble(lambda p: 3 * (p - 1))),
    Claim("gpipe", "in_flight", "M", lambda p, m: m),
    Claim("1f1b", "bubble", "(P-1)(F+B) idle", _bubble(lambda p: 3 * (p - 1))),
    Claim("1f1b", "in_flight", "min(M, P)", lambda p, m: min(m, p)),
    Claim("interleaved", "bubble", "(P-1)(F+B)/v idle", _bubble(lambda p: 3 * (p - 1) / 2)),
    Claim("interleaved", "in_flight", "P(1+(P-1)/(Pv))", lambda p, m: p + (p - 1) / 2),
    Claim("looped_bfs", "bubble", "(P-1)(F+B)/v idle", _bubble(lambda p: 3 * (p - 1) / 2)),
    Claim("looped_bfs", "in_flight", "M", lambda p, m: m),
    Claim("zb_h1", "bubble", "(P-1)(F+I-W) idle", _bubble(lambda p: p - 1)),
    Claim("zb_h1", "in_flight", "min(M, P)", lambda p, m: min(m, p)),
    Claim("zb_h2", "span_bubble", "0", lambda p, m: 0.0),
    Claim("zb_h2", "in_flight", "2P-1", lambda p, m: 2 * p - 1),
    Claim("interleaved_zb", "bubble", "(P-1)(F+I-W)/v idle", _bubble(lambda p: (p - 1) / 2)),
    Claim("interleaved_zb", "in_flight", "P", lambda p, m: p),
    Claim("zbv", "bubble", "(P-1)(F+I-W)/v idle", _bubble(lambda p: (p - 1) / 2)),
    Claim("zbv", "span_bubble", "0", lambda p, m: 0.0),
    Claim("zbv", "in_flight", "P", lambda p, m: p),
    Claim("v_half", "in_flight", "(P+2)//2", lambda p, m: (p + 2) // 2),
    Claim("v_min", "in_flight", "(P+4)//3", lambda p, m: (p + 4) // 3),
    Claim("dualpipe_v", "bubble", "(P-1)(F&B+B-3W)/v idle", _bubble(lambda p: p - 1)),
    Claim("dualpipe_v", "in_flight", "P+1/2", lambda p, m: p + 0.5),
)


class Finding(NamedTuple):
    """A claim and what the simulator says to it."""

    claim: Claim
    claimed: float
    simulated: float

    @property
    def agrees(self) -> bool:
        """Whether the two are the same figure, rounding aside."""
        return abs(self.claimed - self.simulated) < 1e-9

    def plain(self) -> dict[str, Any]:
        """What programs read of a finding."""
        names = {"schedule": self.claim.schedule, "figure": self.claim.figure, "formula": self.claim.formula}
        return {**names, "claimed": self.claimed, "simulated": self.simulated, "agrees": self.agrees}


def findings(runs: Iterable[Run]) -> list[Finding]:
    """Every claim about the schedules that were run."""
    figures = {run.name: (run, run.figures()) for run in runs}
    found = []
    for claim in CLAIMS:
        run, simulated = figures[claim.schedule]
        claimed = claim.value(run.schedule.num_ranks, run.schedule.num_microbatches)
        found.append(Finding(claim, float(claimed), float(simulated[claim.figure])))
    return found
