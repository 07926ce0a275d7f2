"""A small ResNet in a hand-written pipeline on 2 local processes: flatten it, take a part, write the loop.

Run it with `python examples/flat_resnet.py`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.flat import clip_grad_norm_, flatten_model, forward_backward, partition_uniform
from penstock.flat import topology as tpc

RANKS, STEPS, MICROBATCHES = 2, 5, 4


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return functional.relu(x + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """The modules of a ResNet under the usual names; LAYERS has the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1, self.layer2 = nn.Sequential(Block(8), Block(8)), nn.Sequential(Block(8), Block(8))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)


LAYERS = ["conv1", "bn1", "relu", "layer1", "layer2", "avgpool", lambda x: torch.flatten(x, 1), "fc"]


def train() -> list[tuple[float, float]]:
    """Train on one rank."""
    tpc.setup_process_groups([("pipe", RANKS)])
    torch.manual_seed(0)
    model = nn.Sequential(*partition_uniform(flatten_model(ResNet(), LAYERS, return_list=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, targets = torch.randn(18, 3, 16, 16), torch.randint(0, 4, (18,))
    dist.broadcast(images, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))
    dist.broadcast(targets, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))

    def fwd_fn(inputs: Tensor | list[Tensor]) -> Tensor:
        if tpc.is_first_in_pipeline_group():
            return model(inputs)
        # Gradients of microbatches are summed: each sample has the same weight.
        return functional.cross_entropy(model(inputs[0]), inputs[1], reduction="sum") / len(targets)

    inputs = [images] if tpc.is_first_in_pipeline_group() else [targets]
    losses = []
    for _ in range(STEPS):
        loss = forward_backward(optimizer, fwd_fn, None, inputs, num_microbatches=MICROBATCHES)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((0.0 if loss is None else float(loss), float(norm)))
    return losses


def main() -> None:
    """Train, and print the losses of the last rank and the gradient norms."""
    for step, (loss, norm) in enumerate(penstock.launch(train, RANKS)[-1]):
        print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")


if __name__ == "__main__":
    main()
