"""The rule of a loss is read from what the recorder wrote."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from penstock.capture import capture
from penstock.errors import RunError
from penstock.ir import Cone, Count, LossRule, Term, assumed, combined, loss_rule
from penstock.runtime.losses.counting import facts_of
from penstock.runtime.losses.loss_value import loss_name
from tests.zoo import ZOO


def rule_of(model: nn.Module, *args: Any, **kwargs: Any) -> LossRule:
    """The rule of the loss that a model returns."""
    recording = capture(model, args, kwargs).first
    return loss_rule(recording.record, recording.graph, loss_name(recording), facts_of(recording, model))


class Losing(nn.Module):
    """A linear layer and a loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(3, 5), loss
        self.register_buffer("classes", torch.ones(5))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, labels: Tensor, count: Tensor | None = None) -> Tensor:
        """The loss alone."""
        return self.loss(self, self.linear(x), labels, count)


def ce(*args: Any, **kwargs: Any) -> Tensor:
    return functional.cross_entropy(*args, **kwargs)


def twice(loss: Tensor) -> Tensor:
    return loss + loss


ONES = torch.ones(5)
LABELS, MASK = torch.tensor([0, 1, 2, -100]), torch.tensor([1.0, 0.0, 1.0, 1.0])
LOSSES: dict[str, tuple[str, Any]] = {
    "cross entropy": ("tokens", lambda m, y, t, n: ce(y, t)),
    "negative log likelihood": ("tokens", lambda m, y, t, n: functional.nll_loss(y.log_softmax(-1), t)),
    "scaled, cast and reshaped": ("tokens", lambda m, y, t, n: -(0.5 * ce(y, t).unsqueeze(0).double()).squeeze() / -3),
    "plus nothing": ("tokens", lambda m, y, t, n: 0 + ce(y, t) + 0.0),
    "times a learned factor": ("tokens", lambda m, y, t, n: ce(y, t) * m.linear.bias.sum().exp()),
    "over a learned factor": ("tokens", lambda m, y, t, n: ce(y, t) / m.classes.sum()),
    "plus a penalty of weights": ("tokens", lambda m, y, t, n: ce(y, t) + 0.1 * m.linear.weight.pow(2).sum()),
    "twice the same labels": ("tokens", lambda m, y, t, n: ce(y, t.flatten()) + ce(2 * y, t.flatten())),
    "stacked terms": ("tokens", lambda m, y, t, n: torch.stack([ce(y, t), ce(2 * y, t)]).mean()),
    "a loss twice": ("tokens", lambda m, y, t, n: (ce(y, t) + 0.0) + ce(y, t).mean() + ce(y, t).view(1).sum()),
    "a loss plus itself": ("tokens", lambda m, y, t, n: twice(ce(y, t))),
    "plus a parameter": ("tokens", lambda m, y, t, n: ce(y, t) + m.scale - 3),
    "over a number and a parameter": ("tokens", lambda m, y, t, n: ce(y, t) / 2 / m.scale),
    "a penalty over a count": ("mixed", lambda m, y, t, n: ce(y, t) + m.linear.weight.sum() / (t >= 0).sum()),
    "weighted by the model": ("unknown", lambda m, y, t, n: ce(y, t, weight=y.detach().abs().sum(0))),
    "one by one": ("unknown", lambda m, y, t, n: ce(y[:1], t[:1], reduction="none").squeeze()),
    "weighted squares": ("tokens", lambda m, y, t, n: functional.mse_loss(y, y.detach(), weight=torch.ones(4, 5))),
    "summed squares, by position": ("sum", lambda m, y, t, n: functional.mse_loss(y, y.detach(), None, None, "sum")),
    "a plain sum": ("sum", lambda m, y, t, n: y.sum()),
    "several rows": ("mean", lambda m, y, t, n: torch.stack([y, y]).mean()),
    "an odd least": ("unknown", lambda m, y, t, n: y.sum() / (t >= 0).sum().clamp(max=3)),
    "an input": ("curved", lambda m, y, t, n: t.float().sum().log()),
    "two kinds of labels": ("mixed", lambda m, y, t, n: ce(y, t) + ce(y, t.abs() % 5, ignore_index=0)),
    "labels and squares": ("mixed", lambda m, y, t, n: ce(y, t) + (y**2).mean()),
    "a sum and a penalty": ("mixed", lambda m, y, t, n: (y**2).sum() + m.linear.weight.sum()),
    "probabilities": ("mean", lambda m, y, t, n: ce(y, functional.one_hot(t.clamp(0), 5).float())),
    "squares": ("mean", lambda m, y, t, n: functional.mse_loss(y, torch.zeros_like(y))),
    "squares, old spelling": ("sum", lambda m, y, t, n: functional.mse_loss(y, y.detach() + 1, size_average=False)),
    "divergence": ("mean", lambda m, y, t, n: functional.kl_div(y, y.detach().exp(), reduction="batchmean")),
    "a mean": ("mean", lambda m, y, t, n: (y**2).mean()),
    "a mean of sums": ("mean", lambda m, y, t, n: (y**2).sum(-1).mean()),
    "a sum of means": ("sum", lambda m, y, t, n: (y**2).mean(1).sum()),
    "samples first": ("sum", lambda m, y, t, n: ((y**2).sum(0) * 2).mean()),
    "summed labels": ("sum", lambda m, y, t, n: ce(y, t, reduction="sum")),
    "a sum over a number": ("sum", lambda m, y, t, n: (y**2).sum() / 7),
    "a sum over its size": ("mean", lambda m, y, t, n: (y**2).sum() / y.shape[0]),
    "a sum over its elements": ("mean", lambda m, y, t, n: (y**2).sum() / y.numel()),
    "a sum over a count": ("tokens", lambda m, y, t, n: ce(y, t, reduction="sum") / (t != -100).sum()),
    "a sum over a count that is read": ("tokens", lambda m, y, t, n: ce(y, t, reduction="sum") / (t >= 0).sum().item()),
    "chosen rows": ("tokens", lambda m, y, t, n: (y[t != -100] ** 2).mean()),
    "chosen rows and labels": ("tokens", lambda m, y, t, n: ce(y[t != -100], t[t != -100])),
    "rows chosen by the model": ("unknown", lambda m, y, t, n: (y[y[:, 0] > y[:, 0].min() - 1] ** 2).mean()),
    "a sum over activations": ("curved", lambda m, y, t, n: (y**2).sum() / y.exp().sum()),
    "labels made by the model": ("unknown", lambda m, y, t, n: ce(y, y.argmax(-1))),
    "a function of a loss": ("curved", lambda m, y, t, n: ce(y, t).exp()),
    "a loss plus a function of one": ("mixed", lambda m, y, t, n: ce(y, t) + (y**2).mean().sqrt()),
    "squares weighted by the model": ("unknown", lambda m, y, t, n: functional.mse_loss(y, y.detach(), weight=y.exp())),
    "rows chosen by their numbers": ("tokens", lambda m, y, t, n: (y[(t != -100).nonzero().squeeze(1)] ** 2).mean()),
    "a mean over a share": ("tokens", lambda m, y, t, n: (y**2).mean() / (t != -100).float().mean()),
    "a constant that is no part of the model": ("tokens", lambda m, y, t, n: ce(y, t, weight=ONES)),
    "a product of losses": ("curved", lambda m, y, t, n: ce(y, t) * (y**2).mean()),
    "a mean over a count": ("unknown", lambda m, y, t, n: (y**2).mean() / (t != -100).sum()),
    "a sum over a share": ("unknown", lambda m, y, t, n: (y**2).sum() / (t != -100).float().mean()),
    "a batch-wide statistic": ("unknown", lambda m, y, t, n: y.softmax(-1).mean(0).pow(2).sum()),
    "something else": ("unknown", lambda m, y, t, n: y.logsumexp((0, 1))),
    "no batch": ("mean", lambda m, y, t, n: m.linear.weight.sum()),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_kind_of_a_loss_is_what_it_is_divided_by(name: str) -> None:
    kind, loss = LOSSES[name]
    assert rule_of(Losing(loss), torch.randn(4, 3), LABELS).kind == kind


def test_a_count_names_labels_weights_and_the_nodes_that_make_them() -> None:
    model = Losing(lambda m, y, t, n: ce(y, t.clamp(min=0).view(-1, 1).flatten(), weight=m.classes, ignore_index=3))
    (term,) = rule_of(model, torch.randn(4, 3), LABELS).terms
    assert term.counts == (Count("/flatten", "labels", 3, "classes", ("/clamp", "/view", "/flatten")),)


def test_a_count_knows_its_least_and_what_is_added() -> None:
    model = Losing(lambda m, y, t, n: (y.sum(1) * n).sum() / (n.sum() + 0.5).clamp(min=2))
    (term,) = rule_of(model, torch.randn(4, 3), LABELS, MASK).terms
    assert term.counts == (Count("/sum@3", "number", nodes=("/sum@3",), at_least=2.0, plus=0.5, dtype="float32"),)
    assert [term.counts[0].divisor(number) for number in (0.0, 4.0)] == [2.0, 4.5]


@pytest.mark.parametrize("count", [torch.tensor(48.0), torch.tensor(48)])
def test_a_sum_over_a_number_given_with_the_batch_stays_a_sum_and_says_so(count: Tensor) -> None:
    model = Losing(lambda m, y, t, n: ce(y, t, reduction="sum") / n)
    rule = rule_of(model, torch.randn(4, 3), LABELS, count)
    assert (rule.kind, rule.terms[0].divided_by) == ("sum", "count")


class Criterion(nn.Module):
    """A model that keeps its loss as a part."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.linear, self.criterion = nn.Linear(3, 5), criterion

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss alone."""
        return self.criterion(self.linear(x), labels)


def test_losses_that_are_modules_are_asked_for_what_they_hold() -> None:
    weighted = Criterion(nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1, weight=torch.ones(5)))
    (term,) = rule_of(weighted, torch.randn(4, 3), LABELS).terms
    assert term.counts == (Count("labels", "labels", -100, "criterion.weight"),)
    assert rule_of(Criterion(nn.CrossEntropyLoss(reduction="sum")), torch.randn(4, 3), LABELS).kind == "sum"
    assert rule_of(Criterion(nn.MSELoss()), torch.randn(4, 3), torch.randn(4, 5)).kind == "mean"


