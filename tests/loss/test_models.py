"""The weights of models that return their loss, of every architecture, and the warnings where there are none."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.batches import Batch, BatchSplitter
from penstock.capture import capture, without_cache
from penstock.errors import RunError
from penstock.ir import map_leaves
from penstock.loss import LossStep, LossWeights, losses_of, weighted_sum
from tests.plans import quick_plan
from tests.zoo import ALIKE, UNSCORED, ZOO

BATCH_NORM, INSEPARABLE = "batch norm takes", "not a weighted sum"
COUPLED = {
    "resnet50": BATCH_NORM, "unet": BATCH_NORM, "segformer": BATCH_NORM, "clip": INSEPARABLE, "mixtral": INSEPARABLE,
    "qwen2_moe": INSEPARABLE, "olmoe": INSEPARABLE, "gpt_oss": INSEPARABLE,
}  # fmt: skip
# A block that stays whole and decides by the sum of all samples: nothing outside of it shows.
UNSEEN = {"control_flow"}
# Computed in lower precision than float64.
ROUGH = {"autocast_around", "bf16"}
SCORED = [name for name in ZOO if name not in ROUGH | UNSCORED]
# They compute their loss as another model does: as llama, as mixtral, as vit, or by the head of tests/zoo/scored.py.
SAME_LOSS = (ALIKE - {"bert_sequence_classification", "bert_token_classification"}) | {
    *("gemma2", "gemma3", "cohere", "bloom", "deepseek_v3", "mamba2", "gpt_oss", "modernbert", "deberta_v2", "bart"),
    *("swin", "convnext", "unet", "segformer", "lstm", "branches", "weight_used_twice", "in_place", "non_contiguous"),
    *("channels_last", "dict_between", "dataclass_between", "model_output_between", "nested_between", "long_skips"),
    *("frozen", "lora", "checkpointed", "checkpointed_reentrant", "hooked", "hidden_states", "tied", "dropout", "gpt"),
    *("gpt_nested", "lstm_stack", "gru_stack", "recurrent_cells", "gru_attention", "wavenet"),
}


class OneReplica:
    """No replicas."""

    count = 1

    def sum(self, figures: Tensor) -> Tensor:
        """Unchanged."""
        return figures


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Language models cast their logits to float32, and dropout is random: neither is the subject here."""
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(functional, "dropout", lambda x, *args, **kwargs: x)
        yield


def without_dropout(model: nn.Module) -> None:
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
    """More labels ignored from row to row."""
    labels = kwargs.get("labels")
    if labels is None or labels.is_floating_point() or labels.dim() != 2:
        return kwargs
    ends = 2 * torch.arange(len(labels)).unsqueeze(1)
    return {**kwargs, "labels": labels.masked_fill(torch.arange(labels.shape[1]) < ends, -100)}


def losses(name: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The loss of a batch, that of its microbatches, and the warnings."""
    model, args, kwargs = ZOO[name]()
    without_dropout(model.double())
    args, kwargs = map_leaves(args, enlarged), with_gaps(without_cache(model, map_leaves(kwargs, enlarged)))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def loss(args: Any, kwargs: Any) -> Tensor:
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])
        with torch.no_grad():
            return losses_of(model(*args, **kwargs))[""]

    pieces = BatchSplitter(model.forward).split(Batch(args, kwargs), 3)
    captured = capture(model, pieces[0].args, pieces[0].kwargs)
    step = LossStep(pieces, [captured.recording(piece.args, piece.kwargs) for piece in pieces], True)
    loss_weights = LossWeights(captured, OneReplica())
    found = weighted_sum([loss(piece.args, piece.kwargs) for piece in pieces], loss_weights.weights(step))
    return loss(args, kwargs), found, loss_weights.warnings(step)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.whole if name in SAME_LOSS else ()) for name in SCORED]
)
def test_a_model_without_a_warning_has_the_loss_of_its_microbatches(name: str) -> None:
    whole, found, warnings = losses(name)
    is_equal = torch.allclose(found, whole, rtol=1e-10, atol=0)
    assert (len(warnings) == 1, is_equal) == (name in COUPLED, name not in {*COUPLED, *UNSEEN})
    assert all(COUPLED[name] in warning for warning in warnings)


@pytest.mark.parametrize("name", sorted(UNSCORED - ROUGH))
def test_of_models_without_a_loss_only_batch_norm_causes_a_warning(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    pieces = BatchSplitter(model.forward).split(Batch(args, without_cache(model, kwargs)), 2)
    captured = capture(model, pieces[0].args, pieces[0].kwargs)
    step = LossStep(pieces, [captured.example_recording] * 2, True, weights=(0.5, 0.5))
    found = LossWeights(captured, OneReplica(), functional.mse_loss).warnings(step)
    assert [BATCH_NORM in warning for warning in found] == [True] * (name == "batch_norm")


def test_samples_of_the_only_microbatch_may_interact() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    captured, pieces = capture(model, (X,)), BatchSplitter(model.forward).split(Batch((X,), {}), 1)
    step = LossStep(pieces, [captured.example_recording], True, weights=(1.0,))
    assert LossWeights(captured, OneReplica(), functional.mse_loss).warnings(step) == ()


X, T = torch.randn(6, 4), torch.randn(6, 3)


class Counted(nn.Linear):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        Counted.calls += 1
        return super().forward(x)


class Scored(nn.Module):
    """Layers, and a loss of them."""

    def __init__(self, loss: Any, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counted(4, 4), nn.Dropout(0.5), Counted(4, 3)])
        self.loss, self.last = loss, last or nn.Identity()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss alone."""
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.last(x), labels)


