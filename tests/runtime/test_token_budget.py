"""budget_tokens: samples grouped by length give the gradients of the whole batch, or are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import penstock
from penstock.batches import Batch, BatchSplitter, find_padding
from tests.parity import WholeModel, assert_close, assert_parts_close, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import some
from tests.small_models import VOCABULARY, WIDTH, seeded, token_loss, tokens

LENGTHS = (19, 3, 5, 40, 7, 2, 12, 9, 26, 4)
LONG_FIRST = (32, 32, 32, 32, 8, 8, 8, 8)
"""halves in the order of arrival would have 128 and 32 tokens"""
BUDGET = 40
PAD = 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, is_visible: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        scores = (query @ key.transpose(1, 2)).masked_fill(~is_visible, -torch.inf)
        return x + torch.tanh(self.out(scores.softmax(-1) @ value))


class Reader(nn.Module):
    """Attends to all tokens that come earlier, or to all; the loss is the model's own if it is given labels."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head, self.is_causal = nn.Linear(WIDTH, VOCABULARY), is_causal

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        length = input_ids.shape[1]
        places = torch.arange(length) if position_ids is None else position_ids
        x = self.words(input_ids) + self.places(places)
        is_visible = torch.ones(length, length, dtype=torch.bool)
        is_visible = (is_visible.tril() if self.is_causal else is_visible).expand(len(x), -1, -1)
        if attention_mask is not None:
            # A padded position sees itself, or its softmax would be of nothing.
            is_visible = (is_visible & attention_mask[:, None].bool()) | torch.eye(length, dtype=torch.bool)
        for block in self.blocks:
            x = block(x, is_visible)
        logits = self.head(x)
        if labels is None:
            return logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def padded(lengths: tuple[int, ...] = LENGTHS, is_left: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Samples of these lengths as collators give them."""
    width = max(lengths)
    places = torch.arange(width)
    mask = places < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if is_left else mask
    words = tokens(len(lengths), width, seed=seed).masked_fill(~mask, PAD)
    given = {"input_ids": words, "attention_mask": mask.long(), "labels": words.masked_fill(~mask, -100)}
    return {**given, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if is_left else given


PLANS: dict[Any, penstock.Plan] = {}
"""by what they depend on: the values of weights and tokens do not count"""


def pipeline(model: Reader, batch: dict[str, Tensor], schedule: str = "1f1b", **options: Any) -> penstock.Pipeline:
    key = (type(model), model.is_causal, *((name, tensor.shape) for name, tensor in batch.items()), schedule)
    if key not in PLANS:
        PLANS[key] = quick_plan(model, (), batch, ranks=2, microbatches=2, schedule=schedule)
    return penstock.Pipeline(model, PLANS[key], **{"local": True, **options})


@pytest.mark.parametrize("budget", some([40, 200, 10_000], [40, 64, 200, 10_000]))
def test_any_budget_gives_the_gradients_of_the_whole_batch(budget: int) -> None:
    plain, model = seeded(Reader()), seeded(Reader())
    pipe = pipeline(model, padded())
    for seed in range(3):
        # Another order of the lengths, and in the last batch other lengths.
        batch = padded(LENGTHS[seed:] + LENGTHS[:seed] if seed < 2 else (8, 8, 31, 1, 17), seed=seed)
        result = pipe.step(**batch, budget_tokens=budget)
        expected = WholeModel(plain).step(**batch).loss
        assert_close(values(model, [result.loss]), values(plain, [expected]))
        samples = sorted(sample for group in result.groups for sample in group.samples)
        assert samples == list(range(len(batch["labels"])))
        assert max(group.tokens for group in result.groups) <= budget
        assert float(pipe.evaluate(**batch, budget_tokens=budget).loss) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    "schedule", some(["interleaved", "zb_h1", "dualpipe_v"], ["gpipe", "interleaved", "zb_h1", "dualpipe_v"])
)
def test_the_schedule_of_the_plan_runs_with_as_many_microbatches_as_groups(schedule: str) -> None:
    plain, model, batch = seeded(Reader()), seeded(Reader()), padded()
    pipe = pipeline(model, batch, schedule)
    result = pipe.step(**batch, budget_tokens=BUDGET)
    assert len(result.groups) > pipe.plan.num_microbatches
    assert_close(values(model, [result.loss]), values(plain, [WholeModel(plain).step(**batch).loss]))


@pytest.mark.parametrize("lengths", [LENGTHS, (8, 16, 40, 24, 8)], ids=["any", "multiples"])
def test_padding_on_the_left_is_cut_off_too(lengths: tuple[int, ...]) -> None:
    plain, model, batch = seeded(Reader()), seeded(Reader()), padded(lengths, is_left=True)
    result = pipeline(model, batch).step(**batch, budget_tokens=BUDGET)
    assert_close(values(model, [result.loss]), values(plain, [WholeModel(plain).step(**batch).loss]))
    assert min(group.length for group in result.groups) <= 16


def test_a_sample_of_padding_only_keeps_one_position_on_either_side() -> None:
    mask = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for given, is_left in ((mask, True), (mask.flip(1), False)):
        batch = {"input_ids": given, "attention_mask": given, "labels": given.masked_fill(given == 0, -100)}
        padding = find_padding(BatchSplitter(Reader().forward).whole(Batch((), batch)))
        assert padding.is_left == is_left
        # On the left, one position of padding is kept.
        assert padding.lengths == ((1, 4, 5) if is_left else (1, 3, 5))


def weighted_loss(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, VOCABULARY, dtype=torch.float64)
    return functional.cross_entropy(output.transpose(1, 2), target, weight)


def samples_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples of the mean over the labels of each."""
    losses = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (losses.sum(1) / (target != -100).sum(1)).mean()


@pytest.mark.parametrize("loss_fn", [token_loss, weighted_loss, samples_loss], ids=lambda function: function.__name__)
def test_labels_alone_show_the_padding_of_a_causal_model(loss_fn: Any) -> None:
    plain, model, batch = seeded(Reader()), seeded(Reader()), padded()
    words, target = batch["input_ids"], batch["labels"]
    pipe = pipeline(model, {"input_ids": words}, loss_fn=loss_fn)
    for _ in range(3):
        result = pipe.step(words, target=target, budget_tokens=BUDGET)
        expected = WholeModel(plain, loss_fn).step(words, target=target).loss
        assert_close(values(model, [result.loss]), values(plain, [expected]))


def all_positions_loss(output: Tensor, target: Tensor) -> Tensor:
    """Divides by the number of all positions, those of the padding included."""
    return functional.cross_entropy(output.transpose(1, 2), target, reduction="sum") / target.numel()


def test_a_loss_that_depends_on_padding_is_refused() -> None:
    model, batch = seeded(Reader()), padded()
    pipe = pipeline(model, {"input_ids": batch["input_ids"]}, loss_fn=all_positions_loss)
    with pytest.raises(penstock.RunError, match="cutting off padding changes the loss"):
        pipe.step(batch["input_ids"], target=batch["labels"], budget_tokens=BUDGET)


def test_a_model_that_reads_padding_is_refused() -> None:
    batch = padded()
    del batch["attention_mask"]
    with pytest.raises(penstock.RunError, match="cutting off padding changes the loss"):
        pipeline(seeded(Reader(is_causal=False)), batch).step(**batch, budget_tokens=BUDGET)
    without_positions = padded(is_left=True)
    del without_positions["position_ids"]
    with pytest.raises(penstock.RunError, match="cutting off padding changes the loss"):
        pipeline(seeded(Reader()), without_positions).step(**without_positions, budget_tokens=BUDGET)


def test_labels_that_count_in_the_padding_are_found_in_a_later_batch() -> None:
    batch = padded()
    pipe = pipeline(seeded(Reader()), batch)
    pipe.step(**batch, budget_tokens=BUDGET)
    with pytest.raises(penstock.RunError, match="cutting off padding changes the loss"):
        pipe.step(**{**batch, "labels": batch["input_ids"]}, budget_tokens=BUDGET)


MIXED = torch.ones(len(LENGTHS), 40, dtype=torch.long)
MIXED[0, 0] = MIXED[1, -1] = 0
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing shows lengths": ({"attention_mask": None, "labels": None}, {}, "a mask or labels that show the length"),
    "budget": ({}, {"budget_tokens": 39}, "at least the length of the longest sample"),
    "not a number": (
        {},
        {"budget_tokens": 0.5},
        "budget_tokens must be a whole number, 1 or more",
    ),
    "outputs": ({}, {"return_outputs": True}, "does not combine with return_outputs"),
    "both sides": ({"attention_mask": MIXED}, {}, "padded on the same side"),
    "no mask of 0 and 1": ({"attention_mask": 2 * MIXED}, {}, "a mask must be 0 or 1"),
    "positions of all samples": (
        {"position_ids": torch.arange(40)},
        {},
        "has the length of the sequence in dimension 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_batches_whose_padding_is_not_understood_are_refused(mistake: str) -> None:
    changes, options, text = MISTAKES[mistake]
    batch = {name: value for name, value in {**padded(), **changes}.items() if value is not None}
    model = seeded(Reader())
    pipe = pipeline(model, padded())
    with pytest.raises(penstock.RunError, match=text):
        pipe.step(**batch, **{"budget_tokens": BUDGET, **options})
    assert all(parameter.grad is None for parameter in model.parameters())


class Penalised(Reader):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        penstock.add_loss(self.head.weight.square().mean())
        return super().forward(input_ids, attention_mask, labels)


def test_added_losses_are_refused() -> None:
    batch = padded()
    with pytest.raises(penstock.RunError, match="does not combine with add_loss"):
        pipeline(seeded(Penalised()), batch).step(**batch, budget_tokens=BUDGET)


def steps_on_ranks(inputs: str) -> tuple[list[Tensor], Any]:
    model, losses = seeded(Reader()), []
    pipe = pipeline(model, padded(), local=False, inputs=inputs)
    for seed in range(3):
        is_given = inputs == "all" or torch.distributed.get_rank() == 0
        batch = padded(LENGTHS[seed:] + LENGTHS[:seed], seed=seed) if is_given else {}
        losses.append(pipe.step(**batch, budget_tokens=BUDGET).loss)
    return losses, values(pipe)


@pytest.mark.gloo
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_ranks_run_the_same_groups(inputs: str, pools: Pools) -> None:
    plain = seeded(Reader())
    batches = [padded(LENGTHS[seed:] + LENGTHS[:seed], seed=seed) for seed in range(3)]
    expected = [WholeModel(plain).step(**batch).loss for batch in batches]
    ranks = pools[2].run(steps_on_ranks, inputs)
    for losses, _ in ranks:
        assert_close(dict(enumerate(losses)), dict(enumerate(expected)))
    assert_parts_close([found for _, found in ranks], plain)


def steps_of_replicas() -> tuple[list[Tensor], Any, list[int]]:
    model, losses, counts = seeded(Reader()), [], []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = pipeline(model, padded(LONG_FIRST), local=False, mesh=mesh)
    for seed in range(2):
        own = pipe.share(**padded(LONG_FIRST, seed=seed), budget_tokens=BUDGET)
        result = pipe.step(**own.kwargs, budget_tokens=BUDGET)
        losses.append(result.loss)
        counts.append(sum(group.tokens for group in result.groups))
    return losses, values(pipe), counts


@pytest.mark.gloo
def test_replicas_get_equally_many_tokens(pools: Pools) -> None:
    plain = seeded(Reader())
    expected = [WholeModel(plain).step(**padded(LONG_FIRST, seed=seed)).loss for seed in range(2)]
    ranks = pools[4].run(steps_of_replicas)
    for losses, _, _ in ranks:
        assert_close(dict(enumerate(losses)), dict(enumerate(expected)))
    assert_parts_close([found for _, found, _ in ranks[:2]], plain)
    assert [counts for _, _, counts in ranks] == [[sum(LONG_FIRST) // 2] * 2] * 4


def test_fit_takes_a_budget() -> None:
    plain, model = seeded(Reader()), seeded(Reader())
    batches = [padded(seed=seed) for seed in range(2)]
    pipe = pipeline(model, batches[0])
    make = partial(torch.optim.SGD, lr=0.1)
    run = penstock.fit(pipe, batches, make(model.parameters()), penstock.TrainOptions(budget_tokens=BUDGET))
    optimizer, losses = make(plain.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(float(WholeModel(plain).step(**batch).loss))
        optimizer.step()
    assert run.losses == pytest.approx(losses, rel=1e-12)
    assert run.trace.program.num_microbatches > pipe.plan.num_microbatches