def test_samples_multiplied_with_each_other_are_found() -> None:
    model = Losing(lambda m, y, t, n: (y @ y.t()).logsumexp(-1).mean())
    recording = capture(model, (torch.randn(4, 3), LABELS)).first
    assert [node.kind for node in Cone(recording.record, recording.graph).mixing("/mean")] == ["mean", "matmul"]
    assert rule_of(model, torch.randn(4, 3), LABELS).kind == "unknown"


def test_without_facts_a_loss_that_is_a_module_is_unknown() -> None:
    recording = capture(Criterion(nn.CrossEntropyLoss()), (torch.randn(4, 3), LABELS)).first
    assert loss_rule(recording.record, recording.graph, "criterion").kind == "unknown"


ZOO_KINDS = {
    "llama": ("tokens", "/view@2"), "gpt2": ("tokens", "/view@2"), "bert_masked_lm": ("tokens", "/view@2"),
    "bert_sequence_classification": ("tokens", "/view@2"), "t5": ("tokens", "/view@2"), "vit": ("tokens", "/view@2"),
    "whisper": ("tokens", "/reshape"), "segformer": ("tokens", "labels"), "clip": ("tokens", "text_model/arange"),
    "mixtral": ("mixed", "/view@2"), "bert_question_answering": ("mixed", "/clamp"),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO_KINDS)
