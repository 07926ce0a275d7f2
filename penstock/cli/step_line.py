"""A training step in one line, for people and for programs."""

from typing import TYPE_CHECKING, Any

from penstock.ir import bytes_text, seconds_text

if TYPE_CHECKING:
    from penstock.api.loop import StepReport


def step_line(report: "StepReport", predicted_seconds: float) -> str:
    """Loss, gradient norm, time against prediction, throughput, slowest stage, memory, and what is left."""
    figures = report.figures
    number = f"{figures.step + 1}/{report.of}" if report.of else str(figures.step + 1)
    rate = f"{_rate(report):,.0f} {'tokens' if report.tokens else 'samples'}/s"
    parts = [
        f"step {number}",
        f"loss {number_text(figures.loss)}",
        f"norm {number_text(figures.grad_norm)}",
        f"{seconds_text(figures.seconds)} (pipeline {report.pipeline_seconds / predicted_seconds:.2f} of predicted)",
        rate,
        f"slowest stage {report.slowest[0]} ({seconds_text(report.slowest[1])})",
        f"memory {bytes_text(report.memory)}",
    ]
    if report.skipped:
        parts.append(f"SKIPPED: {report.skipped}")
    if report.eta_seconds is not None:
        parts.append(f"eta {_clock(report.eta_seconds)}")
    return "  ".join(parts)


def step_plain(report: "StepReport", predicted_seconds: float) -> dict[str, Any]:
    """The same as values."""
    figures = report.figures
    return {
        "step": figures.step,
        "steps": report.of,
        "loss": figures.loss,
        "grad_norm": figures.grad_norm,
        "seconds": figures.seconds,
        "pipeline_seconds": report.pipeline_seconds,
        "predicted_seconds": predicted_seconds,
        "samples": figures.samples,
        "tokens": report.tokens,
        "slowest_stage": report.slowest[0],
        "slowest_stage_seconds": report.slowest[1],
        "memory_bytes": report.memory,
        "eta_seconds": report.eta_seconds,
        "skipped": report.skipped,
        "remarks": list(report.remarks),
    }


def _rate(report: "StepReport") -> float:
    return (report.tokens or report.figures.samples) / max(report.figures.seconds, 1e-9)


def number_text(value: float | None) -> str:
    """A loss or a norm, as short as people read it."""
    return "not finite" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
