"""A batch reaches the stages that need it, given to every rank or to the first one only; different ones are refused."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.runtime import inputs as runtime_inputs
from tests.parity import Values, WholeModel, assert_close, assert_parts_close, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import VOCABULARY, WIDTH, Block, noise, seeded, token_loss, tokens


class Masked(nn.Module):
    """The tokens are read first, a mask by every block, a bias at the end; a mask of ones takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        """Scores for the next token."""
        x = self.embed(ids)
        is_masked = not bool(mask.all())
        for block in self.blocks:
            x = block(x)
            if is_masked:
                x = x * mask.unsqueeze(-1)
        return self.head(x) + bias.unsqueeze(-1)


Batch = tuple[tuple[Tensor, Tensor, Tensor], Tensor]


def batch(rows: int, length: int, seed: int, is_masked: bool = True) -> Batch:
    ids, target = tokens(rows, length, seed=seed), tokens(rows, length, seed=seed + 1)
    mask = (tokens(rows, length, seed=seed + 2) > 2) | (not is_masked)
    return (ids, mask.double(), ids.double() / 7), target


BATCHES = [batch(6, 5, 0), batch(6, 5, 10), batch(6, 5, 20, is_masked=False), batch(3, 4, 30), batch(6, 5, 40)]


def masked_pipe(ranks: int = 3, **options: Any) -> Any:
    model = seeded(Masked())
    plan = quick_plan(model, BATCHES[0][0], ranks=ranks, microbatches=3, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=token_loss, **options)


def given_to_the_first(batches: list[Batch]) -> tuple[list[Tensor], Values]:
    """Losses of training and evaluation, and what this rank holds; only rank 0 has a look at the batches."""
    pipe, losses = masked_pipe(inputs="first"), []
    for inputs, target in batches:
        given = (inputs, target) if dist.get_rank() == 0 else ((), None)
        losses += [call(*given[0], target=given[1]).loss for call in (pipe.step, pipe.eval)]
    return losses, values(pipe)


@pytest.mark.gloo
def test_only_the_first_rank_needs_the_batch(pools: Pools) -> None:
    plain, expected = seeded(Masked()), []
    for inputs, target in BATCHES:
        expected.append(WholeModel(plain, token_loss).step(*inputs, target=target).loss)
        expected.append(token_loss(plain.eval()(*inputs), target).detach())
        plain.train()
    results = pools[3].run(given_to_the_first, BATCHES)
    assert_parts_close([part for _, part in results], plain)
    for losses, _ in results:
        assert_close(dict(enumerate(losses)), dict(enumerate(expected)))


def target_given_to_the_last(batches: list[Batch]) -> tuple[list[Tensor], Values]:
    """As above, but the last rank has the targets."""
    pipe, losses, rank = masked_pipe(inputs="first"), [], dist.get_rank()
    for inputs, target in batches:
        given, own = inputs if rank == 0 else (), target if rank == 2 else None
        losses += [call(*given, target=own).loss for call in (pipe.step, pipe.eval)]
    return losses, values(pipe)


@pytest.mark.gloo
def test_the_last_rank_may_have_the_target(pools: Pools) -> None:
    plain, expected = seeded(Masked()), []
    for inputs, target in BATCHES:
        expected.append(WholeModel(plain, token_loss).step(*inputs, target=target).loss)
        expected.append(token_loss(plain.eval()(*inputs), target).detach())
        plain.train()
    results = pools[3].run(target_given_to_the_last, BATCHES)
    assert_parts_close([part for _, part in results], plain)
    for losses, _ in results:
        assert_close(dict(enumerate(losses)), dict(enumerate(expected)))


class SelfScoring(Masked):
    """Computes its loss from a target."""

    def forward(  # type: ignore[override]
        self, ids: Tensor, mask: Tensor, bias: Tensor, target: Tensor | None = None, factor: float | None = None
    ) -> Tensor:
        """The loss."""
        return token_loss(super().forward(ids, mask, bias), target) * (factor or 1.0)


def misplaced_arguments() -> list[str]:
    """The errors when ranks other than the first have arguments that are not used."""
    (ids, mask, bias), target = BATCHES[0]
    rank, pipe, other = dist.get_rank(), masked_pipe(inputs="first"), (target + 1) % VOCABULARY
    own, scoring = seeded(SelfScoring()), {"target": target}
    plan = quick_plan(own, (ids, mask, bias), scoring, ranks=3, microbatches=3, schedule="1f1b")
    owner = penstock.Pipeline(own, plan, inputs="first")
    inputs = (ids, mask, bias)
    cases: list[tuple[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]]] = [
        (pipe, [(inputs, {}), ((), {"target": target}), ((), {})]),
        (owner, [(inputs, {"target": target}), ((), {}), ((), {"factor": 2.0})]),
        (pipe, [(inputs, {"target": target}), ((), {}), ((), {"target": other})]),
        (pipe, [((), {}), ((), {}), ((), {"target": target})]),
        (pipe, [(inputs, {"target": target}), ((), {}), ((), {"target": target})]),
        (owner, [(inputs, {}), ((), {}), ((), {"target": target})]),
        (masked_pipe(), [(inputs, {}), ((), {}), ((), {"target": target})]),
    ]
    return [refused(each, *calls[rank][0], **calls[rank][1]) for each, calls in cases]


