"""runtime_compute: tokens per second of a small GPT on two ranks, beside torch's pipeline and one process.

Both pipelines have the same cut; each schedule is penstock's or torch's own. They take their steps by turns, and one
process takes its own while both ranks wait: on the microbatches with one thread, and on the whole batch with two.
"""

import copy
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from benchmarks.interleaved import Step, Turn, joined, load, take_turns
from benchmarks.table import Line, Table
from benchmarks.torch_pipeline import NAMES, TorchPipeline
from penstock.demo.gpt import Sizes, batch, cut, gpt, loss

_RANKS = 2
_ALONE, _TORCH, _TORCH_MEAN = 1.85, 1.0, 1.05
"""tokens per second against one process, and against torch with each schedule and in the mean of all"""


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about real compute."""
    return (throughput(), recording())


def throughput(sizes: Sizes = Sizes(), times: int = 5, names: tuple[str, ...] = tuple(NAMES)) -> Table:  # noqa: B008
    """Tokens per second against torch's pipeline and against one process, which trains on the same microbatches."""

    def lines() -> Iterator[Line]:
        ratios = []
        for name in names:
            steps = measured(name, sizes, times, _beside_torch)
            rates = [_rate(sizes, steps[who]) for who in ("penstock", "torch", "one process", "two threads")]
            ours, theirs, alone, _ = rates
            cells = (name, *(f"{rate:,.0f}" for rate in rates), load())
            ratios.append(ours / theirs)
            yield Line((*cells, "torch", f"{ours / theirs:.3f}"), ours / theirs, _TORCH)
            yield Line((*cells, "one process", f"{ours / alone:.3f}"), ours / alone, _ALONE)
        mean = fmean(ratios)
        yield Line(("mean", "", "", "", "", load(), "torch", f"{mean:.3f}"), mean, _TORCH_MEAN)

    columns = ("schedule", "ours", "torch", "one process", "two threads", "load", "against", "ratio")
    title = f"a GPT of {sizes.layers} layers, d={sizes.width}, tokens/s on {_RANKS} ranks of one thread"
    return Table(f"{title}; best of {times} steps", columns, lines())


def recording(sizes: Sizes = Sizes(), times: int = 15, names: tuple[str, ...] = ("1f1b",)) -> Table:  # noqa: B008
    """A step with record=True against one without."""

    def lines() -> Iterator[Line]:
        for name in names:
            steps = measured(name, sizes, times, _with_and_without_record)
            plain, recorded = (min(step.seconds for step in steps[who]) for who in ("penstock", "recorded"))
            cells = (name, f"{plain:.4f}", f"{recorded:.4f}", load(), f"{recorded / plain:.4f}")
            yield Line(cells, recorded / plain, 1.01, at_least=False)

    columns = ("schedule", "plain", "recorded", "load", "ratio")
    return Table(f"record=True, seconds per step of that GPT; least of {times} steps", columns, lines())


def measured(name: str, sizes: Sizes, times: int, of_rank: Callable[..., Any]) -> dict[str, list[Step]]:
    """The steps of all that take turns."""
    stages = penstock.schedule(name, _RANKS, sizes.microbatches).num_stages
    model, (tokens, _) = gpt(sizes), batch(sizes)
    plan = penstock.plan(
        model,
        (tokens,),
        ranks=_RANKS,
        microbatches=sizes.microbatches,
        schedule=name,
        partitioner=cut(sizes, stages),
    )
    ranks = penstock.launch(of_rank, _RANKS, name, plan, model, sizes, times)
    return joined(ranks, ("penstock", "recorded"))


def _beside_torch(
    name: str, plan: penstock.Plan, model: nn.Sequential, sizes: Sizes, times: int
) -> dict[str, list[Turn]]:
    (tokens, wanted), stages = batch(sizes), cut(sizes, plan.num_stages)
    # A pipeline refuses the forward of a model whose stages it trains.
    whole = copy.deepcopy(model)
    ours = penstock.Pipeline(model, plan, loss_fn=loss)
    own = plan.schedule.placement.stages[dist.get_rank()]
    parts = {stage: nn.Sequential(*(model[int(block)] for block in stages[stage])) for stage in own}
    theirs = TorchPipeline.named(name, parts, plan.num_stages, sizes.microbatches, loss)
    runs = {
        "penstock": lambda: ours.step(tokens, target=wanted),
        "torch": lambda: theirs.step(tokens, target=wanted),
        "one process": lambda: _alone(whole, tokens, wanted, sizes.microbatches, 1),
        "two threads": lambda: _alone(whole, tokens, wanted, 1, 2),
    }
    return take_turns(runs, times, between=lambda: [each.zero_grad(set_to_none=True) for each in (model, whole)])


def _alone(model: nn.Module, tokens: Tensor, wanted: Tensor, microbatches: int, threads: int) -> None:
    """A plain loop over the microbatches, on the first rank while the other waits."""
    if dist.get_rank() == 0:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for piece, target in zip(tokens.chunk(microbatches), wanted.chunk(microbatches), strict=True):
            (loss(model(piece), target) / microbatches).backward()
        torch.set_num_threads(before)
    dist.barrier()


def _with_and_without_record(
    name: str, plan: penstock.Plan, model: nn.Sequential, sizes: Sizes, times: int
) -> dict[str, list[Turn]]:
    (tokens, wanted), ours = batch(sizes), penstock.Pipeline(model, plan, loss_fn=loss)
    runs = {
        "penstock": lambda: ours.step(tokens, target=wanted),
        "recorded": lambda: ours.step(tokens, target=wanted, record=True),
    }
    return take_turns(runs, times, between=lambda: model.zero_grad(set_to_none=True))


def _rate(sizes: Sizes, steps: list[Step]) -> float:
    return sizes.tokens / min(step.seconds for step in steps)
