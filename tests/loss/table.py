"""Table: losses as people write them, on outputs of (samples, places, classes), with what is to be expected of each.

"exact": gradients and loss are those of the whole batch, without a warning. "warned": they cannot be.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, PLACES, CLASSES = 7, 6, 5
_IGNORED = -100


class Row(NamedTuple):
    """A loss function, its target, and what is to be expected."""

    expected: str
    loss_fn: Callable[[Any, Any], Tensor]
    target: Any


def numbers(*shape: int, seed: int) -> Tensor:
    """Normally distributed numbers in float64, always the same."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _labels() -> Tensor:
    """Ever other numbers of labels are ignored, in the last sample all."""
    found = torch.randint(0, CLASSES, (SAMPLES, PLACES), generator=torch.Generator().manual_seed(1))
    for row, end in enumerate((0, 5, 1, 2, 0, 3, 6)):
        found[row, :end] = _IGNORED
    return found


LABELS = _labels()
ALL = LABELS.clamp(min=0)
MASK = LABELS != _IGNORED
CLASS = torch.randint(0, CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(2))
VALUES = numbers(SAMPLES, PLACES, CLASSES, seed=3)
BITS = (numbers(SAMPLES, PLACES, CLASSES, seed=4) > 0).double()
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)
IMPORTANCE = {"values": VALUES, "weights": numbers(SAMPLES, seed=5).abs() + 0.1}
LENGTHS = {"values": VALUES, "lengths": torch.tensor([1, 2, 2, 1, 2, 1, 2])}
SPELLED = {"letters": torch.randint(1, CLASSES, (SAMPLES, 2)), "lengths": LENGTHS["lengths"]}
TEACHER = {"values": VALUES, "labels": ALL}
GAPPED = {"values": VALUES, "labels": LABELS}


def flat(y: Tensor, t: Tensor, **options: Any) -> Tensor:
    """Cross entropy of all places."""
    return functional.cross_entropy(y.flatten(0, 1), t.flatten(), **options)


def each(y: Tensor, t: Tensor, **options: Any) -> Tensor:
    """Cross entropy of every place."""
    return functional.cross_entropy(y.transpose(1, 2), t, reduction="none", **options)


def counted(t: Tensor) -> Tensor:
    """How many labels count."""
    return (t != _IGNORED).sum()


def squares(y: Tensor, t: Tensor) -> Tensor:
    """The error of every sample."""
    return (y - t).square().mean((1, 2))


def chances(y: Tensor, t: Tensor) -> Tensor:
    """The likelihood of every label."""
    return y.log_softmax(-1).gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def binary_cross_entropy(y: Tensor, t: Tensor, **options: Any) -> Tensor:
    """Binary cross entropy."""
    return functional.binary_cross_entropy_with_logits(y, t, **options)


def spelled(y: Tensor, t: dict[str, Tensor], reduction: str) -> Tensor:
    """CTC; time comes first."""
    times = torch.full((len(y),), PLACES)
    letters, lengths = t["letters"], t["lengths"]
    return functional.ctc_loss(y.log_softmax(-1).transpose(0, 1), letters, times, lengths, reduction=reduction)


def divergence(y: Tensor, t: Tensor, reduction: str = "batchmean", temperature: float = 1.0) -> Tensor:
    """Of a student from its teacher."""
    student, teacher = (y / temperature).log_softmax(-1), (t / temperature).softmax(-1)
    return functional.kl_div(student, teacher, reduction=reduction)


