"""A plan may split the output layer along the vocabulary: losses, gradients and checkpoints are those of the model."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.capture import shard_vocabulary
from penstock.errors import CaptureError, PlanError, RunError
from penstock.ir import DeviceSpeed
from tests.parity import Execution, Values, assert_close
from tests.process_pool import Pools
from tests.runtime.test_replicas import mesh, share
from tests.small_models import VOCABULARY, WIDTH, seeded, tokens

STEPS = 5
RANKS = 2
QUICK: dict[str, Any] = {"ranks": RANKS, "microbatches": 3, "budget_seconds": 0.1}


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


@cache
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


def trained(
    pipe: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS, given: tuple[Tensor, ...] = batch()
) -> list[tuple[Tensor, Tensor]]:
    """Losses and gradient norms of some steps."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipe.step(*given).loss
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


def replicated(plan: penstock.Plan, is_tied: bool) -> Values:
    """Losses, norms and parameters of one rank of two replicas, which have four and two samples of a batch."""
    pipe = penstock.Pipeline(seeded(Words(is_tied)), plan, mesh=mesh())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    results = trained(pipe, optimizer, STEPS, tuple(share(tensor, (4, 2)) for tensor in batch()))
    values = {f"state {name}": value for name, value in pipe.full_state_dict(everywhere=True).items()}
    for step, (loss, norm) in enumerate(results):
        values |= {f"loss {step}": loss, f"norm {step}": norm}
    return values


@pytest.mark.gloo
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_replicas_train_like_the_whole_model(pools: Pools, is_tied: bool) -> None:
    expected = unsplit(is_tied)
    for values in pools[4].run(replicated, planned(is_tied), is_tied):
        assert_close(values, expected)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_has_the_original_names_for_any_plan(is_tied: bool, tmp_path: Path) -> None:
    expected = unsplit(is_tied)
    split(planned(is_tied), is_tied, tmp_path / "sharded", "local")
    split(planned(is_tied, None), is_tied, tmp_path / "whole", "local")
    other = penstock.plan(seeded(Words(is_tied)), batch(), vocabulary_shards=5, **QUICK)
    for written, plan in (("sharded", planned(is_tied, None)), ("sharded", other), ("whole", planned(is_tied))):
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
        penstock.plan(model, batch(), vocabulary_shards=1, **QUICK)


def test_auto_leaves_an_output_layer_whole_that_cannot_be_split() -> None:
    plan = penstock.plan(seeded(Words(False)), batch()[:1], vocabulary_shards="auto", **QUICK)
    assert "is whole: a split output layer has no whole logits" in plan.search.reasons[-1]


def test_a_loss_fn_counts_in_the_plan_with_the_whole_output_layer_too() -> None:
    words, labels = batch()

    def costly(logits: Tensor, labels: Tensor) -> Tensor:
        for _ in range(8):
            logits = logits.mul(1.0)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    given = {"loss_fn": costly, "target": labels, "speed": DeviceSpeed(1e15, 1e9), "schedule": "1f1b"}
    plans = {
        shards: penstock.plan(seeded(Words(False)), (words,), vocabulary_shards=shards, **QUICK, **given)
        for shards in (None, "auto")
    }
    whole, chosen = (plans[shards].predicted.makespan for shards in (None, "auto"))
    assert "is split into 2 shards" in plans["auto"].search.reasons[-1]
    assert whole > chosen
    without = penstock.plan(seeded(Words(False)), (words,), **QUICK, **given | {"target": None})
    assert whole > without.predicted.makespan


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_mixed_precision_and_recomputation_are_exact_to_rounding(recompute: str) -> None:
    model = seeded(Words(True)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = penstock.plan(model, batch(), vocabulary_shards=3, recompute=recompute, **QUICK)
        report = penstock.check(model, plan, batch())
    assert report.ok, report


def test_a_microbatch_may_have_no_label_that_counts() -> None:
    words, labels = batch()
    labels[:2] = -100
    report = penstock.check(seeded(Words(True)), planned(True), (words, labels))
    assert report.ok, report
    assert report.whole is not None


def test_outputs_have_none_in_place_of_logits() -> None:
    pipe = penstock.Pipeline(seeded(Words(False)), planned(False), local=True)
    result = pipe.evaluate(*batch(), return_outputs=True)
    assert result.outputs[1] is None
    assert_close({"loss": result.loss}, {"loss": seeded(Words(False))(*batch())[0].detach()})


def test_calls_that_need_logits_are_refused() -> None:
    words, labels = batch()
    with pytest.raises(CaptureError, match="has no whole logits"):
        penstock.plan(seeded(Words(False)), (words,), vocabulary_shards=2, **QUICK)
    with pytest.raises(CaptureError, match="has no whole logits"):
        penstock.Pipeline(seeded(Words(False)), planned(False), local=True).evaluate(words)
    given = {"loss_fn": smoothed, "target": labels.clamp(min=0)}
    plan = penstock.plan(seeded(Words(False)), (words,), vocabulary_shards=2, **QUICK, **given)
    pipe = penstock.Pipeline(seeded(Words(False)), plan, loss_fn=smoothed, local=True)
    with pytest.raises(RunError, match="has no whole logits"):
        pipe.step(words, target=given["target"], return_outputs=True)
    with pytest.raises(RunError, match="needs a target"):
        pipe.evaluate(words)
    with pytest.raises(RunError, match="does not combine with a loss_fn"):
        pipe.forward(words)


def test_two_cross_entropies_of_the_same_logits_are_refused() -> None:
    def halves(logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.flatten(0, 1), labels.flatten()
        return sum(functional.cross_entropy(*(each[part] for each in rows)) for part in (slice(0, 4), slice(4, 10)))

    words, labels = batch()
    with pytest.raises(CaptureError, match=r"only if one cross entropy .*found: 2"):
        penstock.plan(seeded(Words(False)), (words,), loss_fn=halves, target=labels, vocabulary_shards=2, **QUICK)


def test_outputs_besides_the_loss_may_come_from_other_layers() -> None:
    class Encoding(Words):
        def forward(self, words: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(words, labels)[0], self.layers[0](self.embedding(words))

    plan = penstock.plan(seeded(Encoding(False)), batch(), vocabulary_shards=2, **QUICK)
    assert plan.partition.stage_of("head.shards.1") >= 0


def test_a_forward_that_was_replaced_is_refused() -> None:
    model = seeded(Words(False))
    model.forward = model.forward
    with pytest.raises(CaptureError, match="forward of the model is that of its class"):
        penstock.plan(model, batch(), vocabulary_shards=2, **QUICK)


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


def test_a_shard_shows_its_first_and_last_token() -> None:
    split = shard_vocabulary(seeded(Words(False)), "head", 2)
    assert "tokens 0 to 5 of 11" in repr(split)
    assert "tokens 6 to 10 of 11" in repr(split)
