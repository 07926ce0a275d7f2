"""Logits in shards along the vocabulary, of which no rank computes all columns, and their cross entropy.

A `VocabularyHead` takes the place of an output layer. It returns `ShardedLogits`, which stand for the logits and
compute nothing yet. Row operations (views, slices of rows) are applied to the hidden states instead; casts and scalings
wait for the shards. `cross_entropy` of them calls every `VocabularyShard`, which computes its part of the logits and
returns two numbers per row, their logsumexp and the logit of the target. `CombineShards` makes the loss of these. So
the recorded graph has one node per shard, which a plan may place on any rank, and one that combines their results.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from penstock.errors import CaptureError

Operation = tuple[str, Any]
"""an elementwise operation on logits: the name of a method of Tensor, and its argument"""


class _ShardTerms(Function):
    """Logsumexp, logit of the target and weighted sum of some columns of logits, one number per row each.

    Passes over the logits as few times as cross_entropy does: one buffer is saved, and one holds the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, is_inside: Tensor, weight: Tensor | None, returns_sum: bool
    ) -> Any:
        log_softmax = logits.log_softmax(1)
        largest, at = logits.max(1, keepdim=True)
        # At the largest logit the difference is exact to rounding.
        logsumexp = (largest - log_softmax.gather(1, at)).squeeze(1)
        ctx.save_for_backward(log_softmax, index, is_inside, weight)
        ctx.returns_sum = returns_sum
        chosen = logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~is_inside, 0.0)
        total = logits.new_zeros(()) if not returns_sum else logits.sum(1) if weight is None else logits.mv(weight)
        return logsumexp, chosen, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logsumexp: Tensor, d_chosen: Tensor, d_total: Tensor) -> Any:
        log_softmax, index, is_inside, weight = ctx.saved_tensors
        gradient = log_softmax.exp().mul_(d_logsumexp.unsqueeze(1))
        gradient.scatter_add_(1, index.unsqueeze(1), d_chosen.masked_fill(~is_inside, 0.0).unsqueeze(1))
        if ctx.returns_sum:
            gradient.add_(d_total.unsqueeze(1) if weight is None else torch.outer(d_total, weight))
        return gradient, None, None, None, None


