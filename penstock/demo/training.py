"""The training of the demo: its text, and the same steps on the ranks of a pipeline and in plain PyTorch."""

import builtins
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.api.pipeline import Pipeline
from penstock.api.train_loop import StepReport, fit
from penstock.api.train_options import TrainOptions
from penstock.demo.gpt import Sizes, gpt, loss
from penstock.ir import Plan, to_json

NUM_CHARACTERS = 128
"""ASCII; any other character becomes a space"""
SIZES = Sizes(layers=8, width=128, heads=4, vocabulary=NUM_CHARACTERS, length=64, samples=48, microbatches=8)
CLIP, LEARNING_RATE = 1.0, 3e-3
# The gradients of the biases of keys are rounding errors, which Adam would magnify with a smaller epsilon.
EPSILON = 1e-5


def shipped_text() -> str:
    """The topics of Python's help, or, where a distribution leaves them out, the docstrings of its builtins."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return "\n\n".join(filter(None, map(inspect.getdoc, vars(builtins).values())))
    return "\n\n".join(topics.values())


def batches(sizes: Sizes, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random excerpts of the text as character codes, and the character after each; the same in every process."""
    text = torch.tensor([ord(letter) if ord(letter) < NUM_CHARACTERS else ord(" ") for letter in shipped_text()])
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(sizes.length + 1)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - len(offsets), (sizes.samples, 1), generator=generator)
        excerpts = text[starts + offsets]
        yield excerpts[:, :-1].contiguous(), excerpts[:, 1:].contiguous()


def model() -> nn.Module:
    """The GPT, with the same weights in every process."""
    torch.manual_seed(0)
    return gpt(SIZES)


class Trained(NamedTuple):
    """The result of training in one process."""

    run: str
    """the Run as JSON, on the first rank of a pipeline; else empty"""
    losses: list[float]
    parameters: dict[str, Tensor]
    """the parameters of this rank"""
    step_seconds: float = 0.0
    """median over the steps after the first, in plain PyTorch"""


def train_rank(plan: Plan, steps: int, on_step: Callable[[StepReport], None]) -> Trained:
    pipe = Pipeline(model(), plan, loss_fn=loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    run = fit(pipe, batches(SIZES, steps), optimizer, TrainOptions(steps=steps, clip=CLIP), on_step=on_step)
    text = to_json(run) if pipe.is_first else ""
    return Trained(text, list(run.losses), {name: value.detach() for name, value in pipe.named_parameters()})


def train_unsplit(steps: int, num_threads: int = 1) -> Trained:
    """Train the unsplit model in plain PyTorch, with a number of threads."""
    torch.set_num_threads(num_threads)
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    losses, seconds = [], []
    for tokens, target in batches(SIZES, steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        value = loss(whole(tokens), target)
        value.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        losses.append(value.item())
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(1)
    parameters = {name: value.detach() for name, value in whole.named_parameters()}
    return Trained("", losses, parameters, statistics.median(seconds[1:] or seconds))


def largest_difference(ranks: list[Trained], plain: Trained) -> float:
    """The largest relative difference of a loss, or of a parameter relative to its largest element."""
    losses = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(ranks[0].losses, plain.losses, strict=True)]
    parameters = {name: value for rank in ranks for name, value in rank.parameters.items()}
    differences = [
        float((parameters[name] - value).abs().max() / value.abs().max().clamp_min(1e-30))
        for name, value in plain.parameters.items()
    ]
    return max(losses + differences)
