"""Batches of many lengths: exact at every length, recorded with one forward each, and kept in bounded memory."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capture import Recording, capture, without_cache
from penstock.partitioners import uniform
from tests.parity import Batch, StagedModel, Values, WholeModel, assert_close, assert_parts_close, difference, one_step
from tests.parity import values as all_values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import some
from tests.small_models import WIDTH, noise, seeded, tied, token_loss, tokens
from tests.zoo import ZOO

LENGTHS = (8, 3, 12, 1, 13, 8)
MOST = 16


class Between(nn.Module):
    """Blocks with a function of the activations between them."""

    def __init__(self, between: Callable[["Between", Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mask", torch.ones(MOST, MOST).tril())
        self.positions = nn.Parameter(torch.randn(MOST, WIDTH))
        self.between = between
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """One number per sample, and so of the same shape for every length."""
        for block in self.blocks:
            x = torch.tanh(block(self.between(self, x)))
        return x.flatten(1).sum(1)


def branch_on_length(model: Between, x: Tensor) -> Tensor:
    return -x if x.shape[1] > 8 else x


def branch_on_one_length(model: Between, x: Tensor) -> Tensor:
    return x * 2 if len(x[0]) == 13 else x


def odd_lengths_are_detached(model: Between, x: Tensor) -> Tensor:
    return x + (x.detach() if x.size(1) % 2 else x)


def first_half(model: Between, x: Tensor) -> Tensor:
    half = x[:, : x.shape[1] // 2]
    return torch.cat([half * 2, x[:, half.shape[1] :]], 1)


def closure(model: Between, x: Tensor) -> Tensor:
    length = x.shape[1]
    scaled = partial(lambda factor, tensor: tensor * factor + length % 5, length)
    return scaled(x)


def arange(model: Between, x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1) / x.shape[1]


def learned_positions(model: Between, x: Tensor) -> Tensor:
    return x + model.positions[: x.shape[1]]


def expand(model: Between, x: Tensor) -> Tensor:
    return x * torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[None, :, None].expand(len(x), -1, WIDTH)


def flat(model: Between, x: Tensor) -> Tensor:
    wide = x.reshape(-1, x.shape[1] * WIDTH)
    return wide.cumsum(1).view(-1, x.shape[1], WIDTH)


def scale(model: Between, x: Tensor) -> Tensor:
    return x * x.shape[1] ** -0.5


def loop(model: Between, x: Tensor) -> Tensor:
    state, outputs = x[:, 0], []
    for position in range(x.shape[1]):
        state = state / 2 + x[:, position]
        outputs.append(state)
    return torch.stack(outputs, 1)


def causal_buffer(model: Between, x: Tensor) -> Tensor:
    length = x.shape[1]
    return model.mask[:length, :length].to(x.dtype) @ x / length


def window(model: Between, x: Tensor) -> Tensor:
    place = torch.arange(x.shape[1])
    distance = place[:, None] - place
    return ((distance >= 0) & (distance < 4)).to(x.dtype) @ x


def slopes(model: Between, x: Tensor) -> Tensor:
    return x + torch.tensor([2.0**-place for place in range(x.shape[1])], dtype=x.dtype).unsqueeze(-1)


def chunks(model: Between, x: Tensor) -> Tensor:
    return torch.cat([chunk - chunk.mean(1, keepdim=True) for chunk in x.split(4, 1)], 1)


def roll(model: Between, x: Tensor) -> Tensor:
    return x.roll(x.shape[1] % 3, 1 + x.shape[1] % 2)


def view_or_copy(model: Between, x: Tensor) -> Tensor:
    other = x.transpose(1, 2).reshape(len(x), WIDTH, -1)
    return other.mul(2).transpose(1, 2)


def written(model: Between, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, x.shape[1] // 3 :] *= 0.5
    return x


BETWEEN = (
    branch_on_length,
    branch_on_one_length,
    odd_lengths_are_detached,
    first_half,
    closure,
    arange,
    learned_positions,
    expand,
    flat,
    scale,
    loop,
    causal_buffer,
    window,
    slopes,
    chunks,
    roll,
    view_or_copy,
    written,
)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("between", BETWEEN, ids=lambda function: function.__name__)
def test_sizes_that_python_uses_between_blocks_are_those_of_the_batch(between: Any, is_whole: bool) -> None:
    plain, model = (seeded(Between(between)) for _ in range(2))
    plan = quick_plan(model, (noise(4, LENGTHS[0], WIDTH),), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mean_square, local=True)
    for number, length in enumerate(LENGTHS if is_whole else LENGTHS[-2:]):
        x, target = noise(4, length, WIDTH, seed=number), noise(4, seed=number + 1)
        expected = WholeModel(plain, mean_square).step(x, target=target).loss
        assert_close(all_values(model, [pipe.step(x, target=target).loss]), all_values(plain, [expected]))


@pytest.mark.parametrize(
    "name", some(("bloom", "gemma3"), ["llama", "gpt2", "bloom", "mistral", "gemma3", "modernbert"])
)
def test_models_are_exact_at_every_length(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    captured = capture(model, args, kwargs)
    partition = uniform(captured.graph, 2)
    for length in (17, 30, 2):
        given = {"input_ids": tokens(2, length), "labels": tokens(2, length, seed=1)}
        batch = Batch((), without_cache(model, given), True)
        expected = one_step(WholeModel(model), batch)
        assert difference(one_step(StagedModel(captured, partition), batch), expected).size == 0.0, length


def test_another_length_runs_the_model_once() -> None:
    model, calls = seeded(Between(arange)), []
    captured = capture(model, (noise(4, 8, WIDTH),))
    forward = nn.Linear.forward

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append(x.shape[1])
        return forward(self, x)

    with mock.patch.object(nn.Linear, "forward", counted):
        captured.recording((noise(4, 9, WIDTH),), {})
        captured.recording((noise(4, 9, WIDTH),), {})
    assert calls == [9] * len(model.blocks)


def test_a_length_with_other_calls_is_recorded_like_the_first() -> None:
    def random_at_some_lengths(model: Between, x: Tensor) -> Tensor:
        model.num_calls += x.shape[1] > 8
        return x * model.num_calls + torch.ones(()) if x.shape[1] > 8 else x * 1

    captured = capture(seeded(Between(random_at_some_lengths)), (noise(4, 8, WIDTH),))
    with pytest.raises(penstock.CaptureError, match="runs differently each time"):
        captured.recording((noise(4, 9, WIDTH),), {})


def num_recordings() -> int:
    gc.collect()
    return sum(isinstance(thing, Recording) for thing in gc.get_objects())


def test_nothing_is_kept_of_lengths_that_were_used_long_ago() -> None:
    with mock.patch("penstock.capture.lru_cache.MAX_RECORDINGS", 3):
        model, plain, kept = tied(), tied(), []
        plan = quick_plan(model, (tokens(4, 6),), ranks=2, microbatches=2, schedule="1f1b")
        pipe = penstock.Pipeline(model, plan, loss_fn=token_loss, local=True)
        for lengths in (range(1, 6), range(6, 11), (3, 5)):
            for length in lengths:
                x, target = tokens(4, length), tokens(4, length, seed=1)
                WholeModel(plain, token_loss).step(x, target=target)
                pipe.step(x, target=target)
                pipe.eval(x, target=target)
            kept.append(num_recordings())
    assert_close(all_values(model), all_values(plain))
    assert max(kept) == kept[0]


def sent_lengths(lengths: tuple[int, ...]) -> tuple[list[Tensor], Values, int]:
    """The losses, the state of this rank, and how many recordings it keeps; only rank 0 is given the batches."""
    with mock.patch("penstock.capture.lru_cache.MAX_RECORDINGS", 3):
        model = tied()
        plan = quick_plan(model, (tokens(4, 6),), ranks=2, microbatches=2, schedule="1f1b")
        pipe = penstock.Pipeline(model, plan, loss_fn=token_loss, inputs="first")
        is_first, losses, before = torch.distributed.get_rank() == 0, [], num_recordings()
        for length in lengths:
            x, target = tokens(4, length), tokens(4, length, seed=1)
            losses.append((pipe.step(x, target=target) if is_first else pipe.step()).loss)
        return losses, all_values(pipe), num_recordings() - before


@pytest.mark.gloo
def test_ranks_that_are_sent_their_batches_forget_the_same_lengths(pools: Pools) -> None:
    lengths, plain = (6, 2, 3, 6, 4, 5, 2, 6, 7, 3, *range(8, 16)), tied()
    expected = [
        WholeModel(plain, token_loss).step(tokens(4, length), target=tokens(4, length, seed=1)).loss
        for length in lengths
    ]
    ranks = pools[2].run(sent_lengths, lengths)
    for losses, _, kept in ranks:
        assert_close(dict(enumerate(losses)), dict(enumerate(expected)))
        # Several caches of three entries each, which need not hold the same ones.
        assert kept < len(set(lengths)) - 3
    assert_parts_close([found for _, found, _ in ranks], plain)
