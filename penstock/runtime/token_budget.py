"""Groups the samples of a batch by length into microbatches of at most N padded tokens, with `budget_tokens=N`."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.batches import Batch, BatchSplitter, Microbatch, Padding, find_padding
from penstock.capture import ROUNDING, Recording
from penstock.errors import RunError
from penstock.ir import Plan
from penstock.planner import TokenGroup, TokenPlanner, balance, group_samples

_LOSS_TOLERANCE = 0.2
"""largest difference between losses with and without padding, as a share of the tolerance for rounding in other checks:
here only the order of sums differs"""
_NUM_COMPARED = 4
"""samples whose loss is compared with and without padding"""
_NUM_MEASURED = 4
"""the first steps, all of which are timed; after them, only those that follow 4, 8, 16 ... steps"""


class TokenBudget:
    """The groups of the batches of an Engine, with costs per length that are measured in some of its steps."""

    def __init__(self, plan: Plan, splitter: BatchSplitter) -> None:
        self._plan, self._splitter = plan, splitter
        self._planner: TokenPlanner | None = None
        self._padding: tuple[Batch, Padding] | None = None
        """of the batch of the current step, until it is split"""
        self.checked: set[tuple[object, ...]] = set()
        """the kinds of padding for which cutting it off has been found to keep the loss"""
        self._num_steps = 0

    def padding(self, batch: Batch) -> Padding:
        """The lengths of the samples of a batch."""
        if self._padding is None or self._padding[0] is not batch:
            self._padding = batch, find_padding(self._splitter.whole(batch))
        return self._padding[1]

    def microbatches(self, batch: Batch, budget: int) -> tuple[Microbatch, ...]:
        """The microbatches of a batch, in the order that is predicted to be fastest."""
        padding, self._padding = self.padding(batch), None
        if self._planner is None:
            self._planner = TokenPlanner(self._plan, self._planned_tokens(padding))
        groups = self._planner.groups(padding.lengths, budget, padding.width)
        return tuple([padding.microbatch(group.samples, group.length) for group in groups])

    def _planned_tokens(self, padding: Padding) -> float:
        """Padded tokens of a microbatch of the plan."""
        shapes = {value.name: value.spec.shape for value in self._plan.graph.inputs}
        for name in padding.names:
            if name in shapes and len(shapes[name]) > 1:
                return float(shapes[name][0] * shapes[name][1])
        return len(padding.lengths) * padding.width / self._plan.num_microbatches

    @property
    def times_next_step(self) -> bool:
        """Whether the passes of the next training step are to be timed."""
        number = self._num_steps
        # Costs that are measured differ from run to run, and with them groups, rounding and random numbers.
        return not torch.are_deterministic_algorithms_enabled() and (
            number < _NUM_MEASURED or not number & (number - 1)
        )

    def record_step(self, groups: Sequence[TokenGroup], trace: object) -> None:
        """Count a training step with these groups, and learn the costs from its Trace if it was timed."""
        if self.times_next_step and self._planner is not None:
            self._planner.add(trace, groups)
        self._num_steps += 1


def token_groups(microbatches: Sequence[Microbatch]) -> tuple[TokenGroup, ...]:
    """The samples and lengths of microbatches."""
    columns = [microbatch.columns for microbatch in microbatches]
    return tuple(TokenGroup(each.samples, each.length) for each in columns if each is not None)


def balanced_shares(whole: Microbatch, budget: int, num_replicas: int) -> list[Microbatch]:
    """The samples of each replica, so that the replicas have about equally many padded tokens.

    Groups of similar lengths, or single samples, are divided among the replicas, whichever gives the smaller maximum of
    padded tokens. Fewer shares if there are fewer samples than replicas.
    """
    padding = find_padding(whole)
    lengths, count = padding.lengths, min(num_replicas, whole.size)

    def tokens(samples: Sequence[int]) -> int:
        groups = group_samples([lengths[sample] for sample in samples], budget, padding.width)
        return sum(group.tokens for group in groups)

    groups = group_samples(lengths, budget, padding.width)
    by_group = [
        sorted(sample for group in share for sample in groups[group].samples)
        for share in balance([float(group.tokens) for group in groups], count)
    ]
    by_sample = balance([float(length) for length in lengths], count)
    best = min((by_group, by_sample), key=lambda shares: max(map(tokens, shares)) if all(shares) else math.inf)
    return [padding.microbatch(samples, padding.width) for samples in best]


def compared_batches(padding: Padding) -> tuple[Batch, Batch] | None:
    """Some of the most padded samples of a batch, without padding and with it; None if no sample is padded."""
    by_length = sorted(range(len(padding.lengths)), key=lambda sample: (padding.lengths[sample], sample))
    for count in (_NUM_COMPARED, 1):
        samples = by_length[:count]
        # Not rounded up: a position of padding at the end of the longest one could hide what the model reads there.
        length = max(padding.lengths[sample] for sample in samples)
        if length < padding.width:
            cut, whole = (padding.microbatch(samples, each) for each in (length, padding.width))
            return Batch(cut.args, cut.kwargs, cut.target), Batch(whole.args, whole.kwargs, whole.target)
    return None


def check_losses(cut: Tensor, whole: Tensor, dtypes: Iterable[torch.dtype]) -> bool:
    """Raise an error if samples have another loss without padding than with it; False if there is no loss to compare.

    `dtypes` are those of the model's parameters.
    """
    found, expected = float(cut), float(whole)
    if found != found and expected != expected:
        return False  # no label of these samples counts
    tolerance = _LOSS_TOLERANCE * max(ROUNDING[dtype] for dtype in (cut.dtype, *dtypes))
    if abs(found - expected) <= tolerance * max(abs(found), abs(expected)):
        return True
    raise RunError(
        "cutting off padding changes the loss, so budget_tokens would change the gradients",
        loss=expected,
        without_padding=found,
        hint="a model that ignores padding: a causal one padded on the right, or one that uses its attention_mask "
        "(and position_ids, if padded on the left); and a loss that ignores it, such as labels of -100",
    ).on_all_ranks()


def refuse_added_losses(recordings: Sequence[Recording]) -> None:
    """Raise an error if a module adds a loss: whether that depends on padding is not checked."""
    nodes = [name for recording in recordings for name in recording.nodes_adding_loss]
    if nodes:
        raise RunError(
            "budget_tokens does not combine with add_loss: a loss over the positions of a microbatch would change",
            node=nodes[0],
            hint="leave out budget_tokens",
        )