def weighed(loss: Any, microbatches: int = 2, last: nn.Module | None = None) -> tuple[str, str]:
    """How the loss of a model is found to be averaged, and the problem with it, without a call of a layer."""
    model = Scored(loss, last)
    pieces = BatchSplitter(model.forward).split(Batch((X, T), {}), microbatches)
    captured = capture(model, pieces[0].args)
    step = LossStep(pieces, [captured.example_recording] * len(pieces), True)
    loss_weights = LossWeights(captured, OneReplica())
    Counted.calls = 0
    loss_weights.weights(step)
    assert Counted.calls == 0
    return loss_weights.reduction, step.loss_problem


@pytest.mark.parametrize("microbatches", [2, 6])
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (functional.mse_loss, "mean"),
        (nn.MSELoss(), "mean"),
        (lambda y, t: (y - t).square().sum() * (1 / len(y)), "mean"),
        (lambda y, t: (y - t.view(t.shape[0], -1)).square().sum() / 3, "sum"),
        (lambda y, t: functional.mse_loss(y, t) * len(y), "sum"),
        (lambda y, t: torch.einsum("bi,bi->", y, t), "sum"),
        (lambda y, t: (y - t).square().sum() / (y.numel() - 1), "evaluated in every step"),
    ],
)
def test_no_block_runs_to_find_how_the_loss_of_a_model_is_averaged(loss: Any, kind: str, microbatches: int) -> None:
    assert weighed(loss, microbatches) == (kind, "")


@pytest.mark.parametrize("microbatches", [2, 6])
@pytest.mark.parametrize(
    "loss",
    [lambda y, t: (y - y.roll(1, 0)).square().mean(), lambda y, t: torch.cdist(y, t).mean(), lambda y, t: y.norm()],
)
def test_samples_that_interact_in_the_loss_of_a_model_are_seen(loss: Any, microbatches: int) -> None:
    assert weighed(loss, microbatches)[0] == "none"


