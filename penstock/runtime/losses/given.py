"""Given: the rule that the user asks for, or that a trial bears out, in place of the one that was read."""

from torch import Tensor

from penstock.capture import Microbatch, Recording
from penstock.errors import RunError
from penstock.ir import Count, LossRule, assumed, named_leaves
from penstock.runtime.losses.reading import Counter
from penstock.runtime.weights import count_labels

REDUCTIONS = ("mean", "tokens", "sum")


def check_reduction(reduction: object) -> None:
    """Refuse what no reduction is called."""
    if reduction is not None and reduction not in REDUCTIONS:
        raise RunError("unknown reduction", reduction=repr(reduction), hint='"mean", "tokens", "sum", or None')


def given_rule(reduction: str, rule: LossRule, counter: Counter) -> tuple[LossRule, Counter]:
    """The rule of a reduction, in place of one that was read.

    For "tokens" without a count of its own, labels are the tensors of the target, or of the inputs named `labels`, and
    -100 is ignored.
    """
    check_reduction(reduction)
    if reduction != "tokens":
        return assumed(reduction), _samples  # type: ignore[arg-type]
    if rule.kind == "tokens":
        return rule, counter
    return assumed("tokens", count=Count("target")), _labels


def _samples(microbatch: Microbatch, recording: Recording | None = None) -> tuple[float, ...]:
    return (float(microbatch.size),)


def _labels(microbatch: Microbatch, recording: Recording | None = None) -> tuple[float, ...]:
    labels = microbatch.kwargs.get("labels") if microbatch.target is None else microbatch.target
    tensors = [
        leaf for _, leaf in named_leaves(labels, "") if isinstance(leaf, Tensor) and not leaf.is_floating_point()
    ]
    if not tensors:
        raise RunError(
            'reduction="tokens" finds no labels to count',
            hint="give class indices as target= or labels=, or another reduction",
        )
    return (sum(count_labels(tensor, -100) for tensor in tensors),)
