"""Parity: one step of a plan beside the unsplit model, for a model that a command names."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cli.builds import HF, built, source_of, told
from penstock.cli.options import Example
from penstock.errors import CaptureError, FormatError, RunError

if TYPE_CHECKING:
    from penstock.ir import Comparison
    from penstock.runtime import ParityReport


def parity(noun: Any, model: str, example: Example) -> "ParityReport":
    """What `penstock.check` finds; a model that returns no loss is given one: the mean of its squared outputs."""
    import penstock
    from penstock.ir import Plan

    if not isinstance(noun, Plan):
        hint = f"penstock plan {model} --schedule FILE.csv --out plan.json, then check plan.json"
        raise FormatError("only a plan says how a model is cut", noun=type(noun).__name__, hint=hint)
    if model.startswith(HF):
        example = replace(example, weights=True)  # numbers can be compared only where there are some
    problem = "the model failed on the batch"
    with built(model, example) as (module, args, kwargs), told(problem, source_of(model), CaptureError):
        try:
            return penstock.check(module, noun, args, kwargs)
        except RunError as error:
            if error.problem != "the model returned no loss":
                raise
        return penstock.check(module, noun, args, kwargs, loss_fn=_mean_square)


def parity_plain(report: "ParityReport") -> dict[str, Any]:
    """What programs read of a report."""
    parts = {"microbatches": report.loop, "whole_batch": report.whole}
    compared = {name: _plain(part) for name, part in parts.items() if part is not None}
    return {"equal": report.ok, **compared, "notes": list(report.notes)}


def _plain(part: "Comparison") -> dict[str, Any]:
    worst = part.largest
    found = {"name": worst.name, "stage": worst.stage, "relative": str(worst.relative), "limit": worst.tolerance}
    return {"equal": part.ok, "identical": part.is_identical, "compared": len(part.differences), "largest": found}


def _mean_square(output: Any, target: Any) -> Any:
    from torch import Tensor

    from penstock.ir import leaves

    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum(tensor.float().square().mean() for tensor in tensors)
