"""A plan may split the output layer along the vocabulary: losses, gradients and checkpoints are those of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.capture import shard_vocabulary
from penstock.errors import CaptureError, PlanError, RunError
from tests.parity import Execution, Values, assert_close
from tests.small_models import VOCABULARY, WIDTH, seeded, tokens

STEPS = 5
RANKS = 2


class Words(nn.Module):
    """Embeddings, two layers and an output layer, which may be tied to the embeddings."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Any:
        """The logits, or with labels the loss of the next words and the logits."""
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        logits = self.head(hidden)
        if labels is None:
            return logits
        rows = logits[..., :-1, :].reshape(-1, logits.shape[-1])
        return functional.cross_entropy(rows, labels[:, 1:].flatten()), logits


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss with every option."""
    weight = torch.linspace(0.5, 1.5, VOCABULARY, dtype=torch.float64)
    rows = logits.flatten(0, 1)
    return functional.cross_entropy(rows, labels.flatten(), weight, ignore_index=3, label_smoothing=0.1)


def batch() -> tuple[Tensor, Tensor]:
    """Words and labels, of which some are ignored."""
    words, labels = tokens(6, 5), tokens(6, 5, seed=1)
    labels[0, 1:] = -100
    return words, labels


def planned(is_tied: bool, shards: int | None = 3) -> penstock.Plan:
    """A plan in which both ranks have a shard at least."""
    stages = [["embedding", "layers.0"], ["layers.1", "head"]]
    schedule = "1f1b"
    if shards is not None:
        stages = [["embedding", "layers.0"], ["layers.1", "head.shards.1"], ["head.shards.0"]]
        stages += [["head.shards.2", "head.combine"]]
        schedule = "interleaved_zb"
    return penstock.plan(
        seeded(Words(is_tied)),
        batch(),
        ranks=RANKS,
        microbatches=3,
        schedule=schedule,
        partitioner=stages,
        vocabulary_shards=shards,
        budget_seconds=0.1,
    )


def trained(pipe: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Losses and gradient norms of some steps."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipe.step(*batch()).loss
        found.append((loss, pipe.clip_grad_norm_(0.1)))
        optimizer.step()
    return found


def unsplit(is_tied: bool) -> Values:
    """Losses, norms and parameters after training in plain PyTorch."""
    model = seeded(Words(is_tied))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.05), {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = model(*batch())
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return found | {f"state {name}": value for name, value in model.state_dict().items()}


def split(plan: penstock.Plan, is_tied: bool, directory: Path, execution: str) -> list[Values]:
    """The same with a plan; then what the last steps give after the checkpoint of an earlier one was loaded."""
    found = []
    for resumed in (False, True):
        pipe = penstock.Pipeline(seeded(Words(is_tied)), plan, local=execution == "local")
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        if resumed:
            pipe.load(directory, optimizer)
            results = trained(pipe, optimizer, 2)
        else:
            results = trained(pipe, optimizer, STEPS - 2)
            pipe.save(directory, optimizer)
            results += trained(pipe, optimizer, 2)
        values: Values = {}
        for step, (loss, norm) in enumerate(results, STEPS - len(results)):
            values |= {f"loss {step}": loss, f"norm {step}": norm}
        state = pipe.full_state_dict(everywhere=True)
        found.append(values | {f"state {name}": value for name, value in state.items()})
    return found


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_split_output_layer_trains_like_the_whole_one(execution: Execution, is_tied: bool, tmp_path: Path) -> None:
    expected = unsplit(is_tied)
    whole, resumed = execution.run(split, RANKS, planned(is_tied), is_tied, tmp_path)
    assert_close(whole, expected)
    assert_close(resumed, {name: value for name, value in expected.items() if name in resumed})


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_has_the_original_names_for_any_plan(is_tied: bool, tmp_path: Path) -> None:
    expected = unsplit(is_tied)
    split(planned(is_tied), is_tied, tmp_path / "sharded", "local")
    split(planned(is_tied, None), is_tied, tmp_path / "whole", "local")
    for written, plan in (("sharded", planned(is_tied, None)), ("whole", planned(is_tied))):
        pipe = penstock.Pipeline(seeded(Words(is_tied)), plan, local=True)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        pipe.load(tmp_path / written, optimizer)
        trained(pipe, optimizer, 2)
        state = {f"state {name}": value for name, value in pipe.state_dict().items()}
        assert_close(state, {name: value for name, value in expected.items() if name in state})


def test_a_loss_fn_with_weights_smoothing_and_ignored_labels_is_exact() -> None:
    model, (words, labels) = seeded(Words(True)), batch()
    labels[labels < 0] = 3
    plan = penstock.plan(
        model,
        (words,),
        ranks=RANKS,
        microbatches=2,
        loss_fn=smoothed,
        target=labels,
        vocabulary_shards=2,
        budget_seconds=0.1,
    )
    report = penstock.check(model, plan, (words,), loss_fn=smoothed, target=labels)
    assert report.ok, report
    assert report.whole is not None
    with pytest.raises(PlanError, match="loss_fn of the Pipeline"):
        penstock.Pipeline(model, plan, local=True)


def test_auto_splits_only_where_that_is_faster() -> None:
    model = seeded(Words(False))
    plan = penstock.plan(model, batch(), ranks=1, microbatches=2, vocabulary_shards="auto", budget_seconds=0.1)
    assert "one rank only" in plan.search.reasons[-1]
    with pytest.raises(PlanError, match="vocabulary_shards must be a whole number"):
        penstock.plan(model, batch(), ranks=2, microbatches=2, vocabulary_shards=1)


@pytest.mark.parametrize("use", [lambda logits: logits.softmax(-1), lambda logits: logits[..., :3], torch.argmax])
def test_other_uses_of_the_logits_are_refused(use: Any) -> None:
    class Using(Words):
        def forward(self, words: Tensor, labels: Tensor | None = None) -> Any:
            return use(super().forward(words))

    with pytest.raises(CaptureError, match="used for a cross entropy and nothing else"):
        shard_vocabulary(seeded(Using(False)), "head", 2)(batch()[0])


def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    model, (words, labels) = seeded(Words(False)), batch()
    pipe = penstock.Pipeline(model, planned(False), local=True)
    labels[2, 2] = VOCABULARY
    with pytest.raises(RunError, match="out of bounds"):
        pipe.step(words, labels)
