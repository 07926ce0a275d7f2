"""A ResNet-50 with torchvision's names, as a pipeline by hand and in one process, and what both make of a batch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.batches import microbatch_sizes
from penstock.flat import clip_grad_norm_, flatten_model, forward_backward, partition_uniform, topology
from tests.zoo.plain import ResNet50

LAYERS = [
    "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool",
    lambda x: torch.flatten(x, 1), "fc",
]  # fmt: skip
STEPS = 3
Numbers = dict[str, Tensor]
Outcome = tuple[list[Tensor], list[Tensor], Numbers, Tensor]


def resnet() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return ResNet50(width=2).double()


def batches(samples: int) -> list[tuple[Tensor, Tensor]]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(samples, 3, 32, 32, dtype=torch.float64, generator=generator) for _ in range(STEPS)]
    return [(each, torch.randint(0, 5, (samples,), generator=generator)) for each in images]


def state_of(model: nn.Module) -> Numbers:
    """Everything that training leaves in a model, by the original names."""
    gradients = {f"{name} gradient": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.clone() for name, value in {**model.state_dict(), **gradients}.items()}


def in_one_process(samples: int, num_microbatches: int, max_norm: float | None = None) -> Outcome:
    """Losses, norms, what is left in the model, and the answers of an evaluation, by plain PyTorch."""
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for images, targets in batches(samples):
        optimizer.zero_grad()
        sizes = microbatch_sizes(samples, num_microbatches)
        found = []
        for part, labels in zip(images.split(sizes), targets.split(sizes), strict=True):
            loss = functional.cross_entropy(model(part), labels)
            loss.backward()
            found.append(loss.detach())
        losses.append(sum(found[1:], found[0]))
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        answers = model(batches(samples)[0][0])
    return losses, norms, state_of(model), answers


def on_a_rank(ranks: int, samples: int, num_microbatches: int, max_norm: float | None = None) -> Outcome:
    """The same as a pipeline; the losses and the answers are those of the last rank, the state is this rank's."""
    topology.setup_process_groups([("pipe", ranks)])
    whole = resnet()
    model = nn.Sequential(*partition_uniform(flatten_model(whole, LAYERS, return_list=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for images, targets in batches(samples):
        losses.append(forward_backward(optimizer, fwd_of(model), None, inputs_of(images, targets), num_microbatches))
        if max_norm is not None:
            norms.append(clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
    model.eval()
    images = [batches(samples)[0][0]] if topology.is_first_in_pipeline_group() else []
    answers = forward_backward(None, model, None, images, num_microbatches, forward_only=True)
    return losses, norms, own_state(whole, model), answers


def inputs_of(images: Tensor, targets: Tensor) -> list[Tensor]:
    """What each rank has of a batch: the first the images, the last the targets."""
    if topology.is_first_in_pipeline_group():
        return [images]
    return [targets] if topology.is_last_in_pipeline_group() else []


def fwd_of(model: nn.Module) -> Callable[..., Tensor]:
    """What each rank does with a microbatch."""

    def fwd_fn(inputs: Tensor | list[Tensor]) -> Tensor:
        if not topology.is_last_in_pipeline_group():
            return model(inputs)
        return functional.cross_entropy(model(inputs[0]), inputs[1])

    return fwd_fn


def own_state(whole: nn.Module, model: nn.Module) -> Numbers:
    """What this rank trained, by the original names."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    names = [name for name, tensor in tensors.items() if id(tensor) in own]
    found = state_of(whole)
    return {key: value for key, value in found.items() if key.removesuffix(" gradient") in names}
