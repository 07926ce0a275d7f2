"""The demo's training, on the ranks of a pipeline and in one process, from the same weights over the same batches."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.api.pipeline import Pipeline
from penstock.api.train_loop import Recipe, StepReport, train
from penstock.demo.gpt import Sizes, gpt, loss
from penstock.demo.text import NUM_LETTERS, batches
from penstock.ir import Plan, to_json

SIZES = Sizes(layers=8, width=128, heads=4, words=NUM_LETTERS, length=64, samples=48, microbatches=8)
CLIP, RATE, EPSILON = 1.0, 3e-3, 1e-5
"""the biases of keys have gradients that are rounding alone, which Adam would make large with a smaller epsilon"""


class Trained(NamedTuple):
    """What one process holds after training: the Run as JSON (of the pipeline), losses and its share of parameters."""

    run: str
    losses: list[float]
    parameters: dict[str, Tensor]


def model() -> nn.Module:
    """The GPT, with the same weights wherever it is made."""
    torch.manual_seed(0)
    return gpt(SIZES)


def on_rank(plan: Plan, steps: int, tell: Callable[[StepReport], None]) -> Trained:
    """Train this rank's stages."""
    pipe = Pipeline(model(), plan, loss_fn=loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=RATE, eps=EPSILON)
    recipe = Recipe(steps, CLIP, has_loss_fn=True)
    run = train(pipe, batches(SIZES, steps), optimizer, recipe, tell)
    text = to_json(run) if pipe.is_first else ""
    return Trained(text, list(run.losses), {name: value.detach() for name, value in pipe.named_parameters()})


def in_one_process(steps: int) -> Trained:
    """The same in plain PyTorch."""
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=RATE, eps=EPSILON)
    losses = []
    for tokens, wanted in batches(SIZES, steps):
        optimizer.zero_grad()
        found = loss(whole(tokens), wanted)
        found.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        losses.append(found.item())
    return Trained("", losses, {name: value.detach() for name, value in whole.named_parameters()})


def largest_difference(ranks: list[Trained], plain: Trained) -> float:
    """The largest relative difference of a loss, or of a parameter measured by the largest number in it."""
    found = {name: value for rank in ranks for name, value in rank.parameters.items()}
    losses = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(ranks[0].losses, plain.losses, strict=True)]
    weights = [_apart(found[name], value) for name, value in plain.parameters.items()]
    return max(losses + weights)


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
