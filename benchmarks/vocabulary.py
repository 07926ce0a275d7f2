"""vocabulary: gain of a split output layer (`vocabulary_shards`) over a whole one, for 128,000 words.

The gain is the step of the best plan with a whole layer divided by the step of the best plan with shards. It is
predicted for 8 H100 on 8 nodes, and predicted and measured on ranks that sleep and on two ranks that compute. Steps
include the loss.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from benchmarks.sleeping import SIZE, SleepingBlock, sleep
from benchmarks.table import Line, Table
from benchmarks.timing import combine_ranks, load_average, run_interleaved
from penstock.capture.sharded_logits import VocabularyShard
from penstock.demo.gpt import Sizes, batch, gpt, loss

_WORDS = 128_000
_PREDICTED, _SLEEPING, _COMPUTING = 1.3, 1.4, 1.4
"""minimum gain of each table"""
_ERROR = 0.05
"""maximum relative difference of measured and predicted gain if ranks sleep; twice that if they compute"""
_LAYERS, _HEAD, _UNIT = 8, 5, 0.01
"""number of blocks, duration of the output layer in blocks (as in a model with 1B parameters), and seconds of a pass"""
_SLEEPING_WORDS = 64
_SIZES = Sizes(2, 128, 4, _WORDS, 128, 4, 4)
LossFn = Callable[[Any, Any], Tensor]


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (predicted(), sleeping(), computing())


def predicted(ranks: int = 8, microbatches: int = 32, budget_seconds: float = 20.0) -> Table:
    """The predicted step of a GPT of 1B parameters on 8 nodes, without and with shards."""

    def lines() -> Iterator[Line]:
        sizes = Sizes(16, 2048, 32, _WORDS, 2048, microbatches, microbatches)
        with torch.device("meta"):
            model = gpt(sizes).to(torch.bfloat16)
            tokens = torch.zeros(sizes.samples, sizes.length, dtype=torch.long)
        cluster = penstock.Cluster(ranks, memory="80GiB", latency=1e-5, bandwidth=50e9)
        whole, split = (
            penstock.plan(
                model,
                (tokens,),
                ranks=cluster,
                loss_fn=loss,
                target=tokens,
                microbatches=microbatches,
                device="h100",
                vocabulary_shards=shards,
                budget_seconds=budget_seconds,
            )
            for shards in (None, ranks)
        )
        seconds = [plan.predicted.makespan for plan in (whole, split)]
        gain = seconds[0] / seconds[1]
        yield Line(("1B, 8 x h100", *(f"{each:.3f}" for each in seconds), f"{gain:.3f}"), gain, _PREDICTED)

    columns = ("model", "whole", "shards", "gain")
    return Table(f"vocabulary of {_WORDS:,} words, predicted seconds per step", columns, lines())


def sleeping(ranks: int = 4, microbatches: int = 16, times: int = 3, budget_seconds: float = 10.0) -> Table:
    """Predicted and measured gain on ranks that sleep."""
    blocks = [SleepingBlock(_UNIT) for _ in range(_LAYERS)]
    model = nn.Sequential(*blocks, nn.Linear(SIZE, _SLEEPING_WORDS, bias=False))
    inputs = torch.ones(microbatches, SIZE), torch.zeros(microbatches, dtype=torch.long)
    title = f"{_LAYERS} sleeping layers and an output layer worth {_HEAD}, {ranks} ranks"
    loss_fn = functional.cross_entropy
    return _measured(title, model, inputs, loss_fn, ranks, microbatches, times, budget_seconds, sleeps=True)


def computing(sizes: Sizes = _SIZES, times: int = 3, budget_seconds: float = 10.0) -> Table:
    """Predicted and measured gain of a GPT on two ranks that compute."""
    title = (
        f"GPT with {sizes.layers} layers, d={sizes.width}, {sizes.vocabulary:,} words, two ranks with one thread each"
    )
    return _measured(title, gpt(sizes), batch(sizes), loss, 2, sizes.microbatches, times, budget_seconds, sleeps=False)


def _measured(
    title: str,
    model: nn.Module,
    inputs: tuple[Tensor, Tensor],
    loss_fn: LossFn,
    ranks: int,
    microbatches: int,
    times: int,
    budget_seconds: float,
    sleeps: bool,
) -> Table:
    """Predicted and measured seconds per step without and with shards, the gains, and their relative difference."""

    def lines() -> Iterator[Line]:
        with sleeping_head() if sleeps else ExitStack():
            plans = {
                name: penstock.plan(
                    model,
                    inputs[:1],
                    ranks=ranks,
                    microbatches=microbatches,
                    loss_fn=loss_fn,
                    target=inputs[1],
                    vocabulary_shards=shards,
                    budget_seconds=budget_seconds,
                )
                for name, shards in (("whole", None), ("shards", ranks))
            }
        steps = combine_ranks(
            penstock.launch(_steps, ranks, plans, model, inputs, loss_fn, times, sleeps), tuple(plans)
        )
        found = {name: min(step.seconds for step in steps[name]) for name in plans}
        expected = {name: plan.predicted.makespan for name, plan in plans.items()}
        gains = [seconds["whole"] / seconds["shards"] for seconds in (expected, found)]
        for name, seconds, gain in zip(("predicted", "measured"), (expected, found), gains, strict=True):
            cells = (name, f"{seconds['whole']:.3f}", f"{seconds['shards']:.3f}", load_average(), f"{gain:.3f}")
            yield Line(cells, gain, _SLEEPING if sleeps else _COMPUTING)
        error = abs(gains[1] / gains[0] - 1)
        limit = _ERROR if sleeps else 2 * _ERROR
        yield Line(("error", "", "", load_average(), f"{error:.2%}"), error, limit, at_least=False)

    return Table(f"{title}; seconds per step, minimum of {times}", ("", "whole", "shards", "load", "gain"), lines())


def _steps(
    plans: dict[str, penstock.Plan],
    model: nn.Module,
    inputs: tuple[Tensor, Tensor],
    loss_fn: LossFn,
    times: int,
    sleeps: bool,
) -> Any:
    """Measures steps of all plans on this rank, interleaved."""
    with sleeping_head() if sleeps else ExitStack():
        pipes = {name: penstock.Pipeline(model, plan, loss_fn=loss_fn) for name, plan in plans.items()}
        calls = {name: lambda pipe=pipe: pipe.step(inputs[0], target=inputs[1]) for name, pipe in pipes.items()}

        def zero_grad() -> None:
            for pipe in pipes.values():
                for parameter in pipe.parameters():
                    parameter.grad = None

        return run_interleaved(calls, times, before_each=zero_grad)


@contextmanager
def sleeping_head() -> Iterator[None]:
    """Makes output layers and their shards sleep in proportion to their words inside the context."""
    linear, shard = nn.Linear.forward, VocabularyShard.forward

    def slept(x: Tensor, words: int) -> Tensor:
        seconds = _HEAD * _UNIT * words / _SLEEPING_WORDS
        return sleep(x, seconds, 2 * seconds)

    def sleeping_linear(self: nn.Linear, x: Tensor) -> Tensor:
        return linear(self, slept(x, self.out_features) if self.out_features == _SLEEPING_WORDS else x)

    def sleeping_shard(self: VocabularyShard, hidden: Tensor, *args: Any) -> Any:
        return shard(self, slept(hidden, self.stop - self.start), *args)

    with (
        mock.patch.object(nn.Linear, "forward", sleeping_linear),
        mock.patch.object(VocabularyShard, "forward", sleeping_shard),
    ):
        yield
