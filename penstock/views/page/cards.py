"""Cards: the figures of a plan and its run that one wants to see first."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.ir import Run, bytes_text, counted, number_text, percent_text, seconds_text
from penstock.views.page.contents import Contents

_FULL = 1.0
_NEAR = 0.9
_CLOSE, _FAR = 0.1, 0.3
"""a measured step this share off the predicted one is well predicted, or badly"""


class Card(NamedTuple):
    """One figure, what it is, and what to compare it with; `tone` is good, fair, bad or empty."""

    name: str
    value: str
    note: str = ""
    tone: str = ""
    share: float | None = None
    """of what there is, drawn as a bar"""


def cards(contents: Contents) -> list[Card]:
    """Those whose figures are known."""
    run = contents.run
    found = [_predicted(contents), *(_measured(contents, run) if run else ()), _bubble(contents), _bound(contents)]
    return [*found, _memory(contents), *(_training(run) if run else ())]


def _predicted(contents: Contents) -> Card:
    costs = contents.plan.costs
    one_pass = sum(costs.forward) + sum(costs.backward)
    alone = contents.plan.num_microbatches * one_pass
    seen = contents.plan.predicted.makespan
    faster = f"{number_text(alone / seen, 3)} × as fast as one rank" if seen and contents.plan.num_ranks > 1 else ""
    return Card("predicted step", seconds_text(seen, 3), faster)


def _measured(contents: Contents, run: Run) -> Iterator[Card]:
    whole, predicted = run.step_seconds, contents.plan.predicted.makespan
    if whole is None:
        return
    # A plan predicts the passes; the optimizer and the reading of data come on top.
    seconds = run.trace.makespan if run.trace is not None else whole
    median = f"median of {counted(max(1, len(run.steps) - 1), 'step')}"
    note, tone = median if run.trace is None else f"with the optimizer {seconds_text(whole, 3)}, {median}", ""
    if predicted:
        ratio = seconds / predicted
        off = abs(ratio - 1)
        tone = "good" if off <= _CLOSE else "fair" if off <= _FAR else "bad"
        note = f"{number_text(ratio, 3)} × the prediction, {note}"
    yield Card("measured step", seconds_text(seconds, 3), note, tone)
    samples = run.steps[-1].samples
    if samples and whole:
        yield Card("throughput", f"{number_text(samples / whole, 3)} /s", f"samples, {samples} in a step")


def _bubble(contents: Contents) -> Card:
    measured = contents.traces.get("measured")
    note = f"measured {percent_text(measured.bubble)}" if measured else "share of all ranks' time without compute"
    return Card("bubble", percent_text(contents.plan.predicted.bubble), note)


def _bound(contents: Contents) -> Card:
    seen = contents.plan.predicted
    above = seen.makespan / seen.lower_bound - 1 if seen.lower_bound else 0.0
    note = f"no order of these stages takes less than {seconds_text(seen.lower_bound, 3)}"
    return Card("above the proven bound", percent_text(above), note, "good" if above <= _CLOSE else "")


def _memory(contents: Contents) -> Card:
    run, limits = contents.run, contents.plan.cluster.limits
    peaks = run.peaks if run and run.peaks else contents.plan.predicted.peaks
    word = "measured" if run and run.peaks else "predicted"
    if not limits:
        rank = peaks.index(max(peaks))
        return Card("peak memory", bytes_text(peaks[rank]), f"{word}, rank {rank}; no limit was given")
    shares = [peak / limit for peak, limit in zip(peaks, limits, strict=True)]
    rank = shares.index(max(shares))
    tone = "bad" if shares[rank] > _FULL else "fair" if shares[rank] > _NEAR else "good"
    note = f"of {bytes_text(limits[rank])}, {word}, rank {rank}"
    return Card("peak memory", bytes_text(peaks[rank]), note, tone, min(shares[rank], 1.0))


def _training(run: Run) -> Iterator[Card]:
    if losses := run.losses:
        lost = len(run.steps) - len(losses)
        note = f"{counted(len(run.steps), 'step')}" + (f", {lost} without a finite loss" if lost else "")
        tone = "bad" if lost else "good" if losses[-1] < losses[0] else "fair"
        yield Card("loss", f"{number_text(losses[0], 3)} → {number_text(losses[-1], 3)}", note, tone)
    if run.largest_difference is not None:
        shown = f"{run.largest_difference:.1e}".replace("e-0", "e-") if run.largest_difference else "0"
        yield Card("largest difference", shown, "relative, to the unsplit model")
