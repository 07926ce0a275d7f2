"""Models whose samples act on each other are told from those whose loss is made up of microbatches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.capture import capture, split_batch, without_cache
from penstock.ir import transform
from penstock.runtime import loss_of
from penstock.runtime.losses.coupling import couplings
from penstock.runtime.losses.model_rule import read_model
from penstock.runtime.losses.reading import read_function
from penstock.runtime.weights import weighted_sum, weights
from tests.zoo import UNSCORED, ZOO

BATCH_NORM, CONTRAST, ROUTERS = "batch norm takes", "compares the samples", "means over all tokens"
COUPLED = {
    "resnet50": BATCH_NORM, "unet": BATCH_NORM, "segformer": BATCH_NORM, "clip": CONTRAST, "mixtral": ROUTERS,
    "qwen2_moe": ROUTERS, "olmoe": ROUTERS, "gpt_oss": ROUTERS,
}  # fmt: skip
# A block that stays whole and decides by the sum of all samples: nothing outside of it shows.
UNSEEN = {"control_flow"}
# Their numbers are not those of float64.
ROUGH = {"autocast_around", "bf16"}
SCORED = [name for name in ZOO if name not in ROUGH | UNSCORED]


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Language models cast their logits to float32, and dropout is random: neither is the subject here."""
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(functional, "dropout", lambda x, *args, **kwargs: x)
        yield


def calm(model: nn.Module) -> None:
    """All kinds of dropout off, experts one by one as the grouped product takes no float64."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))) and isinstance(value, float):
                setattr(module, name, 0.0)
        if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
            module.config._experts_implementation = "eager"


def enlarged(leaf: object) -> object:
    """Five samples in float64."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    more = leaf.roll(1, 0) * 1.3 if leaf.is_floating_point() else leaf.roll(1, 0)
    made = torch.cat([leaf, leaf.flip(0), more])[:5]
    return made.double() if made.is_floating_point() else made


def with_gaps(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Ever more labels ignored from row to row."""
    labels = kwargs.get("labels")
    if labels is None or labels.is_floating_point() or labels.dim() != 2:
        return kwargs
    ends = 2 * torch.arange(len(labels)).unsqueeze(1)
    return {**kwargs, "labels": labels.masked_fill(torch.arange(labels.shape[1]) < ends, -100)}


def losses(name: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The loss of a batch, that of its microbatches, and what couples its samples."""
    model, args, kwargs = ZOO[name]()
    calm(model.double())
    args, kwargs = transform(args, enlarged), with_gaps(without_cache(model, transform(kwargs, enlarged)))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def loss(args: Any, kwargs: Any) -> Tensor:
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])
        with torch.no_grad():
            return loss_of(model(*args, **kwargs))

    pieces = split_batch(model.forward, args, kwargs, None, 3)
    captured = capture(model, pieces[0].args, pieces[0].kwargs)
    reading = read_model(captured, captured.first)
    factors = weights(reading.rule, [reading.counter(piece) for piece in pieces])
    found = weighted_sum([loss(piece.args, piece.kwargs) for piece in pieces], factors)
    return loss(args, kwargs), found, couplings(model, captured.first)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", SCORED)
def test_a_model_that_is_not_said_to_couple_has_the_loss_of_its_microbatches(name: str) -> None:
    whole, found, sentences = losses(name)
    is_equal = torch.allclose(found, whole, rtol=1e-10, atol=0)
    assert (len(sentences) == 1, is_equal) == (name in COUPLED, name not in {*COUPLED, *UNSEEN})
    assert all(COUPLED[name] in sentence for sentence in sentences)


@pytest.mark.parametrize("name", sorted(UNSCORED - ROUGH))
def test_of_models_without_a_loss_only_batch_norm_couples(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    found = couplings(model, capture(model, args, kwargs).first)
    assert [BATCH_NORM in sentence for sentence in found] == [True] * (name == "batch_norm")


class Scoring(nn.Module):
    """A linear layer, and a loss of its rows."""

    def __init__(self, loss: Any, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.loss, self.norm = nn.Linear(3, 5), loss, norm or nn.Identity()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss alone."""
        return self.loss(self.norm(self.linear(x)), labels)


def said(loss: Any, norm: nn.Module | None = None) -> tuple[str, ...]:
    model = Scoring(loss, norm)
    return couplings(model, capture(model, (torch.randn(4, 3), torch.tensor([0, 1, 2, 3]))).first)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda y, t: functional.cross_entropy(y @ y.t(), torch.arange(len(y))), CONTRAST),
        (lambda y, t: functional.logsigmoid(y @ y.t()).sum(), CONTRAST),
        (lambda y, t: (torch.cdist(y, y) ** 2).mean(), CONTRAST),
        (lambda y, t: (y.t() @ y).pow(2).sum(), CONTRAST),
        (lambda y, t: functional.cross_entropy(y, torch.arange(4)), CONTRAST),
        (lambda y, t: functional.cross_entropy((y - y.mean(0)) / y.std(0), t), "taken over all samples"),
        (lambda y, t: (y.softmax(0) * y).mean(), "taken over all samples"),
        (lambda y, t: functional.batch_norm(y, None, None, training=True).pow(2).mean(), BATCH_NORM),
    ],
)
def test_what_couples_samples_is_said_once(loss: Any, expected: str) -> None:
    (sentence,) = said(loss)
    assert expected in sentence


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_loss_function_may_couple_too(size: int) -> None:
    def contrast(y: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(y @ target.t(), torch.arange(len(y)))

    y, target = torch.randn(size, 5), torch.randn(size, 5)
    (sentence,) = read_function(contrast, y, target, size).couplings
    assert CONTRAST in sentence
    assert read_function(functional.mse_loss, y, target, size).couplings == ()
    gram = read_function(lambda y, t: (y @ y.t() - torch.eye(len(y))).pow(2).mean(), y, target, size)
    assert CONTRAST in gram.couplings[0]


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: functional.cross_entropy(y, t),
        lambda y, t: y.pow(2).sum(0).mean(),
        lambda y, t: (y.softmax(-1) * y).sum(),
        lambda y, t: (y @ torch.ones(5, 5)).mean(),
        lambda y, t: functional.layer_norm(y, (5,)).pow(2).mean(),
        lambda y, t: torch.einsum("bi,bi->b", y, y).mean(),
    ],
)
def test_ordinary_losses_are_not_suspected(loss: Any) -> None:
    assert said(loss) == ()


def test_batch_norm_couples_only_where_it_takes_statistics() -> None:
    loss = functional.cross_entropy
    assert BATCH_NORM in said(loss, nn.BatchNorm1d(5))[0]
    assert BATCH_NORM in said(loss, nn.BatchNorm1d(5, track_running_stats=False).eval())[0]
    assert said(loss, nn.BatchNorm1d(5).eval()) == ()
    assert said(loss, nn.GroupNorm(1, 5)) == ()


def test_of_many_layers_three_are_named_and_the_others_counted() -> None:
    model, args, kwargs = ZOO["resnet50"]()
    (sentence,) = couplings(model, capture(model, args, kwargs).first)
    assert sentence.endswith(": bn1, layer1.0.bn1, layer1.0.bn2 and 50 more")
