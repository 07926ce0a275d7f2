"""The loops that users of flat pipelines write, on a CPU: partition, training with autocast, evaluation."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from penstock.flat import DDP, clip_grad_norm_, flatten_model, forward_backward, partition_uniform
from penstock.flat import topology as tpc
from tests.flat.resnet import Numbers, own_state, state_of
from tests.zoo.plain import ResNet50

MAX_NORM = 1.0e9


def resnet() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return ResNet50(width=2)


def data(is_known: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Two batches; a rank that is not to know them has others."""
    generator = torch.Generator().manual_seed(3 if is_known else 4)
    return [
        (torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 5, (8,), generator=generator))
        for _ in range(2)
    ]


def criterion(_: Tensor, output: Tensor, targets: Tensor) -> Tensor:
    """One that is given the samples too."""
    return functional.cross_entropy(output, targets)


def autocast() -> torch.autocast:
    """As on a GPU."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def train_and_evaluate() -> tuple[Numbers, list[float]]:
    """The state of this rank after training, and on the last rank the losses of the evaluation."""
    tpc.setup_process_groups([("pipe", 2)])
    layer_list = [
        "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool",
        lambda x: torch.flatten(x, 1), "fc",
    ]  # fmt: skip
    whole = resnet()
    flat_model = flatten_model(whole, layer_list, return_list=True)
    md_list = partition_uniform(flat_model)
    model = torch.nn.Sequential(*md_list)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    data_loader = data(is_known=tpc.is_first_in_pipeline_group())

    for samples, targets in data_loader:
        dist.broadcast(samples, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))
        dist.broadcast(targets, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))

        inputs = []
        if tpc.is_first_in_pipeline_group():
            inputs.append(samples)
        else:
            inputs.append(targets)

        forward_backward(
            optimizer,
            forward_of(model, samples),
            None,
            inputs,
            num_microbatches=4,
            forward_only=False,
            dtype=torch.bfloat16,
            scatter_gather_tensors=False,
        )
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return own_state(whole, model), evaluate(model)


def forward_of(model: nn.Module, samples: Tensor) -> Callable[..., Tensor]:
    """What a rank does with a microbatch."""

    def fwd_fn(inputs: Tensor | list[Tensor]) -> Tensor:
        with autocast():
            if tpc.is_first_in_pipeline_group():
                return model(inputs)
            out = model(inputs[0])
            return criterion(samples, out, inputs[1])

    return fwd_fn


def evaluate(model: nn.Module) -> list[float]:
    """The losses of the batches, on the last rank."""
    model.eval()
    losses = []
    for images, target in data():
        dist.broadcast(target, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))

        inputs = []
        if tpc.is_first_in_pipeline_group():
            inputs = images

        def eval_fwd(img: Tensor) -> Tensor:
            with autocast():
                return model(img)

        output = forward_backward(
            None,
            eval_fwd,
            None,
            inputs,
            num_microbatches=1,
            forward_only=True,
            dtype=torch.bfloat16,
            scatter_gather_tensors=False,
        )
        if tpc.is_last_in_pipeline_group():
            with autocast():
                losses.append(float(functional.cross_entropy(output, target)))
    return losses


def in_one_process() -> tuple[Numbers, list[float]]:
    """The same by plain PyTorch."""
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for samples, targets in data():
        optimizer.zero_grad()
        for part, labels in zip(samples.split(2), targets.split(2), strict=True):
            with autocast():
                loss = criterion(samples, model(part), labels)
            loss.backward()
        optimizer.step()
    state = state_of(model)
    model.eval()
    with torch.no_grad(), autocast():
        return state, [float(functional.cross_entropy(model(images), target)) for images, target in data()]
