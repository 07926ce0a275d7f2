"""The weight of each microbatch's loss in the loss of the batch."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.capture import Captured, Microbatch, Recording
from penstock.errors import RunError
from penstock.ir import transform
from penstock.loss.counts import IGNORE_INDEX, REDUCTIONS, Count, Piece
from penstock.loss.decide import INSEPARABLE, Decision, Source, decide, evaluated_weights, holds
from penstock.loss.function import LossFunction
from penstock.loss.model import ModelLoss, couplings, loss_name, mixing_blocks
from penstock.loss.probe import COARSE, TOLERANCES, VALUE_FACTOR
from penstock.loss.samples import LARGE, sample_dims, take

LossFn = Callable[[Any, Any], Tensor]
_LABELS = Count("tokens", "", IGNORE_INDEX)
_NUM_NAMED = 3
_SMALLER = 0.75
_ROUNDING = 1e-6
_NUM_CODES = 1 << 20
"""few enough that the squares of their sums are exact in float64"""


class Replicas(Protocol):
    """The copies of the pipeline that train on other batches at the same time."""

    @property
    def count(self) -> int:
        """The number of replicas."""

    def sum(self, values: Tensor) -> Tensor:
        """The values summed over all replicas."""


@dataclass
class LossStep:
    """The microbatches of a step, without the stages; filled with their weights once these are known."""

    microbatches: Sequence[Microbatch]
    recordings: Sequence[Recording]
    """the recording of the model that holds for each microbatch"""
    is_training: bool
    weights: tuple[float, ...] | None = None
    """the factor of each microbatch's loss in the loss of the batch, once known"""
    loss_problem: str = ""
    """why the weights are not right"""