@pytest.mark.gloo
def test_arguments_that_another_rank_than_the_first_has_are_refused_by_all(pools: Pools) -> None:
    first, second, third = pools[3].run(misplaced_arguments)
    problems = [[text.partition(" (")[0] for text in found] for found in (first, second, third)]
    assert problems[0] == problems[1] == problems[2]
    middle, argument, other, nothing, same, scoring, without_batch = first
    assert "rank: 1, names: ['target']" in middle
    assert "only target may be passed on rank 2 instead" in middle
    assert "rank: 2, names: ['factor']" in argument
    assert other.startswith("rank 0 and the rank of the last stage must be given the same target")
    assert nothing.startswith('with inputs="first" rank 0 must be given the batch')
    assert same == "not refused"
    assert "the model gets the arguments of rank 0 only: pass all of them there" in scoring
    assert without_batch.startswith("every rank must be given the batch")
    assert 'inputs="first"' in without_batch


def bytes_sent() -> list[list[int]]:
    """The bytes of two batches of equal shapes that rank 0 sends to each of the others."""
    pipe, sent, send = masked_pipe(inputs="first"), [], runtime_inputs.send_tensors

    def counting(groups: Any, tensors: list[Tensor], needed_by: Any) -> None:
        places = [range(len(tensors)) if needed_by(rank) is None else needed_by(rank) for rank in (1, 2)]
        sent.append([sum(tensors[place].nbytes for place in one) for one in places])
        send(groups, tensors, needed_by)

    with mock.patch.object(runtime_inputs, "send_tensors", counting):
        for given, target in BATCHES[:2]:
            pipe.step(*(given if dist.get_rank() == 0 else ()), target=target if dist.get_rank() == 0 else None)
    return sent


@pytest.mark.gloo
def test_only_the_inputs_that_a_rank_reads_are_sent_after_the_first_batch(pools: Pools) -> None:
    (new, known), *_ = pools[3].run(bytes_sent)
    (ids, mask, bias), target = BATCHES[0]
    everything = ids.nbytes + mask.nbytes + bias.nbytes + target.nbytes
    assert new == [everything, everything]
    assert known == [mask.nbytes, mask.nbytes + bias.nbytes + target.nbytes]


class Captioned(Masked):
    """Is given a list with a dict for each sample, and the tokens of all captions in one tensor."""

    def forward(self, ids: Tensor, labels: list[dict[str, Tensor]], captions: Tensor, lengths: Tensor) -> Tensor:
        """Scores for the next token."""
        x = self.embed(ids)
        means = torch.stack([part.mean(0) for part in self.embed(captions).split(lengths.tolist())])
        for block in self.blocks:
            x = block(x) + means.unsqueeze(1)
        return self.head(x) * torch.stack([label["scale"].sum() for label in labels])[:, None, None]


def captioned_batch(seed: int) -> dict[str, Any]:
    labels = [{"scale": noise(2, seed=seed + place)} for place in range(6)]
    lengths, captions = torch.tensor([1, 2, 1, 3, 2, 3]).roll(seed), tokens(1, 12, seed=seed)[0]
    return {"ids": tokens(6, 5, seed=seed), "labels": labels, "captions": captions, "lengths": lengths}


def captions_given_to_the_first() -> tuple[list[Tensor], Values]:
    """The losses of batches of equal shapes but other lengths, and what this rank holds."""
    model, target = seeded(Captioned()), tokens(6, 5, seed=9)
    split = {"captions": penstock.Ragged("lengths")}
    plan = quick_plan(model, (), captioned_batch(0), ranks=2, microbatches=3, schedule="1f1b", split=split)
    pipe, losses = penstock.Pipeline(model, plan, loss_fn=token_loss, inputs="first"), []
    for seed in (0, 1, 0):
        given, own = (captioned_batch(seed), target) if dist.get_rank() == 0 else ({}, None)
        losses.append(pipe.step(**given, target=own).loss)
    return losses, values(pipe)


@pytest.mark.gloo
def test_lists_and_ragged_tensors_reach_the_ranks_that_need_them(pools: Pools) -> None:
    plain, target = seeded(Captioned()), tokens(6, 5, seed=9)
    whole = WholeModel(plain, token_loss)
    expected = [whole.step(**captioned_batch(seed), target=target).loss for seed in (0, 1, 0)]
    results = pools[2].run(captions_given_to_the_first)
    assert_parts_close([part for _, part in results], plain)
    for losses, _ in results:
        assert_close(dict(enumerate(losses)), dict(enumerate(expected)))