def overlap(y: Tensor, t: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Dice, over some dimensions."""
    found = y.sigmoid()
    return 1 - 2 * (found * t).sum(dims) / (found.sum(dims) + t.sum(dims))


def one_by_one(y: Tensor, t: Tensor) -> list[Tensor]:
    """A loss for every sample in a loop."""
    return [functional.cross_entropy(y[row], t[row]) for row in range(len(y))]


def trimmed(y: Tensor, t: dict[str, Tensor]) -> list[Tensor]:
    """Of every sample as many places as it has."""
    ends = [int(length) for length in t["lengths"]]
    return [(y[row, :end] - t["values"][row, :end]).square() for row, end in enumerate(ends)]


def lasting(loss: Tensor) -> Tensor:
    """The value of a mean with the gradient of a sum."""
    return loss.mean().detach() + loss.sum() - loss.sum().detach()


def above(loss: Tensor, threshold: Any) -> Tensor:
    """Only what is larger."""
    return loss[loss > threshold].mean()


class Focal(nn.Module):
    """Easy samples count less."""

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """A mean over all places."""
        loss = each(y, t.clamp(min=0))
        return ((1 - (-loss).exp()) ** 2 * loss).mean()


class Criterion(nn.Module):
    """A loss with a part that has class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.CrossEntropyLoss(weight=WEIGHTS)

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """Twice the part."""
        return 2 * self.part(y.transpose(1, 2), t)


class Learned(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """Squared errors weighted by the scale."""
        return functional.mse_loss(y, t) * torch.exp(-self.scale) + self.scale


class Weighted:
    """A loss that is an object with a tensor in it."""

    def __init__(self) -> None:
        self.weights = WEIGHTS.clone()

    def __call__(self, y: Tensor, t: Tensor) -> Tensor:
        """Class weights of its own."""
        return flat(y, t, weight=self.weights)


def closing_over(weights: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A closure."""
    return lambda y, t: 0.5 * flat(y, t, weight=weights)


def printing(y: Tensor, t: Tensor) -> Tensor:
    """Reads a number from the output."""
    print(f"{y.sum().item():.1f}"[:0], end="")
    return flat(y, t)


def _row(expected: str, target: Any) -> Callable[[Callable[[Any, Any], Tensor]], Row]:
    return lambda loss_fn: Row(expected, loss_fn, target)


_LABELLED = _row("exact", LABELS)
_COMPLETE = _row("exact", ALL)
_VALUED = _row("exact", VALUES)
_BINARY = _row("exact", BITS)
_COUPLED = _row("warned", VALUES)

ENTROPIES = {
    "ignored labels": _LABELLED(flat),
    "no label ignored": _COMPLETE(flat),
    "classes second": _LABELLED(lambda y, t: functional.cross_entropy(y.transpose(1, 2), t)),
    "another ignored class": _COMPLETE(lambda y, t: flat(y, t, ignore_index=2)),
    "class weights": _LABELLED(lambda y, t: flat(y, t, weight=WEIGHTS)),
    "smoothed labels": _LABELLED(lambda y, t: flat(y, t, label_smoothing=0.1)),
    "smoothed and weighted": _LABELLED(lambda y, t: flat(y, t, label_smoothing=0.1, weight=WEIGHTS)),
    "a sum": _LABELLED(lambda y, t: flat(y, t, reduction="sum")),
    "a weighted sum": _LABELLED(lambda y, t: flat(y, t, reduction="sum", weight=WEIGHTS)),
    "none, then mean": _LABELLED(lambda y, t: each(y, t).mean()),
    "none, then sum": _LABELLED(lambda y, t: each(y, t).sum()),
    "none, weighted, then mean": _LABELLED(lambda y, t: each(y, t, weight=WEIGHTS).mean()),
    "none, masked": _LABELLED(lambda y, t: (each(y, t) * (t != _IGNORED)).sum() / counted(t)),
    "none, chosen": _LABELLED(lambda y, t: each(y, t)[t != _IGNORED].mean()),
    "none, selected": _LABELLED(lambda y, t: each(y, t).masked_select(t != _IGNORED).mean()),
    "none, by number": _LABELLED(lambda y, t: each(y, t).flatten()[(t.flatten() >= 0).nonzero().squeeze(1)].mean()),
    "none, where": _LABELLED(lambda y, t: torch.where(t >= 0, each(y, t), 0.0).sum() / torch.count_nonzero(t >= 0)),
    "none, over the share": _LABELLED(lambda y, t: (each(y, t) * (t >= 0)).mean() / (t >= 0).double().mean()),
    "chosen rows": _LABELLED(lambda y, t: functional.cross_entropy(y[t >= 0], t[t >= 0])),
    "shifted": _LABELLED(lambda y, t: functional.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten())),
    "by sizes": _LABELLED(lambda y, t: functional.cross_entropy(y.reshape(t.shape[0] * t.shape[1], -1), t.reshape(-1))),
    "over a count": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / counted(t)),
    "over a count of one at least": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / counted(t).clamp(min=1)),
    "over a little more": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / (counted(t) + 1e-8)),
    "over a count that is read": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / counted(t).item()),
    "over a count or one": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / max(counted(t).item(), 1)),
    "over samples": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / len(t)),
    "over places": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / t.numel()),
    "times the inverse": _LABELLED(lambda y, t: flat(y, t, reduction="sum") * (1.0 / t.shape[0])),
    "over a hundred": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / 100),
    "over three": _LABELLED(lambda y, t: flat(y, t, reduction="sum") / 3),
    "over three, by sizes": _LABELLED(lambda y, t: flat(y, t.view(t.shape[0], -1), reduction="sum") / 3),
    "mean of each sequence": _LABELLED(lambda y, t: (each(y, t).sum(1) / (t >= 0).sum(1).clamp(min=1)).mean()),
    "sum of each sequence": _LABELLED(lambda y, t: each(y, t).sum(1).mean()),
    "sum of means": _LABELLED(lambda y, t: each(y, t).mean(1).sum()),
    "a loop": _COMPLETE(lambda y, t: sum(one_by_one(y, t)) / len(y)),  # type: ignore[arg-type, return-value]
    "a loop, summed": _COMPLETE(lambda y, t: sum(one_by_one(y, t))),  # type: ignore[arg-type, return-value]
    "a loop, stacked": _COMPLETE(lambda y, t: torch.stack(one_by_one(y, t)).mean()),
    "scaled": _LABELLED(lambda y, t: 0.37 * flat(y, t) / 2),
    "probabilities": _VALUED(lambda y, t: functional.cross_entropy(y.flatten(0, 1), t.flatten(0, 1).softmax(-1))),
    "likelihoods": _LABELLED(lambda y, t: functional.nll_loss(y.log_softmax(-1).flatten(0, 1), t.flatten())),
    "gathered": _LABELLED(lambda y, t: -chances(y, t).mean()),
    "gathered and masked": _LABELLED(lambda y, t: -(chances(y, t) * (t >= 0)).sum() / (t >= 0).double().sum()),
    "a module": _LABELLED(Criterion()),
    "a partial": _LABELLED(functools.partial(flat, weight=WEIGHTS)),
    "a method": _LABELLED(Criterion().forward),
    "an object": _LABELLED(Weighted()),
    "a closure": _LABELLED(closing_over(WEIGHTS.clone())),
    "a function that prints": _LABELLED(printing),
    "a sum of two": _LABELLED(lambda y, t: flat(y, t) + 0.1 * flat(2 * y, t)),
    "squares of chosen rows": _LABELLED(lambda y, t: y[t != _IGNORED].square().mean()),
    "selected rows": _LABELLED(
        lambda y, t: y.flatten(0, 1).index_select(0, (t.flatten() != _IGNORED).nonzero().squeeze(1)).square().mean()
    ),
    "focal": _LABELLED(Focal()),
    "in float32": _LABELLED(lambda y, t: flat(y.float(), t)),
    "in float32, over a count": _LABELLED(lambda y, t: flat(y.float(), t, reduction="sum") / counted(t).float()),
    "times samples": _row("exact", LABELS)(lambda y, t: flat(y, t) * len(t)),
    "perplexity": _row("warned", LABELS)(lambda y, t: flat(y, t).exp()),
}
REGRESSIONS = {
    "of complex numbers": Row(
        "exact", lambda y, t: (torch.complex(y, -y) - t).abs().square().mean(), torch.complex(VALUES, BITS)
    ),
    "squares": _VALUED(functional.mse_loss),
    "squares, summed": _VALUED(functools.partial(functional.mse_loss, reduction="sum")),
    "squares, none, then mean": _VALUED(lambda y, t: functional.mse_loss(y, t, reduction="none").mean()),
    "squares over samples": _VALUED(lambda y, t: functional.mse_loss(y, t, reduction="sum") / y.size(0)),
    "half the squares": _VALUED(lambda y, t: 0.5 * functional.mse_loss(y, t, reduction="sum") / len(y)),
    "squares with a weight": _VALUED(lambda y, t: functional.mse_loss(y, t, weight=torch.full_like(y, 2.0))),
    "a module of squares": _VALUED(nn.MSELoss()),
    "of shape one": _VALUED(lambda y, t: functional.mse_loss(y, t).reshape(1)),
    "in half precision": _VALUED(lambda y, t: functional.mse_loss(y.bfloat16(), t.bfloat16()).double()),
    "weighted samples": _row("exact", IMPORTANCE)(lambda y, t: (squares(y, t["values"]) * t["weights"]).mean()),
    "over all weights": _row("exact", IMPORTANCE)(
        lambda y, t: (squares(y, t["values"]) * t["weights"]).sum() / t["weights"].sum()
    ),
    "absolute": _VALUED(functional.l1_loss),
    "huber": _VALUED(functional.huber_loss),
    "smooth, summed": _VALUED(functools.partial(functional.smooth_l1_loss, reduction="sum")),
    "gaussian": _VALUED(lambda y, t: functional.gaussian_nll_loss(y, t, torch.ones_like(y))),
    "poisson": _VALUED(lambda y, t: functional.poisson_nll_loss(y, t.abs())),
    "log cosh": _VALUED(lambda y, t: torch.log(torch.cosh(y - t)).mean()),
    "quantile": _VALUED(lambda y, t: torch.maximum(0.3 * (t - y), -0.7 * (t - y)).mean()),
    "percentage": _VALUED(lambda y, t: ((y - t) / t).abs().mean()),
    "root of each sample": _VALUED(lambda y, t: squares(y, t).sqrt().mean()),
    "norm of each sample": _VALUED(lambda y, t: (y - t).flatten(1).norm(dim=1).mean()),
    "a product, summed": _VALUED(lambda y, t: torch.einsum("bij,bij->", y - t, y - t)),
    "a product over entries": _VALUED(lambda y, t: torch.einsum("bij,bij->", y - t, y - t) / y.numel()),
    "a dot product": _VALUED(lambda y, t: torch.dot((y - t).flatten(), (y - t).flatten()) / len(y)),
    "a parameter of its own": _VALUED(Learned()),
    "a mask": _row("exact", {"values": VALUES, "mask": MASK})(
        lambda y, t: ((y - t["values"]).square().mean(-1) * t["mask"]).sum() / t["mask"].sum()
    ),
    "a mask in a tuple": _row("exact", (VALUES, MASK))(
        lambda y, t: ((y - t[0]).square().mean(-1) * t[1]).sum() / t[1].sum()
    ),
    "trimmed, mean of each": _row("exact", LENGTHS)(lambda y, t: torch.stack([x.mean() for x in trimmed(y, t)]).mean()),
    "chosen samples": _row("exact", LENGTHS)(
        lambda y, t: functional.mse_loss(y[t["lengths"] > 1], t["values"][t["lengths"] > 1])
    ),
    "trimmed, all together": _row("exact", LENGTHS)(lambda y, t: torch.cat(trimmed(y, t)).mean()),
    "weighted entries": _row("exact", IMPORTANCE)(
        lambda y, t: functional.mse_loss(y, t["values"], weight=t["weights"][:, None, None].expand_as(y))
    ),
    "by numpy": _COUPLED(lambda y, t: (y.mean((1, 2)) * torch.from_numpy(np.linspace(0, 1, len(y)))).mean()),
    "root of the mean": _COUPLED(lambda y, t: functional.mse_loss(y, t).sqrt()),
    "norm of all": _COUPLED(lambda y, t: (y - t).norm()),
    "unexplained variance": _VALUED(lambda y, t: (y - t).square().sum() / (t - t.mean()).square().sum()),
    "over the variance": _VALUED(lambda y, t: functional.mse_loss(y, t) / t.var()),
    "degrees of freedom": _VALUED(lambda y, t: (y - t).square().sum() / (y.numel() - 1)),
    "only the first": _COUPLED(lambda y, t: functional.mse_loss(y[0], t[0])),
    "the hardest": _COUPLED(lambda y, t: above(squares(y, t), squares(y, t).mean().detach())),
    "above a threshold": _COUPLED(lambda y, t: above((y - t).square().flatten(), 1.5)),
    "value of a mean, gradient of a sum": _COUPLED(lambda y, t: lasting((y - t).square())),
}
BINARIES = {
    "chances": _BINARY(lambda y, t: functional.binary_cross_entropy(y.sigmoid(), t)),
    "weighted positives": _BINARY(lambda y, t: binary_cross_entropy(y, t, pos_weight=WEIGHTS)),
    "weighted classes": _BINARY(lambda y, t: binary_cross_entropy(y, t, weight=WEIGHTS)),
    "only positives": _BINARY(lambda y, t: (binary_cross_entropy(y, t, reduction="none") * t).sum() / t.sum()),
    "focal over positives": _BINARY(
        lambda y, t: (
            ((1 - y.sigmoid()) ** 2 * binary_cross_entropy(y, t, reduction="none")).sum() / t.sum().clamp(min=1)
        )
    ),
    "soft margin": _BINARY(lambda y, t: functional.soft_margin_loss(y, 2 * t - 1)),
    "hinge": _BINARY(lambda y, t: functional.hinge_embedding_loss(y, 2 * t - 1)),
    "hinge by hand": _BINARY(lambda y, t: functional.relu(1 - y * (2 * t - 1)).mean()),
    "many labels": _BINARY(lambda y, t: functional.multilabel_soft_margin_loss(y.flatten(0, 1), t.flatten(0, 1))),
    "margin": _row("exact", CLASS)(lambda y, t: functional.multi_margin_loss(y.mean(1), t)),
    "weighted margin": _row("exact", CLASS)(lambda y, t: functional.multi_margin_loss(y.mean(1), t, weight=WEIGHTS)),
    "dice of each sample": _BINARY(lambda y, t: overlap(y, t, (1, 2)).mean()),
    "dice": _row("warned", BITS)(lambda y, t: overlap(y, t, (0, 1, 2))),
    "union": _row("warned", BITS)(lambda y, t: 1 - (y.sigmoid() * t).sum() / (y.sigmoid() * (1 - t) + t).sum()),
}
DISTRIBUTIONS = {
    "divergence": _VALUED(divergence),
    "divergence, summed": _VALUED(functools.partial(divergence, reduction="sum")),
    "distillation": _row("exact", TEACHER)(
        lambda y, t: 2.8 * divergence(y, t["values"], temperature=2.0) + 0.3 * flat(y, t["labels"])
    ),
    "z loss": _COMPLETE(lambda y, t: flat(y, t) + 0.01 * y.logsumexp(-1).square().mean()),
    "z loss, masked": _LABELLED(
        lambda y, t: flat(y, t) + 0.01 * (y.logsumexp(-1).square() * (t >= 0)).sum() / counted(t)
    ),
    "entropy": _COMPLETE(lambda y, t: flat(y, t) + 0.01 * (y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean()),
    "variational, summed": _VALUED(
        lambda y, t: functional.mse_loss(y, t, reduction="sum") - 0.5 * (1 + y - y.square() - y.exp()).sum()
    ),
    "variational": _VALUED(
        lambda y, t: functional.mse_loss(y, t) - 0.5 * (1 + y - y.square() - y.exp()).sum(-1).mean()
    ),
    "spelling": _row("exact", SPELLED)(functools.partial(spelled, reduction="mean")),
    "spelling, summed": _row("exact", SPELLED)(functools.partial(spelled, reduction="sum")),
    "z loss of ignored labels": _row("warned", LABELS)(
        lambda y, t: flat(y, t) + 0.01 * y.logsumexp(-1).square().mean()
    ),
    "distillation of ignored labels": _row("warned", GAPPED)(
        lambda y, t: 0.7 * divergence(y, t["values"]) + 0.3 * flat(y, t["labels"])
    ),
}
DISTANCES = {
    "cosine": _VALUED(lambda y, t: 1 - functional.cosine_similarity(y.flatten(1), t.flatten(1)).mean()),
    "cosine embedding": _VALUED(
        lambda y, t: functional.cosine_embedding_loss(y.flatten(1), t.flatten(1), torch.ones(len(y), dtype=y.dtype))
    ),
    "triplet": _VALUED(lambda y, t: functional.triplet_margin_loss(y[:, 0], y[:, 1], y[:, 2])),
    "ranking": _VALUED(lambda y, t: functional.margin_ranking_loss(y[:, 0, 0], y[:, 1, 1], t[:, 0, 0].sign())),
    "contrast": _COUPLED(lambda y, t: functional.cross_entropy(y.flatten(1) @ t.flatten(1).T, torch.arange(len(y)))),
    "pairs": _COUPLED(lambda y, t: torch.pdist(y.flatten(1)).mean()),
    "from the centre": _COUPLED(lambda y, t: (y - y.mean(0)).square().mean()),
    "variance": _COUPLED(lambda y, t: y.var()),
    "correlation": _COUPLED(lambda y, t: -torch.corrcoef(torch.stack([y.flatten(), t.flatten()]))[0, 1]),
    "the two largest": _COUPLED(lambda y, t: squares(y, t).topk(2).values.mean()),
    "the largest": _COUPLED(lambda y, t: (y - t).abs().max()),
    "the median": _COUPLED(lambda y, t: (y - t).abs().median()),
    "a soft maximum": _COUPLED(lambda y, t: (y - t).square().flatten().logsumexp(0)),
    "neighbours": _COUPLED(lambda y, t: (y - y.roll(1, 0)).square().mean()),
    "attention over samples": _COUPLED(lambda y, t: (squares(y, t) * squares(y, t).softmax(0)).sum()),
}
FUNCTIONS = {
    "logarithm": _COUPLED(lambda y, t: functional.mse_loss(y, t).log()),
    "product": _COUPLED(lambda y, t: functional.mse_loss(y, t) * y.square().mean()),
    "square": _COUPLED(lambda y, t: y.mean().square()),
    "power": _COUPLED(lambda y, t: functional.mse_loss(y, t) ** 1.5),
    "ratio": _COUPLED(lambda y, t: functional.mse_loss(y, t) / y.square().mean()),
    "detached ratio": _COUPLED(lambda y, t: functional.mse_loss(y, t) / functional.mse_loss(y, t).detach()),
    "detached factor": _COUPLED(lambda y, t: functional.mse_loss(y, t) * y.square().mean().detach()),
    "clamped": _COUPLED(lambda y, t: functional.mse_loss(y, t).clamp(max=1.2)),
    "flooded": _COUPLED(lambda y, t: (functional.mse_loss(y, t) - 1.2).abs() + 1.2),
    "two means": _VALUED(lambda y, t: functional.mse_loss(y, t) + 0.1 * y.square().mean()),
    "mean and constant": _VALUED(lambda y, t: functional.mse_loss(y, t) + 3.0),
    "labels counted alike": _row("exact", (LABELS, LABELS.clone()))(lambda y, t: flat(y, t[0]) + flat(2 * y, t[1])),
    "mean and sum": _COUPLED(lambda y, t: functional.mse_loss(y, t) + 0.1 * y.square().sum()),
    "sum and constant": _COUPLED(lambda y, t: functional.mse_loss(y, t, reduction="sum") + 3.0),
    "labels and squares": _row("warned", LABELS)(lambda y, t: flat(y, t) + 0.1 * y.square().mean()),
    "two kinds of labels": _row("warned", (LABELS, LABELS.flip(0)))(lambda y, t: flat(y, t[0]) + flat(2 * y, t[1])),
}
TABLE = {
    f"{group}: {name}": row
    for group, rows in {
        "entropy": ENTROPIES,
        "regression": REGRESSIONS,
        "binary": BINARIES,
        "distribution": DISTRIBUTIONS,
        "distance": DISTANCES,
        "function": FUNCTIONS,
    }.items()
    for name, row in rows.items()
}