class LossWeights:
    """Finds the weights of the microbatches of every step, and warns if there are none that are right.

    The first step decides how they are found: by counting samples or labels, or by evaluating the loss in every step.
    What is counted is checked again, on few samples, in the 2nd, 4th, 8th ... step and whenever a label is smaller or
    larger than all before. A loss function may depend on anything in the user's program, such as the epoch: in every
    other step, too, its value for two microbatches together is compared with their own. A model that changes is
    recorded again, and the recording is decided on anew.
    """

    def __init__(
        self,
        captured: Captured,
        replicas: Replicas,
        loss_fn: LossFn | None = None,
        reduction: str | None = None,
        remote_parameters: Mapping[int, str] | None = None,
    ) -> None:
        """Without `loss_fn` the model returns its loss. `reduction` overrides the detection.

        `remote_parameters`: names of the parameters that are trained on other ranks, by their id.
        """
        if reduction is not None and reduction not in REDUCTIONS:
            raise RunError("unknown reduction", reduction=repr(reduction), hint='"mean", "tokens", "sum", or None')
        self.has_function = loss_fn is not None
        """whether the loss is that of a loss function, and not what the model returns"""
        self._captured, self._replicas, self._loss_fn = captured, replicas, loss_fn
        self._reduction, self._remote = reduction, remote_parameters or {}
        self._function = None if loss_fn is None else LossFunction(loss_fn, self._remote)
        self._decisions: dict[int, Decision] = {}
        """by the identity of the recording of a model that returns its loss; under 0 that of a loss function"""
        self._names: dict[int, tuple[Recording, str]] = {}
        self._couplings: dict[int, tuple[Recording, tuple[str, ...]]] = {}
        self._ranges: dict[tuple[int, str], tuple[int, int]] = {}
        self._num_steps = 0

    @property
    def reduction(self) -> str:
        """How the loss is averaged over samples; empty if that is not known yet."""
        found = next(iter(self._decisions.values()), None)
        if self._reduction is not None or found is None:
            return self._reduction or ""
        if found.problem == INSEPARABLE:
            return "none"
        return "evaluated in every step" if found.count is None else found.count.kind

    def loss_name(self, recording: Recording) -> str:
        """The name of the value that is the loss, for a model that returns its loss."""
        if id(recording) not in self._names:
            # The recording is kept alive, so that its id cannot be reused.
            self._names[id(recording)] = recording, loss_name(recording)
        return self._names[id(recording)][1]

    def loss(self, step: LossStep, microbatch: int, output: Any) -> Any:
        """The loss of a microbatch from the loss function; the first call of a step also finds the weights."""
        assert self._loss_fn is not None
        assert self._function is not None
        function, own = self._function, step.microbatches[microbatch]
        loss = self._loss_fn(output, own.target)
        if step.weights is None and not self._confirm(step, microbatch, output, loss):
            try:
                self._weigh(step, lambda microbatches: function.begin(microbatches, output, own.size), 0)
            finally:
                function.end()
        return loss

    def weights(self, step: LossStep) -> tuple[float, ...]:
        """The weight of every microbatch; with a loss function they are known once its first loss is."""
        if step.weights is None:
            recording = step.recordings[0]
            self.loss_name(recording)

            def source_of(microbatches: Sequence[Microbatch]) -> Source:
                return ModelLoss(self._captured, recording, microbatches, self._remote)

            self._weigh(step, source_of, id(recording))
        assert step.weights is not None
        return step.weights

    def warnings(self, step: LossStep) -> tuple[str, ...]:
        """Why the gradients of a step, or the loss of an evaluation, are not those of the whole batch."""
        found: dict[str, None] = {}
        for place, recording in enumerate(step.recordings if step.is_training else ()):
            if id(recording) not in self._couplings:
                self._couplings[id(recording)] = recording, self._find_couplings(step, place)
            found.update(dict.fromkeys(self._couplings[id(recording)][1]))
        return (*found, step.loss_problem) if step.loss_problem else tuple(found)

    def _find_couplings(self, step: LossStep, place: int) -> tuple[str, ...]:
        """Where samples act on each other inside the model, by the recording of one microbatch."""
        recording, microbatches = step.recordings[place], list(step.microbatches)
        # ModelLoss takes the recording to be that of the first microbatch.
        microbatches.insert(0, microbatches.pop(place))
        found = couplings(self._captured.model, recording)
        model = ModelLoss(self._captured, recording, microbatches, self._remote)
        mixing = mixing_blocks(model, with_outputs=self.has_function)
        if mixing:
            more = f" and {len(mixing) - _NUM_NAMED} more" if len(mixing) > _NUM_NAMED else ""
            where = ", ".join(mixing[:_NUM_NAMED]) + more
            found.append(f"a value depends on all samples of a batch, of which a microbatch has only some: {where}")
        return tuple(found)

    def _confirm(self, step: LossStep, microbatch: int, output: Any, loss: Any) -> bool:
        """Find the weights of an ordinary step at the cost of two calls of the loss function, without gradients.

        False if the step is not an ordinary one, or if the decision no longer holds.
        """
        known, number = self._decisions.get(0), self._num_steps + 1
        if known is None or known.count is None or known.problem or known.is_open or not step.is_training:
            return False
        assert self._function is not None
        is_power_of_two = not number & (number - 1)
        if is_power_of_two or len(step.microbatches) < 2 or self._replicas.count > 1 or not self._function.is_plain:
            return False
        pieces: list[Piece] = [({}, one.size) for one in step.microbatches]
        if known.rivals or known.count.kind == "tokens":
            pieces = [(self._function.tensors(one), one.size) for one in step.microbatches]
            if self._has_new_labels(0, pieces) or not all(one.applies_to(pieces[0][0]) for one in known.counts):
                return False
        weights, *others = [count.weights(pieces) for count in known.counts]
        # The other microbatch takes turns.
        other = (microbatch + 1 + number % (len(pieces) - 1)) % len(pieces)
        targets = step.microbatches[microbatch].target, step.microbatches[other].target
        if any(one != weights for one in others) or not self._agrees(known.count, targets, output, loss):
            return False
        self._num_steps, step.weights = number, weights
        return True

    def _agrees(self, count: Count, targets: tuple[Any, Any], output: Any, loss: Any) -> bool:
        """Whether the loss of two microbatches together is the weighted sum of their own.

        `output` and `loss` are those of the first; the second is given the same output, made smaller. False also if
        outputs or targets are not plain tensors whose first dimension is the batch.
        """
        first, second = targets
        if not all(isinstance(one, Tensor) and one.dim() for one in (output, first, second)) or first is second:
            return False
        assert self._loss_fn is not None
        assert self._function is not None
        # Few samples of large outputs: two microbatches at a time may not fit in memory.
        rows = min(len(output), max(1, LARGE * len(output) // max(1, output.numel())))
        try:
            with torch.no_grad():
                one, two = output[:rows], output[: min(rows, len(second))] * _SMALLER
                alone = loss if rows == len(first) else self._loss_fn(one, first[:rows])
                first, second = first[:rows], second[: len(two)]
                together = self._loss_fn(torch.cat([one, two]), torch.cat([first, second]))
                values = (alone, self._loss_fn(two, second), together)
        except Exception:  # a function may not take any number of samples
            return False
        numbers = [float(value.detach()) for value in values]
        weights = count.weights([({"target": first}, len(first)), ({"target": second}, len(second))])
        expected = sum(weight * number for weight, number in zip(weights, numbers, strict=False) if weight)
        dtype = max(self._function.dtype, output.dtype, loss.dtype, key=lambda one: torch.finfo(one).eps)
        tolerance = VALUE_FACTOR * TOLERANCES.get(dtype, COARSE)
        # NaN agrees with everything: steps that are not finite are dealt with elsewhere.
        return not abs(expected - numbers[2]) > tolerance * max(map(abs, numbers))

    def _weigh(self, step: LossStep, source_of: Callable[[Sequence[Microbatch]], Source], key: int) -> None:
        """Find the weights of a step."""
        self._num_steps += step.is_training
        microbatches, is_replicated = list(step.microbatches), self._replicas.count > 1
        if is_replicated:
            microbatches.append(_reference(microbatches[0]))
        source = source_of(microbatches)
        pieces = [(source.tensors(one), one.size) for one in microbatches]
        own = pieces[: len(step.microbatches)]
        if self._function is not None and self._remote and self._num_steps <= 1:
            self._function.refuse_remote_parameters()
        if self._reduction in ("mean", "sum") or len(pieces) == 1:
            count = Count("sum" if self._reduction == "sum" else "mean")
            decision, weights = Decision(count), count.weights(own)
        else:
            decision, weights = self._decided(source, pieces, key, step.is_training)
            if is_replicated and decision.problem:
                # The reference consists of ones, which may not be a valid target: decide without it.
                decision, weights = self._decided(source, own, key, step.is_training)
            self._decisions[key] = decision
            is_counted_otherwise = decision.count is not None and decision.count.kind != "tokens"
            if self._reduction == "tokens" and (decision.problem or is_counted_otherwise):
                decision, weights = Decision(_LABELS), _LABELS.weights(own)
        step.weights, step.loss_problem = weights, decision.problem
        if is_replicated:
            step.weights, step.loss_problem = self._among_replicas(decision, weights, own)

    def _decided(
        self, source: Source, pieces: Sequence[Piece], key: int, is_training: bool
    ) -> tuple[Decision, tuple[float, ...]]:
        """The known decision if it still holds, else a new one, and the weights that follow from it."""
        known, number = self._decisions.get(key), self._num_steps
        has_new_labels = self._has_new_labels(key, pieces)
        is_power_of_two = not number & (number - 1)
        if known is None or known.is_open or (known.problem and is_power_of_two):
            return decide(source, pieces, number)
        if known.count is None:
            weights = evaluated_weights(source, pieces, number)
            return decide(source, pieces, number) if weights is None else (known, weights)
        if not all(count.applies_to(pieces[0][0]) for count in known.counts):
            return decide(source, pieces, number)
        weights, *others = [count.weights(pieces) for count in known.counts]
        if known.problem:
            return known, weights
        is_due = has_new_labels or (is_training and (self.has_function or is_power_of_two))
        if any(other != weights for other in others) or (is_due and not holds(known.count, source, pieces, number)):
            return decide(source, pieces, number)
        return known, weights

    def _has_new_labels(self, key: int, pieces: Sequence[Piece]) -> bool:
        """Whether an integer is smaller or larger than all before in its tensor, as an ignored label is."""
        is_new = False
        for name, first in pieces[0][0].items():
            if not first.is_floating_point() and first.dtype != torch.bool and first.numel():
                ends = torch.stack([torch.stack(own[name].aminmax()) for own, _ in pieces])
                low, high = int(ends.min()), int(ends.max())
                before = self._ranges.get((key, name), (low, high))
                self._ranges[key, name] = min(low, before[0]), max(high, before[1])
                is_new |= self._ranges[key, name] != before
        return is_new

    def _among_replicas(
        self, decision: Decision, weights: Sequence[float], pieces: Sequence[Piece]
    ) -> tuple[tuple[float, ...], str]:
        """The weights among the microbatches of all replicas, and why they are not right.

        `weights` are those of the own microbatches and, unless it is an invalid target, of the reference microbatch.
        """
        num_replicas, num_own, count = self._replicas.count, len(pieces), decision.count
        has_reference = len(weights) > num_own and weights[-1] > 0
        # Only a divisor that adds up over microbatches, as a sum of class weights does, adds up over replicas.
        is_additive = has_reference and abs(sum(weights) - 1) <= _ROUNDING
        problem = decision.problem or ("" if count is not None or is_additive else INSEPARABLE)
        if problem or decision.is_open:
            shares = [float(size) for _, size in pieces]
        else:
            # The reference is the same on all replicas, so that shares relative to it can be added up.
            shares = [weight / weights[-1] for weight in weights[:num_own]] if is_additive else []
        totals = [] if count is None else count.totals(pieces)
        # What is counted, as a number, and how long samples are: replicas agree if n times the sum of squares is the
        # square of the sum.
        code = float(zlib.crc32(repr(count).encode()) % _NUM_CODES)
        entries = float(sum(tensor.numel() // pieces[0][1] for tensor in pieces[0][0].values()))
        values = [code, code**2, entries, entries**2, float(bool(shares)), sum(shares), sum(totals)]
        found = self._replicas.sum(torch.tensor(values, dtype=torch.float64)).tolist()
        codes, square_codes, lengths, square_lengths, num_shared, all_shares, total = found
        # The replicas average their gradients, so each one's weights are as many times larger.
        if count is not None and codes**2 == num_replicas * square_codes:
            if count.kind == "sum":
                return (1.0,) * num_own, problem
            return tuple(one / total * num_replicas if total else math.nan for one in totals), problem
        if num_shared == num_replicas and lengths**2 == num_replicas * square_lengths:
            return tuple(share / all_shares * num_replicas for share in shares), problem
        raise RunError(
            "the replicas disagree about how the loss is averaged",
            reduction=self.reduction,
            hint='reduction="mean", "tokens" or "sum"',
        )


def _reference(microbatch: Microbatch) -> Microbatch:
    """One sample that is the same on every replica: every label, mask, weight and value is 1."""

    def ones(leaf: object) -> object:
        return torch.ones_like(leaf) if isinstance(leaf, Tensor) else leaf

    given = (microbatch.args, microbatch.kwargs, microbatch.target)
    dims = sample_dims(given, microbatch.size)
    args, kwargs, target = transform(take(given, dims, microbatch.size, 0, 1), ones)
    return Microbatch(args, kwargs, target, 1)