def refused(pipe: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the error that a step raises."""
    try:
        pipe.step(*args, **kwargs)
    except penstock.PenstockError as error:
        return str(error)
    return "not refused"


def other_batches() -> list[str]:
    """The errors when the last rank has another batch, target, shape, or number of samples."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    (ids, mask, bias), target = BATCHES[0]
    other = (ids + 1) % VOCABULARY
    cases = [
        ((other if is_last else ids, mask, bias), target),
        ((ids, mask, bias), other if is_last else target),
        ((ids[:, :4], mask[:, :4], bias[:, :4]), target[:, :4]) if is_last else ((ids, mask, bias), target),
        ((ids[:4], mask[:4], bias[:4]), target[:4]) if is_last else ((ids, mask, bias), target),
    ]
    return [refused(masked_pipe(2), *inputs, target=wanted) for inputs, wanted in cases]


@pytest.mark.gloo
def test_every_rank_refuses_a_batch_that_another_does_not_have(pools: Pools) -> None:
    first, second = pools[2].run(other_batches)
    assert first == second
    for words, name in zip(first, ("ids", "target", "ids", "ids"), strict=True):
        assert words.startswith(f"the ranks were given different batches (step: 0, input: {name}, rank 0: int64[6, 5]")
    assert "rank 1: int64[6, 4])" in first[2]
    assert "rank 1: int64[4, 5])" in first[3]


class Scaled(nn.Module):
    """Takes a tensor and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor, times: float) -> Tensor:
        """The number is used by every block."""
        for block in self.blocks:
            x = block(x) * times + bias
        return x


def plain_numbers() -> list[str]:
    """The errors when the ranks pass arguments by position and by name, and when they pass different numbers."""
    model, x, rank = seeded(Scaled()), noise(6, WIDTH), dist.get_rank()
    plan = quick_plan(model, (x, x, 1.0), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, options=penstock.RunOptions(check_inputs_every=1))
    ways = [{"bias": x, "times": 2.0}, {"times": 2.0, "bias": x}]
    return [refused(pipe, x, target=x, **ways[rank]), refused(pipe, x, x, 2.0 + rank, target=x)]


@pytest.mark.gloo
def test_plain_values_are_compared_too_however_they_are_passed(pools: Pools) -> None:
    for accepted, words in pools[2].run(plain_numbers):
        assert accepted == "not refused"
        assert words.startswith("the ranks were given different batches")


@dataclass
class Packed:
    """An input that only its model knows."""

    x: Tensor


class Unpacking(nn.Module):
    """Takes a dataclass, a dict with None in it, and a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, packed: Packed, more: dict[str, Tensor | None], times: int) -> Tensor:
        """All of them are used by every block."""
        x = packed.x
        for block in self.blocks:
            x = block(x) * more["scale"] + times * packed.x
        return x


def test_a_batch_may_be_built_of_dataclasses_dicts_and_numbers() -> None:
    model, x = seeded(Unpacking()), noise(7, WIDTH)
    batch = (Packed(x), {"scale": noise(7, 1, seed=1), "nothing": None}, 2)
    plan = quick_plan(model, batch, ranks=2, microbatches=3, schedule="1f1b")
    found = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).step(*batch, target=x).loss
    assert_close({"loss": found}, {"loss": mse_loss(model(*batch), x).detach()})


def dataclass_refused() -> str:
    (ids, mask, bias), target = BATCHES[0]
    given = (Packed(ids), mask, bias) if dist.get_rank() == 0 else ()
    return refused(masked_pipe(2, inputs="first"), *given, target=target)


@pytest.mark.gloo
def test_every_rank_refuses_a_batch_that_cannot_be_sent(pools: Pools) -> None:
    first, second = pools[2].run(dataclass_refused)
    assert first == second
    assert "got: Packed" in first
    assert 'inputs="all"' in first


def set_on_one_rank() -> list[str]:
    """The errors after one rank sets another number of microbatches, and after it sets the old one again."""
    pipe, is_first = masked_pipe(2, inputs="first"), dist.get_rank() == 0
    (inputs, target), found = BATCHES[0] if is_first else ((), None), []
    pipe.step(*inputs, target=target)
    for count in (2, 3):
        if is_first:
            pipe.microbatches = count
        found.append(refused(pipe, *inputs, target=target))
    return found


@pytest.mark.gloo
def test_every_rank_refuses_microbatches_that_were_set_on_one_rank_only(pools: Pools) -> None:
    first, second = pools[2].run(set_on_one_rank)
    assert first == second
    assert first[0].startswith("microbatches must be the same on every rank (step: 1, rank 0: 2, ")
    problem = "number of batch shapes so far must be the same on every rank"
    assert first[1].startswith(f"{problem} (step: 1, rank 0: 0, rank 1: 1)")
