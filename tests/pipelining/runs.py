"""Training scripts for torch.distributed.pipelining, run on all ranks of a pool with its import or with penstock's."""

import importlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 6
TORCH, PENSTOCK = "torch.distributed.pipelining", "penstock.pipelining"


class Block(nn.Module):
    """Two products and a skip connection; `scale` is an optional keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """One block."""
        y = x + self.second(torch.tanh(self.first(x)))
        return y if scale is None else y * scale


def blocks(number: int, seed: int = 0) -> nn.Sequential:
    """The same on every rank, in double precision."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(number))).double()


def batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


class Script(NamedTuple):
    """A training script: its schedule, and what the stages and the calls of `step` are like."""

    schedule: str = "Schedule1F1B"
    stages: int = 2
    microbatches: int = 4
    samples: int = 8
    steps: int = 2
    reduction: str = "mean"
    scale_grads: bool = True


class Trained(NamedTuple):
    """The results of a script on one rank."""

    gradients: dict[str, Tensor]
    """by the names of the whole model"""
    losses: list[Tensor]
    output: Any


def stages_of(script: Script, ranks: int, rank: int) -> list[int]:
    """The stages of a rank: in the shape of a V for the schedules that need it, else in a loop."""
    if script.schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, script.stages - 1 - rank]
    return list(range(rank, script.stages, ranks))


def train(library: str, scripts: list[Script]) -> list[Trained]:
    """Run scripts one after another, with the names of torch or of penstock."""
    return [_train(importlib.import_module(library), script) for script in scripts]


def _train(pipelining: Any, script: Script) -> Trained:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = blocks(script.stages)
    own = stages_of(script, ranks, rank)
    stages = [pipelining.PipelineStage(model[index], index, script.stages, torch.device("cpu")) for index in own]
    schedule_class = getattr(pipelining, script.schedule)
    schedule = schedule_class(
        stages[0] if script.schedule in ("ScheduleGPipe", "Schedule1F1B") else stages,
        script.microbatches,
        loss_fn=nn.MSELoss(reduction=script.reduction),
        scale_grads=script.scale_grads,
    )
    losses: list[Tensor] = []
    output = None
    for number in range(script.steps):
        x, y = batch(script.samples, number)
        # torch divides gradients by the number of microbatches again if they are accumulated over steps.
        model.zero_grad()
        args = (x,) if 0 in own else ()
        if script.stages - 1 in own:
            output = schedule.step(*args, target=y, losses=losses)
        else:
            assert schedule.step(*args) is None
    names = {f"{index}." for index in own}
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and name.startswith(tuple(names))
    }
    return Trained(gradients, [loss.detach() for loss in losses], output if output is None else output.detach())


def whole(script: Script) -> Trained:
    """The results of the last step of a script on the unsplit model."""
    model, loss_fn = blocks(script.stages), nn.MSELoss(reduction=script.reduction)
    x, y = batch(script.samples, script.steps - 1)
    output = model(x)
    loss_fn(output, y).backward()
    pairs = zip(output.tensor_split(script.microbatches), y.tensor_split(script.microbatches), strict=True)
    losses = [loss_fn(part, target).detach() for part, target in pairs]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Trained(gradients, losses, output.detach())
