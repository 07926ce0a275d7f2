"""The weights of the microbatches of a step: by which reduction, and in which steps that is checked.

The formula of the weights is `Reduction.weights_of` in reduction_weights.py; detect_reduction.py finds the reduction.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batches import Microbatch, longest, with_columns_of
from penstock.capture import (
    ROUNDING,
    Captured,
    LruCache,
    Recording,
    coarsest,
    in_precision,
    is_inexact,
    is_integer,
    tensors_in,
)
from penstock.errors import RunError
from penstock.ir import choices_text, map_leaves
from penstock.loss.detect_reduction import INSEPARABLE, Decision, ProbedLoss, decide, evaluated_weights, reduction_fits
from penstock.loss.find_losses import SINGLE, loss_values, losses_of_function
from penstock.loss.interactions import interaction_warnings
from penstock.loss.loss_function import LossFn, LossFunction
from penstock.loss.probe import VALUE_FACTOR
from penstock.loss.reduction_weights import REDUCTIONS, Piece, Reduction
from penstock.loss.replicas import ReplicaGroup, reference_sample, weights_among_replicas
from penstock.loss.returned_loss import ModelLoss
from penstock.loss.samples import LARGE, join, repeat_positions, sample_dims

_FUNCTION = ""
"""the key of the decision about a loss function"""
_SECOND_SCALE = 0.75
"""the scale of the copied output that stands for the second microbatch, whose own is not computed yet"""
_MAX_COMPARISONS = 8
"""microbatches of the first step whose outputs are compared with those of the first one"""


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
    """why the weights are not exact"""


class _RealOutput(NamedTuple):
    """The output of the model for some samples, and their microbatch, of which only the target is used."""

    output: Any
    microbatch: Microbatch


class LossWeights:
    """Finds the weights of the microbatches of every step, and warns if no weights are exact.

    The first step decides how they are found: by counting samples or labels, or by evaluating the loss in every step.
    The reduction is checked again, on few samples, in the 2nd, 4th, 8th ... step and whenever a label is smaller or
    larger than all before. In these steps the losses of a loss function for some real outputs are compared, too. A loss
    function may depend on anything in the user's program, such as the epoch: in all other steps, too, its value for two
    microbatches together is compared with their separate values. If the model returns its loss, the decision holds for
    recordings of one structure, and is checked again for each of them; a model that changes is recorded again.

    One step, with the methods in the order of their calls:

        weigh                          once the first loss of the step is known
          _confirm                     with a loss function: the cheap check of an ordinary step
          _find_weights                if it fails, and for a loss that the model returns
            _decision                  the known decision if it still holds, else a new one (`decide`)
            weights_among_replicas     if other replicas train on other batches
        weigh                          once each further loss is known
          _check_real_outputs          with a loss function: whether the weights depend on the outputs
        warnings                       at the end of the step
    """

    def __init__(
        self,
        captured: Captured | None,
        replicas: ReplicaGroup,
        loss_fn: LossFn | None = None,
        reduction: str | None = None,
        remote_parameters: Mapping[int, str] | None = None,
        name: str = SINGLE,
    ) -> None:
        """Without `loss_fn` the model returns its loss. `reduction` overrides the detection.

        `captured` may be None, and steps may have no recordings, if there is a `loss_fn`: then only the check whether
        samples interact inside the model is omitted.

        `remote_parameters`: names of the parameters that are trained on other ranks, by their id. `name` is that of the
        loss, if there are several.
        """
        # A tuple, because a reduction of a wrong type may not be hashable.
        if reduction is not None and reduction not in tuple(REDUCTIONS):
            problem = f"reduction must be {choices_text((*REDUCTIONS, None))}"
            raise RunError(problem, got=repr(reduction), hint="reduction=None, which detects it")
        self.has_function = loss_fn is not None
        """whether a loss function computes the loss; else the model returns it"""
        self.checks_outputs = self.has_function
        """whether to warn about outputs that depend on all samples of a batch"""
        self._captured, self.replicas, self._loss_fn = captured, replicas, loss_fn
        self._reduction, self._remote, self._name = reduction, remote_parameters or {}, name
        self._function = None if loss_fn is None else LossFunction(loss_fn, self._remote, name)
        self._decisions: LruCache[str, Decision] = LruCache()
        """by the structure hash of the recording of a model that returns its loss; of a loss function by `_FUNCTION`"""
        self._checked: LruCache[Recording, None] = LruCache()
        """the recordings for which a decision was made or checked"""
        self._loss_values: LruCache[Recording, dict[str, str]] = LruCache()
        self._by_name: dict[str, LossWeights] = {}
        self._interactions: LruCache[Recording, tuple[str, ...]] = LruCache()
        """warnings about samples that interact inside the model"""
        self._ranges: LruCache[tuple[str, str], tuple[int, int]] = LruCache()
        """the smallest and largest integer so far, by the key of a decision and the name of a tensor"""
        self._num_steps = 0
        self._is_refuted = False
        """whether the values of two microbatches of this step have shown that the decision does not hold"""
        self._first_output: _RealOutput | None = None
        """that of the first microbatch whose loss was computed in this step, if others are compared with it"""
        self._num_comparisons = 0
        """with how many of the others"""

    @property
    def reduction(self) -> str:
        """How the loss is averaged over samples; empty if that is not known yet."""
        decision = next(self._decisions.values(), None)
        if self._reduction is not None or decision is None:
            return self._reduction or ""
        if decision.problem == INSEPARABLE:
            return "none"
        return "evaluated in every step" if decision.reduction is None else decision.reduction.name

    def by_name(self, name: str) -> "LossWeights":
        """The weights of one of several losses: each may be averaged over something else."""
        if name not in self._by_name:
            self._by_name[name] = LossWeights(
                self._captured, self.replicas, self._loss_fn, self._reduction, self._remote, name
            )
        return self._by_name[name]

    def loss_values(self, recording: Recording) -> dict[str, str]:
        """The values that are the losses of a model that returns them, by the names of the losses."""
        return self._loss_values.get_or_make(recording, lambda: loss_values(recording))

    def losses(self, output: Any, target: Any) -> dict[str, Any]:
        """The losses of the loss function, by name."""
        result = self._loss_fn(output, target)
        return {SINGLE: result} if isinstance(result, Tensor) else losses_of_function(result)

    def weigh(self, step: LossStep, microbatch: int, output: Any, loss: Any) -> None:
        """Find the weights of a step, given the output and the loss of one of its microbatches."""
        if step.weights is not None:
            if self._first_output is not None and not step.loss_problem:
                self._check_real_outputs(step, self._first_output, _real_output(output, step.microbatches[microbatch]))
                self._num_comparisons -= 1
                if not self._num_comparisons:
                    self._first_output = None
            return
        self._first_output = None
        if self._function is None:
            self.weights(step)
        elif not self._confirm(step, microbatch, output, loss):
            function, inputs = self._function, step.microbatches[microbatch]
            reference = step.microbatches[longest(step.microbatches)]
            if inputs.columns is not None and reference.columns is not None:
                output = repeat_positions(output, inputs.size, inputs.columns.length, reference.columns.length)
            try:
                function.begin(self._probed_microbatches(step), output, inputs.size)
                self._find_weights(step, function, _FUNCTION)
            finally:
                function.end()
            is_power_of_two = not self._num_steps & (self._num_steps - 1)
            is_due = is_power_of_two and (step.is_training or not self._num_steps)
            if is_due and len(step.microbatches) > 1 and self._reduction is None and function.is_plain:
                self._first_output = _real_output(output, inputs)
                self._num_comparisons = _MAX_COMPARISONS if self._num_steps <= 1 else 1

    def _check_real_outputs(self, step: LossStep, first: "_RealOutput", second: "_RealOutput | None") -> None:
        """Set the problem of a step if two microbatches together do not have the weighted sum of their losses.

        The artificial outputs, from which the reduction was found, are all derived from one microbatch. Weights that
        depend on signs or on the largest entries of outputs may be equal there and differ between real microbatches.
        """
        known = self._decisions.find(_FUNCTION)
        if known is None or known.reduction is None or known.problem or known.is_provisional or second is None:
            return
        pieces = [(self._function.tensors(each.microbatch), each.microbatch.size) for each in (first, second)]
        size = first.microbatch.size
        # The dimension that holds the samples has the same meaning in every microbatch.
        preferred = next((axis.dim for axis in first.microbatch.axes.values() if axis.dim is not None), 0)
        try:
            weights = known.reduction.weights(pieces)
            joined = join([first.output, second.output], sample_dims(first.output, size, preferred))
            both = _RealOutput(joined, Microbatch.join([first.microbatch, second.microbatch]))
            values, dtype = self._function.in_accepted_dtype(
                lambda dtype: ([self._value(each, dtype) for each in (first, second, both)], dtype),
                _num_entries(joined),
            )
            if dtype is None:
                dtype = coarsest([each.dtype for each in tensors_in(joined) if is_inexact(each)])
        except Exception:  # a function may not take any number of samples
            return
        losses = [weight * value for weight, value in zip(weights, values, strict=False) if weight]
        tolerance = VALUE_FACTOR * max(ROUNDING[dtype], ROUNDING[self._function.dtype])
        # Written so that NaN agrees with everything: the runtime handles steps with a loss of NaN.
        if abs(sum(losses) - values[2]) > tolerance * max(map(abs, values)):
            step.loss_problem = INSEPARABLE
            self._decisions.put(_FUNCTION, replace(known, problem=INSEPARABLE))

    def _value(self, part: "_RealOutput", dtype: torch.dtype | None) -> float:
        def converted(leaf: object) -> object:
            # A copy: the function may write into its arguments.
            return in_precision(leaf.detach(), dtype).clone() if isinstance(leaf, Tensor) else leaf

        output, target = map_leaves((part.output, part.microbatch.target), converted)
        with torch.no_grad():
            return float(self.losses(output, target)[self._name].detach())

    def weights(self, step: LossStep) -> tuple[float, ...]:
        """The weight of every microbatch; with a loss function they are known once its first loss is."""
        if step.weights is None:
            index = longest(step.microbatches)
            recording, microbatches = step.recordings[index], self._probed_microbatches(step)
            loss = ModelLoss(self._captured, recording, microbatches, self._remote, self._name, index)
            self._find_weights(step, loss, recording.structure_hash)
            mixed_inputs = loss.mixed_inputs
            if mixed_inputs is not None:
                # The evaluation has shown where samples interact: `warnings` need not run the model again.
                model = self._captured.model
                self._interactions.get_or_make(recording, lambda: interaction_warnings(model, recording, mixed_inputs))
        return step.weights

    def warnings(self, step: LossStep) -> tuple[str, ...]:
        """Why the gradients of a step, or the loss of an evaluation, are not those of the whole batch."""
        texts: dict[str, None] = {}
        # The only microbatch is the whole batch, whether or not its samples interact.
        is_split = len(step.microbatches) > 1 or self.replicas.count > 1
        for recording in dict.fromkeys(step.recordings if step.is_training and is_split else ()):
            found = self._interactions.find(recording)
            if found is None:
                index = step.recordings.index(recording)
                microbatches = with_columns_of(step.microbatches, index)
                loss = ModelLoss(self._captured, recording, microbatches, self._remote, recorded=index)
                mixed_inputs = loss.find_mixed_inputs(self.checks_outputs)
                found = interaction_warnings(self._captured.model, recording, mixed_inputs)
                self._interactions.put(recording, found)
            texts.update(dict.fromkeys(found))
        return (*texts, step.loss_problem) if step.loss_problem else tuple(texts)

    def _confirm(self, step: LossStep, microbatch: int, output: Any, loss: Any) -> bool:
        """Find the weights of an ordinary step at the cost of two calls of the loss function, without gradients.

        False if the step is not an ordinary one, or if the decision no longer holds.
        """
        known, number = self._decisions.find(_FUNCTION), self._num_steps + 1
        self._is_refuted = False
        is_power_of_two = not number & (number - 1)
        if not step.is_training or is_power_of_two or known is None:
            return False
        if known.reduction is None or known.problem or known.is_provisional:
            return False
        if len(step.microbatches) < 2 or self.replicas.count > 1 or not self._function.is_plain:
            return False
        pieces: list[Piece] = [({}, each.size) for each in step.microbatches]
        if known.alternatives or known.reduction.counts_entries:
            pieces = [(self._function.tensors(each), each.size) for each in step.microbatches]
            apply = all(each.applies_to(pieces[0][0]) for each in known.reductions)
            if self._has_new_labels(_FUNCTION, pieces) or not apply:
                return False
        weights, *others = [reduction.weights(pieces) for reduction in known.reductions]
        # Compare with another microbatch in every step.
        other = (microbatch + 1 + number % (len(pieces) - 1)) % len(pieces)
        microbatches = with_columns_of([step.microbatches[microbatch], step.microbatches[other]], 0)
        targets = microbatches[0].target, microbatches[1].target
        if any(map(math.isnan, weights)) or any(each != weights for each in others):
            return False
        agrees = self._values_agree(known.reduction, targets, output, loss)
        if not agrees:
            # A check of the reduction with two other microbatches may not notice the difference.
            self._is_refuted = agrees is False
            return False
        self._num_steps, step.weights = number, weights
        return True

    def _values_agree(
        self, reduction: Reduction, targets: tuple[Any, Any], output: Any, loss: Any, may_shorten: bool = True
    ) -> bool | None:
        """Whether the loss of two microbatches together is the weighted sum of their separate losses; None if unknown.

        `output` and `loss` are those of the first microbatch. The second has no output yet: a scaled copy of the first
        one is used. Of a sample with a large output, such as logits over a large vocabulary, only the first positions
        are used if `may_shorten`. None if outputs or targets are not plain tensors whose first dimension is the batch,
        or if the function does not take these samples.
        """
        first_target, second_target = targets
        tensors = (output, first_target, second_target)
        if not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in tensors) or first_target is second_target:
            return None
        whole = output
        # Few samples of large outputs: two microbatches at a time may not fit in memory.
        sample_size = max(1, output.numel() // len(output)) if len(output) else 1
        rows = min(len(output), max(1, LARGE // sample_size))
        has_positions = output.dim() > 2 and all(
            each.dim() > 1 and each.shape[1] == output.shape[1] for each in (first_target, second_target)
        )
        is_short = may_shorten and sample_size > LARGE and has_positions
        if is_short:
            # Two positions at least: a loss may compare each with the next.
            length = max(2, LARGE * output.shape[1] // sample_size)
            output, first_target, second_target = (each[:, :length] for each in (output, first_target, second_target))
        try:
            with torch.no_grad():
                first_output, second_output = output[:rows], output[: min(rows, len(second_target))] * _SECOND_SCALE
                alone = loss
                if is_short or rows != len(first_target):  # the loss that the step computed is that of all rows
                    alone = self.losses(first_output, first_target[:rows])[self._name]
                first_target, second_target = first_target[:rows], second_target[: len(second_output)]
                both_targets = torch.cat([first_target, second_target])
                together = self.losses(torch.cat([first_output, second_output]), both_targets)[self._name]
                values = (alone, self.losses(second_output, second_target)[self._name], together)
        except Exception:  # a function may not take any number of samples, or of positions
            return self._values_agree(reduction, targets, whole, loss, may_shorten=False) if is_short else None
        numbers = [float(value.detach()) for value in values]
        weights = reduction.weights([({"target": target}, len(target)) for target in (first_target, second_target)])
        expected = sum(weight * number for weight, number in zip(weights, numbers, strict=False) if weight)
        dtypes = (self._function.dtype, output.dtype, loss.dtype)
        tolerance = VALUE_FACTOR * max(ROUNDING[dtype] for dtype in dtypes)
        # Written so that NaN agrees with everything: the runtime handles steps with a loss of NaN.
        return not abs(expected - numbers[2]) > tolerance * max(map(abs, numbers))

    def _probed_microbatches(self, step: LossStep) -> list[Microbatch]:
        """The microbatches of a step, and among replicas a sample that is the same on all of them."""
        # With the columns of the longest microbatch all samples are complete, and can be joined.
        microbatches = list(with_columns_of(step.microbatches, longest(step.microbatches)))
        if self.replicas.count > 1:
            # Weights among the microbatches of one replica do not determine weights among all. A sample that is the
            # same on every replica does, because all weights can be expressed relative to its own.
            microbatches.append(reference_sample(microbatches[0]))
        return microbatches

    def _find_weights(self, step: LossStep, loss: ProbedLoss, key: str) -> None:
        """Find the weights of a step. `loss` has its probed microbatches, and `key` is that of the decision."""
        self._num_steps += step.is_training
        is_replicated = self.replicas.count > 1
        pieces = [(loss.tensors(microbatch), microbatch.size) for microbatch in loss.microbatches]
        own_pieces = pieces[: len(step.microbatches)]
        if self._function is not None and self._remote and self._num_steps <= 1:
            self._function.refuse_remote_parameters()
        given = None if self._reduction is None else REDUCTIONS[self._reduction]
        if len(pieces) == 1 or (given is not None and not given.counts_entries):
            # Of a single microbatch the samples are counted: its weight is 1, also without any label that counts.
            reduction = Reduction("mean") if given is None or given.counts_entries else given
            decision, weights = Decision(reduction), reduction.weights(own_pieces)
        else:
            # A loss function does not depend on the recording.
            recording = step.recordings[longest(step.microbatches)] if key != _FUNCTION else None
            is_new = recording is not None and recording not in self._checked
            decision, weights = self._decision(loss, pieces, key, step.is_training, is_new)
            if is_replicated and decision.problem:
                # The reference consists of ones, which may not be a valid target: decide without it.
                decision, weights = self._decision(loss, own_pieces, key, step.is_training, is_new)
            self._decisions.put(key, decision)
            if recording is not None:
                self._checked.put(recording, None)
            found = decision.reduction
            is_other = given is not None and found is not None and found.name != given.name
            if given is not None and (decision.problem or is_other):
                # The evaluation has not found which labels count: all labels are counted that torch does not ignore.
                decision, weights = Decision(given), given.weights(own_pieces)
        step.weights, step.loss_problem = weights, decision.problem
        if is_replicated:
            step.weights, step.loss_problem = weights_among_replicas(
                self.replicas, decision, weights, own_pieces, self.reduction
            )
        if all(map(math.isnan, step.weights)):
            # Nothing counts in the whole batch. A sum over a clamped count is 0 then, and a mean NaN, as in torch.
            step.weights = (1 / len(own_pieces),) * len(own_pieces)

    def _decision(
        self, loss: ProbedLoss, pieces: Sequence[Piece], key: str, is_training: bool, is_new: bool
    ) -> tuple[Decision, tuple[float, ...]]:
        """The known decision if it still holds, else a new one, and the weights that follow from it.

        `is_new`: the first step with this recording.
        """
        known, number = self._decisions.find(key), self._num_steps
        has_new_labels = self._has_new_labels(key, pieces)
        is_power_of_two = not number & (number - 1)
        if known is None or known.is_provisional or self._is_refuted or (known.problem and is_power_of_two):
            return decide(loss, pieces, number)
        if known.reduction is None:
            weights = evaluated_weights(loss, pieces, number)
            return decide(loss, pieces, number) if weights is None else (known, weights)
        if not all(reduction.applies_to(pieces[0][0]) for reduction in known.reductions):
            return decide(loss, pieces, number)
        weights, *others = [reduction.weights(pieces) for reduction in known.reductions]
        if known.problem:
            return known, weights
        is_due = is_new or has_new_labels or (is_training and (self.has_function or is_power_of_two))
        # Once the reductions that fitted so far give different weights, a decision can distinguish them.
        if any(other != weights for other in others) or (
            is_due and not reduction_fits(known.reduction, loss, pieces, number)
        ):
            return decide(loss, pieces, number)
        return known, weights

    def _has_new_labels(self, key: str, pieces: Sequence[Piece]) -> bool:
        """Whether an integer is smaller or larger than all before in its tensor, as an ignored label is."""
        is_new = False
        for name, first in pieces[0][0].items():
            if is_integer(first) and first.numel():
                ends = torch.stack([torch.stack(tensors[name].aminmax()) for tensors, _ in pieces])
                low, high = torch.stack(ends.aminmax()).tolist()
                before = self._ranges.find((key, name)) or (low, high)
                now = min(low, before[0]), max(high, before[1])
                self._ranges.put((key, name), now)
                is_new |= now != before
        return is_new


def _num_entries(output: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(output))


def _real_output(output: Any, microbatch: Microbatch) -> _RealOutput | None:
    """The output of a microbatch, of large ones of some samples and positions; None if it cannot be shortened."""
    microbatch = microbatch._replace(args=(), kwargs={}, names=())
    num_entries, target = _num_entries(output), microbatch.target
    if microbatch.columns is not None:
        return None  # the padding of microbatches differs
    if num_entries <= LARGE:
        return _RealOutput(
            map_leaves(output, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf), microbatch
        )
    is_plain = isinstance(output, Tensor) and isinstance(target, Tensor) and output.dim() > 1 and target.dim() > 0
    if not is_plain or not len(output) == len(target) == microbatch.size:
        return None
    length = output.shape[1]
    rows = max(1, LARGE * len(output) // num_entries)
    if output.dim() > 2 and target.dim() > 1 and target.shape[1] == length:
        # Two positions at least: a loss may compare each with the next.
        length = max(2, min(length, LARGE * len(output) * length // (num_entries * rows)))
        target = target[:, :length]
    # A copy, because a view would keep the whole output in memory.
    shortened = output.detach()[:rows, :length].clone()
    return _RealOutput(shortened, microbatch._replace(target=target[:rows], size=rows))
