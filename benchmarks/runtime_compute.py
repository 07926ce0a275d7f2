"""runtime_compute: tokens per second of a small GPT on two ranks, compared with torch's pipeline and with one process.

Both pipelines have the same stages, and each uses its own schedule of a name. Steps are interleaved: penstock, torch,
one process with one thread on the microbatches, and one process with two threads on the whole batch. The second rank
waits while one process runs. For comparison, both ranks train the unsplit model at the same time, each on half of the
microbatches and without exchanging anything ("apart"): cores that share caches and memory are slower together, so no
pipeline is faster than that. Less the predicted bubble of the plan, in which the order and unequal stages leave a rank
without work, that is what no runtime can exceed ("limit").
"""

import copy
import math
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from benchmarks.table import Line, Table
from benchmarks.timing import RankTiming, StepTiming, combine_ranks, load_average, run_interleaved
from benchmarks.torch_pipeline import NAMES, TorchPipeline
from penstock.demo.gpt import Sizes, batch, cut, gpt, loss

_RANKS = 2
_RUNTIMES = ("penstock", "torch", "one process", "two threads", "apart")
_ONE_PROCESS_TARGET, _TORCH_TARGET, _TORCH_MEAN_TARGET = 1.85, 1.0, 1.05
"""minimum speedup over one process, over torch with each schedule, and over torch in the mean of all schedules"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (throughput(), recording())


def throughput(sizes: Sizes = Sizes(), times: int = 6, names: tuple[str, ...] = tuple(NAMES)) -> Table:  # noqa: B008
    """Tokens per second compared with torch's pipeline and with one process that trains on the same microbatches."""

    def lines() -> Iterator[Line]:
        ratios = []
        for name in names:
            plan, steps = measure(name, sizes, times, _run_all)
            rates = [_rate(sizes, steps[runtime]) for runtime in _RUNTIMES]
            ours, theirs, alone, apart = *rates[:3], rates[-1]
            limit = apart * (1 - plan.predicted.bubble)
            cells = (name, *(f"{rate:,.0f}" for rate in rates), load_average())
            ratios.append(ours / theirs)
            yield Line((*cells, "torch", f"{ours / theirs:.3f}"), ours / theirs, _TORCH_TARGET)
            yield Line((*cells, "one process", f"{ours / alone:.3f}"), ours / alone, _ONE_PROCESS_TARGET)
            yield Line((*cells, "limit", f"{ours / limit:.3f}"), ours / limit, -math.inf)
        mean = fmean(ratios)
        yield Line(("mean", *[""] * len(_RUNTIMES), load_average(), "torch", f"{mean:.3f}"), mean, _TORCH_MEAN_TARGET)

    columns = ("schedule", "ours", *_RUNTIMES[1:], "load", "against", "ratio")
    title = f"GPT with {sizes.layers} layers, d={sizes.width}, {_RANKS} ranks with one thread each"
    return Table(f"{title}; tokens/s, maximum of {times} steps", columns, lines())


def recording(sizes: Sizes = Sizes(), times: int = 15, names: tuple[str, ...] = ("1f1b",)) -> Table:  # noqa: B008
    """The step with record=True compared with the step without."""

    def lines() -> Iterator[Line]:
        for name in names:
            _, steps = measure(name, sizes, times, _run_with_and_without_record)
            plain, recorded = (min(step.seconds for step in steps[runtime]) for runtime in ("penstock", "recorded"))
            cells = (name, f"{plain:.4f}", f"{recorded:.4f}", load_average(), f"{recorded / plain:.4f}")
            yield Line(cells, recorded / plain, 1.01, at_least=False)

    columns = ("schedule", "plain", "recorded", "load", "ratio")
    return Table(f"GPT with record=True; seconds per step, minimum of {times}", columns, lines())


def measure(
    name: str, sizes: Sizes, times: int, run_rank: Callable[..., Any]
) -> tuple[penstock.Plan, dict[str, list[StepTiming]]]:
    """Plans and measures one schedule; `run_rank` runs on every rank and returns its times."""
    stages = penstock.schedule(name, _RANKS, sizes.microbatches).num_stages
    model, (tokens, targets) = gpt(sizes), batch(sizes)
    plan = penstock.plan(
        model,
        (tokens,),
        ranks=_RANKS,
        microbatches=sizes.microbatches,
        schedule=name,
        partitioner=cut(sizes, stages),
        # The loss runs in the passes of the last stage.
        loss_fn=loss,
        target=targets,
    )
    ranks = penstock.launch(run_rank, _RANKS, name, plan, model, sizes, times)
    return plan, combine_ranks(ranks, ("penstock", "recorded"))


def _run_all(
    name: str, plan: penstock.Plan, model: nn.Sequential, sizes: Sizes, times: int
) -> dict[str, list[RankTiming]]:
    (tokens, targets), stages = batch(sizes), cut(sizes, plan.num_stages)
    # A copy, because a Pipeline refuses forwards of the model that it trains.
    whole = copy.deepcopy(model)
    ours = penstock.Pipeline(model, plan, loss_fn=loss)
    own = plan.schedule.placement.stages[dist.get_rank()]
    parts = {stage: nn.Sequential(*(model[int(block)] for block in stages[stage])) for stage in own}
    theirs = TorchPipeline.named(name, parts, plan.num_stages, sizes.microbatches, loss)
    calls = {
        "penstock": lambda: ours.step(tokens, target=targets),
        "torch": lambda: theirs.step(tokens, target=targets),
        "one process": lambda: _run_one_process(whole, tokens, targets, sizes.microbatches, 1),
        "two threads": lambda: _run_one_process(whole, tokens, targets, 1, 2),
        "apart": lambda: _run_microbatches(whole, tokens, targets, sizes.microbatches, dist.get_rank(), _RANKS),
    }
    return run_interleaved(
        calls, times, before_each=lambda: [each.zero_grad(set_to_none=True) for each in (model, whole)]
    )


def _run_one_process(model: nn.Module, tokens: Tensor, targets: Tensor, microbatches: int, threads: int) -> None:
    """Trains the unsplit model on the first rank while the other waits."""
    if dist.get_rank() == 0:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        _run_microbatches(model, tokens, targets, microbatches)
        torch.set_num_threads(before)
    dist.barrier()


def _run_microbatches(
    model: nn.Module, tokens: Tensor, targets: Tensor, microbatches: int, first: int = 0, step: int = 1
) -> None:
    """Trains the unsplit model on every `step`-th microbatch, beginning with the `first`."""
    pieces = list(zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True))
    for piece, target in pieces[first::step]:
        (loss(model(piece), target) / microbatches).backward()


def _run_with_and_without_record(
    name: str, plan: penstock.Plan, model: nn.Sequential, sizes: Sizes, times: int
) -> dict[str, list[RankTiming]]:
    (tokens, targets), ours = batch(sizes), penstock.Pipeline(model, plan, loss_fn=loss)
    calls = {
        "penstock": lambda: ours.step(tokens, target=targets),
        "recorded": lambda: ours.step(tokens, target=targets, record=True),
    }
    return run_interleaved(calls, times, before_each=lambda: model.zero_grad(set_to_none=True))


def _rate(sizes: Sizes, steps: list[StepTiming]) -> float:
    return sizes.tokens / min(step.seconds for step in steps)