class Learned(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """Scaled squares."""
        return functional.mse_loss(y, t) * self.scale


class Pair(nn.Module):
    """A block that returns two things."""

    def __init__(self, returns_input: bool) -> None:
        super().__init__()
        self.weight, self.returns_input = nn.Parameter(torch.randn(3, 3)), returns_input

    def forward(self, x: Tensor) -> dict[str, Any]:
        """A result and something else."""
        return {"result": x @ self.weight, "more": (x if self.returns_input else x.exp(), None)}


def of_pair(y: dict[str, Any], t: Tensor) -> Tensor:
    return (y["result"] - t).square().sum() * (1 / len(t)) + y["more"][0].mean()


def test_a_block_may_be_the_loss_itself_return_a_structure_or_return_its_input() -> None:
    assert weighed(Learned()) == ("mean", "")
    for returns_input in (False, True):
        assert weighed(of_pair, last=Pair(returns_input)) == ("mean", "")


def test_hooks_and_state_of_a_model_are_left_alone() -> None:
    model = Scored(functional.mse_loss)
    called: list[str] = []
    model.register_forward_hook(lambda module, args, result: called.append("model"))
    model.layers[0].register_forward_hook(lambda module, args, result: called.append("layer"))
    pieces = BatchSplitter(model.forward).split(Batch((X, T), {}), 2)
    captured = capture(model, pieces[0].args)
    called.clear()
    state = torch.get_rng_state()
    LossWeights(captured, OneReplica()).weights(LossStep(pieces, [captured.example_recording] * 2, True))
    assert (called, model.training) == ([], True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


class Between(nn.Module):
    """Two layers, and a function of all that happens between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.layers, self.between = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 3)]), between

    def forward(self, x: Tensor) -> Tensor:
        """Layers."""
        first, second = self.layers
        return second(self.between(first(x)))


@pytest.mark.parametrize(
    ("between", "is_mixing"),
    [
        (lambda x: x - x.mean(0), True),
        (lambda x: x.softmax(0), True),
        (lambda x: functional.batch_norm(x, None, None, training=True), True),
        (lambda x: x @ (x.t() @ x), True),
        (lambda x: x - x.mean(1, keepdim=True), False),
        (lambda x: functional.layer_norm(x, (3,)), False),
        (lambda x: (x @ torch.ones(3, 3)).softmax(-1), False),
    ],
)
def test_samples_that_interact_between_blocks_cause_a_warning(between: Any, is_mixing: bool) -> None:
    model = Between(between)
    pieces = BatchSplitter(model.forward).split(Batch((X,), {}), 2)
    captured = capture(model, pieces[0].args)
    step = LossStep(pieces, [captured.example_recording] * 2, True, weights=(0.5, 0.5))
    found = LossWeights(captured, OneReplica(), functional.mse_loss).warnings(step)
    assert ["depends on all samples of a batch" in warning and "layers.1" in warning for warning in found] == (
        [True] if is_mixing else []
    )


@pytest.mark.parametrize(
    ("norm", "warns"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.BatchNorm1d(3, track_running_stats=False).eval(), True),
        (nn.BatchNorm1d(3).eval(), False),
        (nn.GroupNorm(1, 3), False),
    ],
)
def test_batch_norm_causes_a_warning_only_where_it_takes_statistics(norm: nn.Module, warns: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), norm)
    norm.training = norm.training and not isinstance(norm, nn.GroupNorm)
    pieces = BatchSplitter(model.forward).split(Batch((X,), {}), 2)
    captured = capture(model, pieces[0].args)
    step = LossStep(pieces, [captured.example_recording] * 2, True, weights=(0.5, 0.5))
    found = LossWeights(captured, OneReplica(), functional.mse_loss).warnings(step)
    assert [BATCH_NORM in warning for warning in found] == [True] * warns


def test_of_many_layers_three_are_named() -> None:
    model, args, kwargs = ZOO["resnet50"]()
    pieces = BatchSplitter(model.forward).split(Batch(args, kwargs), 2)
    captured = capture(model, pieces[0].args, pieces[0].kwargs)
    step = LossStep(pieces, [captured.example_recording] * 2, True, weights=(0.5, 0.5))
    (warning,) = LossWeights(captured, OneReplica()).warnings(step)
    assert warning.endswith(": bn1, layer1.0.bn1, layer1.0.bn2 and 50 more")


def test_a_model_without_a_loss_is_refused_with_a_hint() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    captured = capture(model, (X,))
    with pytest.raises(RunError, match=r"no loss \(returned: tensor\[6, 3\]\)\ntry: loss_fn="):
        LossWeights(captured, OneReplica()).loss_values(captured.example_recording)
    with pytest.raises(RunError, match=r"returned: tuple\(tensor\[3\], int\)"):
        losses_of((torch.zeros(3), 1))


def test_the_loss_is_found_by_its_name_or_as_the_only_scalar_of_a_tuple() -> None:
    one = torch.ones(())
    count = torch.tensor(2)
    for output in (one, {"logits": X, "loss": one}, (one, X), (X, one), (X, None, one, count), (count, one)):
        assert losses_of(output) == {"": one}
    for output in ({"a": one, "b": one}, {"logits": X, "loss": {"a": one, "b": one}}, (X, {"a": one, "b": one})):
        assert losses_of(output) == {"a": one, "b": one}
    for ambiguous in ((X, one, one), {"logits": X, "router": one}):
        with pytest.raises(RunError, match="returned no loss"):
            losses_of(ambiguous)


class Positioned(nn.Module):
    """Adds embeddings of positions, for sequences as long as the first microbatch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(9, 4), Positions(9, 4), nn.Linear(4, 9)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.words(tokens) + self.positions(tokens))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Positions(nn.Embedding):
    """Uses no more of its argument than its length."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(torch.arange(tokens.shape[1])).unsqueeze(0)


class Collecting(nn.Module):
    """Computes its loss from the results of a block that a hook of a library collected."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 9)
        self.found: list[Tensor] = []

        def collect(module: nn.Module, args: Any, result: Tensor) -> None:
            self.found.append(result)

        collect.__module__ = "transformers.utils"
        self.block.register_forward_hook(collect)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.found.clear()
        self.block(x)
        logits = self.head(self.found.pop())
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("make", "batch"),
    [(Positioned, torch.randint(9, (5, 3))), (Collecting, torch.randn(5, 3, 4))],
    ids=["positions", "hook"],
)
def test_labels_are_counted_whatever_the_blocks_return_or_hooks_collect(make: Any, batch: Tensor) -> None:
    model, labels = make(), torch.randint(9, (5, 3))
    labels[0, :2] = -100
    pieces = BatchSplitter(model.forward).split(Batch((batch, labels), {}), 2)
    captured = capture(model, pieces[0].args, pieces[0].kwargs)
    step = LossStep(pieces, [captured.recording(piece.args, piece.kwargs) for piece in pieces], True)
    loss_weights = LossWeights(captured, OneReplica())
    weights = loss_weights.weights(step)
    assert loss_weights.warnings(step) == ()
    assert weights == pytest.approx([7 / 13, 6 / 13])


class Line(nn.Module):
    """Has parameters and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, labels: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
        """The loss and the values."""
        y = x * self.a + self.b
        return nn.functional.mse_loss(y, labels, reduction=reduction), y


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_model_without_modules_is_that_of_the_batch(reduction: str) -> None:
    model, x = Line(), torch.linspace(-1.0, 2.0, 7)
    batch = {"x": x, "labels": x.cos(), "reduction": reduction}
    plan = quick_plan(model, (), batch, ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, local=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pipe.step(**batch).loss
    gradients = [model.a.grad, model.b.grad]
    expected = model(**batch)[0]
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradients, list(torch.autograd.grad(expected, [model.a, model.b])))