def test_hugging_face_losses_are_read(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    rule = rule_of(model, *args, **kwargs)
    assert (rule.kind, rule.terms[0].counts[0].value) == ZOO_KINDS[name]


def test_the_loss_of_routers_is_a_term_of_its_own() -> None:
    model, args, kwargs = ZOO["mixtral"]()
    assert [term.kind for term in rule_of(model, *args, **kwargs).terms] == ["tokens", "unknown"]


def test_a_regression_head_is_a_mean() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=20, num_labels=1, **sizes))
    ids, labels = torch.randint(4, 20, (3, 5)), torch.randn(3)
    assert rule_of(model, input_ids=ids, labels=labels).kind == "mean"


@pytest.mark.parametrize("count", [24, torch.tensor(24)])
def test_a_number_of_items_given_to_a_language_model_makes_a_sum(count: Any) -> None:
    model, args, kwargs = ZOO["llama"]()
    rule = rule_of(model, *args, **kwargs, num_items_in_batch=count)
    assert (rule.kind, rule.terms[0].divided_by) in (("sum", "24"), ("sum", "num_items_in_batch"))


def test_a_rule_knows_its_leading_term_and_whether_it_is_known() -> None:
    penalty, total, odd = Term("constant", "a"), Term("sum", "b"), Term("curved", "c")
    rule = combined([penalty, total])
    assert (rule.kind, rule.leading, rule.lead.kind, rule.is_known) == ("mixed", 1, "sum", True)
    assert (combined([total, odd]).is_known, combined([odd]).kind) == (False, "curved")
    assert combined([total, odd]).has("curved")
    assert not rule.has("curved")


def test_a_rule_has_a_term() -> None:
    with pytest.raises(RunError, match="without terms"):
        LossRule("mean", ())
    assert combined([Term("constant", "x")]).kind == "mean"
    assert assumed("tokens", "x", Count("labels")).terms == (Term("tokens", "x", (Count("labels"),)),)