class VocabularyShard(nn.Module):
    """The output layer for the tokens `start` to `stop - 1`."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, start: int, size: int) -> None:
        """`size` is that of the whole vocabulary."""
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.start, self.stop, self.size = start, start + len(weight), size

    def extra_repr(self) -> str:
        return f"tokens {self.start} to {self.stop - 1} of {self.size}"

    def forward(
        self,
        hidden: Tensor,
        target: Tensor,
        operations: tuple[Operation, ...],
        ignore_index: int,
        weight: Tensor | None,
        returns_sum: bool,
    ) -> tuple[Tensor, ...]:
        """Logsumexp and logit of the target for every row, and with `returns_sum` the weighted sum of the logits.

        The logit of a target that other shards have is 0.
        """
        if self.start == 0:
            self._check_targets(target, ignore_index)
        logits = F.linear(hidden, self.weight, self.bias)
        for name, argument in operations:
            logits = getattr(logits, name)(*(() if argument is None else (argument,)))
        if not logits.is_meta and torch.is_autocast_enabled(logits.device.type):
            # As torch does for cross_entropy.
            logits = logits.float()
        index = target - self.start
        is_inside = (index >= 0) & (index < self.stop - self.start) & (target != ignore_index)
        own_weight = None if weight is None else weight[self.start : self.stop].to(logits.dtype)
        index = index.clamp(0, self.stop - self.start - 1)
        results = _ShardTerms.apply(logits, index, is_inside, own_weight, returns_sum)
        return results if returns_sum else results[:2]

    def _check_targets(self, target: Tensor, ignore_index: int) -> None:
        """Raise an IndexError for a target outside of the vocabulary, as cross_entropy does: no shard has it."""
        is_wrong = (target != ignore_index) & ((target < 0) | (target >= self.size))
        if target.device.type == "cpu":
            if bool(is_wrong.any()):
                raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds.")
        elif target.device.type != "meta":
            torch._assert_async(~is_wrong.any(), "Target is out of bounds.")


class CombineShards(nn.Module):
    """Computes the cross entropy from the results of all shards."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(
        self,
        parts: Sequence[tuple[Tensor, ...]],
        target: Tensor,
        ignore_index: int,
        weight: Tensor | None,
        reduction: str,
        label_smoothing: float,
    ) -> Tensor:
        """As torch.nn.functional.cross_entropy."""
        logsumexps, chosen, *totals = zip(*parts, strict=True)
        logsumexp = torch.logsumexp(torch.stack(logsumexps), 0)
        is_counted = target != ignore_index
        losses = (logsumexp - torch.stack(chosen).sum(0)).masked_fill(~is_counted, 0.0)
        counts = is_counted.to(losses.dtype)
        if weight is not None:
            # The weight of an ignored word does not matter.
            counts = counts * weight.to(losses.dtype)[target.masked_fill(~is_counted, 0)]
            losses = losses * counts
        if label_smoothing > 0.0:
            # The cross entropy with the uniform distribution, weighted by token.
            mass = float(self.size) if weight is None else weight.to(losses.dtype).sum()
            spread = (logsumexp * mass - torch.stack(totals[0]).sum(0)).masked_fill(~is_counted, 0.0)
            losses = losses * (1.0 - label_smoothing) + spread * (label_smoothing / self.size)
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class VocabularyHead(nn.Module):
    """Replaces an nn.Linear that computes logits; returns ShardedLogits, which compute nothing yet."""

    def __init__(self, layer: nn.Linear, num_shards: int, names: Mapping[str, tuple[str, ...]]) -> None:
        """`names`: the names of its weight and bias in the whole model, that of another module first if it is tied."""
        super().__init__()
        self.size, self.names = layer.out_features, dict(names)
        # In a tuple, so that they are not registered as parameters of this module.
        self.whole = ({"weight": layer.weight, "bias": layer.bias},)
        lengths = [self.size // num_shards + (index < self.size % num_shards) for index in range(num_shards)]
        self.shards = nn.ModuleList()
        start = 0
        for length in lengths:
            rows = slice(start, start + length)
            parts = {
                name: None if whole is None else nn.Parameter(whole.detach()[rows], whole.requires_grad)
                for name, whole in self.whole[0].items()
            }
            self.shards.append(VocabularyShard(parts["weight"], parts["bias"], start, self.size))
            start += length
        self.combine = CombineShards(self.size)

    def forward(self, hidden: Tensor) -> "ShardedLogits":
        """Logits that are not computed until they are used."""
        return ShardedLogits(self, hidden)


class ShardedLogits:
    """Stands for logits of which no rank has all columns; supports what a loss does to them.

    That is views and slices of rows, casts, multiplication and division by numbers, tanh, and `cross_entropy`.
    """

    def __init__(self, head: VocabularyHead, hidden: Tensor, operations: tuple[Operation, ...] = ()) -> None:
        self._head, self._hidden, self._operations = head, hidden, operations

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            return cross_entropy(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], cls) and name in vars(cls) and not name.startswith("_"):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        raise _unsupported(name or repr(func))

    # Metadata

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.size))

    @property
    def ndim(self) -> int:
        return self._hidden.dim()

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self._hidden.device

    @property
    def dtype(self) -> torch.dtype:
        casts = [argument for name, argument in self._operations if name == "to"]
        return casts[-1] if casts else self._hidden.dtype

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    # Rows

    def reshape(self, *shape: Any) -> Self:
        """As Tensor.reshape, for shapes whose last dimension is the vocabulary."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not sizes or sizes[-1] not in (self._head.size, -1):
            raise _unsupported("reshape")
        rows = sizes[:-1]
        if sizes[-1] == -1 and (-1 in rows or torch.Size(rows).numel() != self.shape[:-1].numel()):
            raise _unsupported("reshape")
        return self._with(self._hidden.reshape(*rows, self._hidden.shape[-1]))

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """As Tensor.flatten, for dimensions other than the vocabulary."""
        if end_dim in (-1, self.ndim - 1) and start_dim not in (-1, self.ndim - 1):
            raise _unsupported("flatten")
        return self._with(self._hidden.flatten(start_dim, end_dim))

    def contiguous(self) -> Self:
        return self

    def __getitem__(self, key: Any) -> Self:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, Tensor) and each.dtype == torch.bool for each in keys):
            # The number of selected rows depends on values.
            raise _unsupported("a boolean mask")
        if any(each is Ellipsis for each in keys):
            place = next(at for at, each in enumerate(keys) if each is Ellipsis)
            keys = (*keys[:place], *[slice(None)] * (self.ndim - len(keys) + 1), *keys[place + 1 :])
        if len(keys) > self.ndim or any(each is None for each in keys):
            raise _unsupported("this index")
        if len(keys) == self.ndim:
            last = keys[-1]
            if not isinstance(last, slice) or last.indices(self._head.size) != (0, self._head.size, 1):
                raise _unsupported("an index of the vocabulary")
        return self._with(self._hidden[tuple(keys[: self.ndim - 1])])

    # Elements

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As Tensor.to, for a dtype, or for the device that the hidden states have."""
        given = [value for name, value in kwargs.items() if name not in ("copy", "non_blocking")]
        dtypes = []
        for value in (*args, *given):
            if isinstance(value, torch.dtype):
                dtypes.append(value)
            elif not isinstance(value, torch.device | str) or torch.device(value) != self.device:
                raise _unsupported("to")
        return self._with(operations=tuple(("to", dtype) for dtype in dtypes))

    def float(self) -> Self:
        return self.to(torch.float32)

    def double(self) -> Self:
        return self.to(torch.float64)

    def tanh(self) -> Self:
        return self._with(operations=(("tanh", None),))

    def mul(self, other: Any) -> Self:
        """As Tensor.mul, for numbers."""
        return self._scaled("mul", other)

    def div(self, other: Any) -> Self:
        """As Tensor.div, for numbers."""
        return self._scaled("div", other)

    __mul__ = __rmul__ = mul
    __truediv__ = div

    def _scaled(self, name: str, number: Any) -> Self:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise _unsupported(f"{name} by anything but a number")
        return self._with(operations=((name, number),))

    def _with(self, hidden: Tensor | None = None, operations: tuple[Operation, ...] = ()) -> Self:
        kind = type(self)
        return kind(self._head, self._hidden if hidden is None else hidden, (*self._operations, *operations))


def _unsupported(operation: str) -> CaptureError:
    return CaptureError(
        "an output layer can be split only if its logits are used for a cross entropy and nothing else",
        operation=operation,
        hint="vocabulary_shards=None, or F.cross_entropy of logits [rows, vocabulary] and targets [rows]",
    )


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As torch.nn.functional.cross_entropy, for ShardedLogits of rows and a target that is a token per row."""
    if not isinstance(logits, ShardedLogits) or isinstance(target, ShardedLogits):
        raise _unsupported("logits as a target")
    if size_average is not None or reduce is not None:
        raise _unsupported("cross_entropy with size_average or reduce")
    if logits.ndim != 2 or target.dim() != 1 or len(target) != logits.shape[0] or target.is_floating_point():
        shapes = f"cross_entropy of {list(logits.shape)} and {target.dtype} {list(target.shape)}"
        raise _unsupported(shapes)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    head, returns_sum = logits._head, label_smoothing > 0.0
    parts = [
        shard(logits._hidden, target, logits._operations, ignore_index, weight if returns_sum else None, returns_sum)
        for shard in head.shards
    ]
    return head.combine(parts, target, ignore_index, weight, reduction, label_smoothing)
