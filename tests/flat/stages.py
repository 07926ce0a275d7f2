"""Small stages by hand, run on every rank of a pool."""

import os
import signal
import time
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import RunError
from penstock.flat import DDP, clip_grad_norm_, forward_backward, forward_eval, topology

WIDTH = 4


def stage_of(rank: int) -> nn.Module:
    """The same whoever makes it."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def batch(samples: int, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(samples, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of all."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def own_backward(ranks: int, schedule: str = "1f1b") -> tuple[list[Tensor], list[bool]]:
    """With a bwd_fn that scales every loss by 8 on its way, and notes whether it was given a gradient."""
    topology.setup_process_groups([("pipe", ranks)])
    model, seen = stage_of(dist.get_rank()), []

    def bwd_fn(output: Tensor, gradient: Tensor | None) -> None:
        seen.append(gradient is not None)
        if gradient is None:
            (8 * output).backward()
        else:
            torch.autograd.backward(output, gradient)

    def fwd_fn(x: Tensor) -> Tensor:
        return model(x).square().mean() if topology.is_last_in_pipeline_group() else model(x)

    inputs = batch(6) if topology.is_first_in_pipeline_group() else None
    forward_backward(None, fwd_fn, bwd_fn, inputs, 3, schedule=schedule)
    return gradients(model), seen


def two_values_and_extras() -> tuple[list[Tensor], Tensor | None]:
    """Two values cross, one of them without a gradient; every stage has inputs of its own, the second writes in place.

    The first stage is frozen but for its second value.
    """
    topology.setup_process_groups([("pipe", 3)])
    rank = dist.get_rank()
    model, extra = stage_of(rank), batch(5, seed=rank)

    def fwd_fn(inputs: Tensor | list[Tensor]) -> Tensor | tuple[Tensor, ...]:
        if rank == 0:
            return model(inputs), inputs.abs()
        x, mask, own = inputs
        x = model(x.mul_(2.0)) * own
        return (x + mask).square().mean() if rank == 2 else (x, mask)

    return gradients_of_call(model, fwd_fn, extra, 2)


def gradients_of_call(model: nn.Module, fwd_fn: object, inputs: Tensor, count: int) -> tuple[list[Tensor], object]:
    """What a call leaves in the stage, and what it returns."""
    result = forward_backward(None, fwd_fn, None, inputs, num_microbatches=count)  # type: ignore[arg-type]
    return gradients(model), result


def frozen() -> list[Tensor]:
    """The first stage has nothing to train, so that no gradient returns to it."""
    topology.setup_process_groups([("pipe", 2)])
    model = stage_of(dist.get_rank()).requires_grad_(dist.get_rank() == 1)
    first = topology.is_first_in_pipeline_group()
    return gradients_of_call(model, model if first else lambda x: model(x).sum(), batch(4) if first else None, 2)[0]


def evaluated() -> tuple[Tensor | None, Tensor | None, bool]:
    """The answers of forward_eval and of three microbatches, and whether they want gradients."""
    topology.setup_process_groups([("pipe", 2)])
    model = stage_of(dist.get_rank())
    inputs = batch(7) if topology.is_first_in_pipeline_group() else []
    whole = forward_eval(model, inputs)
    parts = forward_backward(None, model, None, inputs, num_microbatches=3, forward_only=True)
    return whole, parts, bool(whole is not None and whole.requires_grad)


def three_and_four(norm_type: float) -> tuple[float, list[Tensor]]:
    """Rank 0 has a gradient of 3, rank 1 one of 4; clipped to 1."""
    topology.setup_process_groups([("pipe", 2)])
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0 + dist.get_rank()])
    return float(clip_grad_norm_([parameter], 1.0, norm_type)), [parameter.grad]


def replicated() -> tuple[int, list[Tensor], list[Tensor]]:
    """Two pipelines of two stages, each with its own batch; replicas begin with other numbers."""
    topology.setup_process_groups([("data", 2), ("pipe", 2)])
    stage, replica = topology.get_pp_rank(), topology.get_dp_rank()
    torch.manual_seed(10 * replica)
    model = stage_of(stage)
    if replica:
        model[0].weight.data.zero_()
    model = DDP(model)
    first = topology.is_first_in_pipeline_group()
    fwd_fn = model if first else (lambda x: model(x).square().mean())
    found, _ = gradients_of_call(model, fwd_fn, batch(4, seed=replica) if first else None, 2)
    return stage, found, [parameter.detach().clone() for parameter in model.parameters()]


def outside() -> str:
    """A forward of a replicated stage with gradients, outside of forward_backward."""
    topology.setup_process_groups([("data", 2), ("pipe", 1)])
    model = DDP(stage_of(0))
    with torch.no_grad():
        model(batch(2))
    return message(lambda: model(batch(2)))


def torch_wrapper() -> tuple[str, str, list[Tensor]]:
    """With torch's own wrapper: the errors of a step and of an evaluation, and the gradients of a step in no_sync."""
    topology.setup_process_groups([("data", 2), ("pipe", 1)])
    model = DistributedDataParallel(stage_of(0), process_group=topology.get_group("data"))

    def alone(x: Tensor) -> Tensor:
        with model.no_sync():
            return model(x).square().mean()

    errors = (
        message(lambda: forward_backward(None, lambda x: model(x).square().mean(), None, batch(4), 2)),
        message(lambda: forward_eval(model, batch(4))),
    )
    found, _ = gradients_of_call(model, alone, batch(4, seed=dist.get_rank()), 2)
    return *errors, found


