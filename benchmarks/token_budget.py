"""token_budget: steps with `budget_tokens`, which groups samples of similar length, compared with steps without.

Sample lengths are lognormal. Two models are measured: passes that sleep in proportion to padded tokens on four ranks,
and a small Llama that computes on two. Compared with:

- padded: all samples of the batch padded to the longest one, as without a budget
- arrival: microbatches in the order of arrival, each padded to its own longest sample; simulated
- simulated: the same groups, with passes as long as they sleep and the overhead of the runtime that `plan` measured
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function

import penstock
from benchmarks.capture import llama
from benchmarks.table import Line, Table
from benchmarks.timing import RankTiming, combine_ranks, load_average, run_interleaved
from penstock.capture import LruCache

_SLEEPING_RANKS, _COMPUTING_RANKS, _SAMPLES, _MICROBATCHES = 4, 2, 64, 16
_SECONDS_PER_TOKEN = 1e-4
"""of a forward; a backward takes twice as long"""
_MEDIAN, _SIGMA, _SHORTEST, _LONGEST, _BUDGET = 48.0, 1.0, 4, 512, 512
_WORDS, _SIZE = 64, 4
_TIMES, _PLANNED_LENGTH = 3, 64
_GAIN, _ACCURACY, _PLANNING, _COMPUTING_GAIN = 2.0, 1.03, 0.02, 1.5
"""targets: gain, measured / simulated step, share of planning in the step, and gain of the model that computes"""
Batch = dict[str, Tensor]


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (sleeping(), computing())


class BatchResult(NamedTuple):
    """Results of one rank for one batch."""

    timings: dict[str, list[RankTiming]]
    groups: tuple[Any, ...]
    """microbatches that the budget made"""
    planning: float
    """seconds to make them"""


def sleeping(seeds: Sequence[int] = (1, 2)) -> Table:
    """Sleeping passes on four ranks: gain, measured / simulated step, and share of planning in the step."""

    def lines() -> Iterator[Line]:
        partition = [["embedding", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "head"]]
        model = SleepingModel()
        plan = _plan(model, _SLEEPING_RANKS, partition)
        for seed, seconds, groups, planning in _measure(model, plan, seeds):
            ours, simulated = seconds["budget"], _simulated([group.tokens for group in groups], plan.cluster)
            parts = _batch(seed)["attention_mask"].sum(1).split(_SAMPLES // _MICROBATCHES)
            arrival = _simulated([int(len(part) * part.max()) for part in parts], plan.cluster)
            cells = (f"batch {seed}", f"{len(groups)}", f"{ours:.3f}")
            for name, other in (("padded", seconds["padded"]), ("arrival", arrival)):
                yield Line((*cells, name, f"{other:.3f}", load_average(), f"{other / ours:.2f}"), other / ours, _GAIN)
            for name, value, target in (
                ("simulated", ours / simulated, _ACCURACY),
                ("planning", planning / ours, _PLANNING),
            ):
                other = simulated if name == "simulated" else planning
                yield Line(
                    (*cells, name, f"{other:.4f}", load_average(), f"{value:.4f}"), value, target, at_least=False
                )

    return Table(
        f"{_SLEEPING_RANKS} sleeping ranks, {_SAMPLES} samples of lognormal lengths, at most {_BUDGET} tokens; seconds "
        f"per step, minimum of {_TIMES}",
        ("lengths", "groups", "budget", "against", "seconds", "load", "ratio"),
        lines(),
    )


def computing(seeds: Sequence[int] = (1, 2)) -> Table:
    """A model that computes on two ranks: gain of the budget."""

    def lines() -> Iterator[Line]:
        model = llama(8, 64)
        plan = _plan(model, _COMPUTING_RANKS, "auto")
        for seed, seconds, groups, planning in _measure(model, plan, seeds):
            ours, padded = seconds["budget"], seconds["padded"]
            cells = (
                f"batch {seed}",
                f"{len(groups)}",
                f"{ours:.3f}",
                f"{padded:.3f}",
                f"{planning:.4f}",
                load_average(),
            )
            yield Line((*cells, f"{padded / ours:.2f}"), padded / ours, _COMPUTING_GAIN)

    title = f"Llama with 8 layers on {_COMPUTING_RANKS} ranks, the same lengths; seconds per step, minimum of {_TIMES}"
    return Table(title, ("lengths", "groups", "budget", "padded", "planning", "load", "ratio"), lines())


def _plan(model: nn.Module, ranks: int, partitioner: Any) -> penstock.Plan:
    choices = {"microbatches": _MICROBATCHES, "schedule": "1f1b", "partitioner": partitioner}
    example = {name: tensor[:, :_PLANNED_LENGTH] for name, tensor in _batch(0).items()}
    return penstock.plan(model, kwargs=example, ranks=ranks, **choices)


def _measure(
    model: nn.Module, plan: penstock.Plan, seeds: Sequence[int]
) -> Iterator[tuple[int, dict[str, float], tuple[Any, ...], float]]:
    """Yields for every batch: seed, seconds of the shortest step of each kind, groups, and seconds of planning."""
    by_rank = penstock.launch(_run_rank, plan.num_ranks, plan, model, seeds)
    for index, seed in enumerate(seeds):
        found: list[BatchResult] = [rank[index] for rank in by_rank]
        steps = combine_ranks([each.timings for each in found], ("budget", "padded"))
        seconds = {name: min(step.seconds for step in taken) for name, taken in steps.items()}
        yield seed, seconds, found[0].groups, max(each.planning for each in found)


def _run_rank(plan: penstock.Plan, model: nn.Module, seeds: Sequence[int]) -> list[BatchResult]:
    torch.set_num_threads(1)
    pipe, found = penstock.Pipeline(model, plan), []
    # Warmup; these steps also measure the costs per length.
    for seed in range(-4, 0):
        pipe.step(**_batch(seed), budget_tokens=_BUDGET)
    for seed in seeds:
        batch = _batch(seed)
        with_budget = partial(pipe.step, **batch, budget_tokens=_BUDGET)
        # One padded step is enough, because it takes several times as long.
        timings = {
            **run_interleaved({"budget": with_budget}, _TIMES),
            **run_interleaved({"padded": partial(pipe.step, **batch)}, 1, warmup=0),
        }
        found.append(BatchResult(timings, with_budget().groups, _planning_seconds(pipe, batch)))
    return found


def _planning_seconds(pipe: penstock.Pipeline, batch: Batch) -> float:
    """Seconds that a step spends on finding lengths, grouping and ordering samples, and compiling for new groups."""
    engine, total = pipe._engine, 0.0
    planner = engine._tokens._planner
    assert planner is not None
    planner._known.clear()
    engine._compiled_steps = LruCache()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal total
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total += time.perf_counter() - start

        return call

    with (
        mock.patch.object(engine._tokens, "padding", timed(engine._tokens.padding)),
        mock.patch.object(engine._tokens, "microbatches", timed(engine._tokens.microbatches)),
        mock.patch.object(engine._compiler, "compile", timed(engine._compiler.compile)),
    ):
        pipe.step(**batch, budget_tokens=_BUDGET)
    return total


def _simulated(tokens: Sequence[int], cluster: penstock.Cluster) -> float:
    """Seconds of a simulated step of the sleeping model; the cluster has the overhead of passes, messages and steps."""
    seconds = (tuple(each * _SECONDS_PER_TOKEN for each in tokens),) * _SLEEPING_RANKS
    schedule = penstock.schedule("1f1b", _SLEEPING_RANKS, len(tokens))
    return penstock.simulate(schedule, penstock.StageCosts(seconds, seconds, seconds), cluster).makespan


def _batch(seed: int) -> Batch:
    """Samples of lognormal lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(seed % 1000)
    drawn = _MEDIAN * torch.exp(_SIGMA * torch.randn(_SAMPLES, generator=generator))
    lengths = drawn.long().clamp(_SHORTEST, _LONGEST)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    words = torch.randint(1, _WORDS, mask.shape, generator=generator) * mask
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.seconds = x.shape[0] * x.shape[1] * _SECONDS_PER_TOKEN
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * ctx.seconds)
        return gradient


class _SleepingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_SIZE, _SIZE)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return output


class SleepingModel(nn.Module):
    """A language model whose blocks sleep in proportion to padded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _SIZE)
        self.blocks = nn.ModuleList(_SleepingBlock() for _ in range(_SLEEPING_RANKS))
        self.head = nn.Linear(_SIZE, _WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss."""
        x = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