def classes_of_tokens(num_samples: int) -> Tensor | None:
    """Three tokens for every sample, with 5 classes each, evaluated in 4 microbatches."""
    topology.setup_process_groups([("pipe", 2)])
    first = topology.is_first_in_pipeline_group()
    fwd_fn = (lambda x: 2 * x) if first else (lambda x: x.unsqueeze(1).expand(-1, 3, -1).flatten(0, 1))
    return forward_backward(None, fwd_fn, None, batch(num_samples) if first else [], 4, forward_only=True)


def message(call: object) -> str:
    """The message of the error that a call raises; empty if there is none."""
    try:
        call()  # type: ignore[operator]
    except RunError as error:
        return str(error)
    return ""


def refused(kind: str) -> list[str]:
    """The error that a mistake of one rank raises on this one; a correct call works afterwards."""
    topology.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    model = stage_of(rank)
    count = {"microbatches": 2 + rank, "few": 9}.get(kind, 2)
    sizes = {"sizes": (4, 6), "ragged": (4, 4)}.get(kind, (4, 4))
    inputs: list[Tensor] | None = [batch(sizes[rank])]
    if kind == "ragged" and rank:
        inputs = [batch(4), batch(3)]
    if kind == "nothing" and not rank:
        inputs = None

    def fwd_fn(given: Tensor | list[Tensor]) -> Tensor:
        return model(given[0]).sum() if rank else model(given)

    def attempt() -> None:
        forward_backward(None, fwd_fn, None, inputs, num_microbatches=count, forward_only=kind == "only" and rank == 1)

    error = message(attempt)
    forward_backward(None, fwd_fn, None, [batch(4)], num_microbatches=2)
    return [error]


def broken(rank: int, kind: str) -> None:
    """A stage that does what cannot be."""
    topology.setup_process_groups([("pipe", 2)])
    is_first = topology.is_first_in_pipeline_group()
    model = stage_of(dist.get_rank())

    def fwd_fn(x: Tensor) -> object:
        if dist.get_rank() != rank:
            return model(x) if is_first else model(x).sum()
        if kind == "raise":
            raise KeyError("boom")
        return {"dict": {"x": model(x)}, "vector": model(x)}[kind]

    forward_backward(None, fwd_fn, None, batch(4) if is_first else None, num_microbatches=2)


def of_another_type() -> list[str]:
    """The warnings when values are sent in another dtype than expected."""
    topology.setup_process_groups([("pipe", 2)])
    first = topology.is_first_in_pipeline_group()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forward_eval(stage_of(dist.get_rank()), batch(2) if first else None, torch.bfloat16)
    return [str(warning.message) for warning in caught]


def fateful(fate: str) -> None:
    """A call that works, then one in which the last rank hangs or dies."""
    topology.setup_process_groups([("pipe", 2)], deadline_seconds=5.0)
    is_first, calls = topology.is_first_in_pipeline_group(), []
    model = stage_of(dist.get_rank())

    def fwd_fn(x: Tensor) -> Tensor:
        calls.append(x)
        if not is_first and len(calls) == 4:
            time.sleep(240.0) if fate == "hang" else os.kill(os.getpid(), signal.SIGKILL)
        return model(x) if is_first else model(x).sum()

    for _ in range(2):
        forward_backward(None, fwd_fn, None, batch(4) if is_first else None, num_microbatches=2)
