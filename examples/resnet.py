"""A small ResNet with batch norm, as a pipeline of 3 ranks in this process, compared with plain PyTorch.

Run it with `python examples/resnet.py`. Batch norm sees one microbatch at a time, so the plain loop runs over the same
microbatches; `penstock.check` reports this for any model.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock

RANKS, STEPS, SAMPLES, MICROBATCHES, CLASSES = 3, 5, 16, 4, 4


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map `width` channels to `out`."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Two groups of blocks of growing width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(Block(*widths) for widths in ((8, 8), (8, 8), (8, 16), (16, 16))))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of every image."""
        return self.fc(self.blocks(self.stem(images)).mean((2, 3)))


def main() -> None:
    """Plan, train both, and compare losses, weights and running statistics."""
    torch.manual_seed(0)
    model = ResNet()
    plain = copy.deepcopy(model)
    images, labels = torch.randn(STEPS, SAMPLES, 3, 12, 12), torch.randint(0, CLASSES, (STEPS, SAMPLES))
    plan = penstock.plan(
        model, (images[0],), ranks=RANKS, microbatches=MICROBATCHES, schedule="1f1b", partitioner="linear"
    )
    print(plan, end="\n\n")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.cross_entropy, local=True)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (pipe, plain))
    for step in range(STEPS):
        loss, expected = pipe.step(images[step], target=labels[step]).loss, 0.0
        for x, y in zip(images[step].chunk(MICROBATCHES), labels[step].chunk(MICROBATCHES), strict=True):
            part = functional.cross_entropy(plain(x), y) / MICROBATCHES
            part.backward()
            expected += part.item()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: pipeline {loss:.6f}, plain {expected:.6f}")
        assert abs(loss - expected) < 1e-4
    state = plain.state_dict()
    difference = max((value - state[name]).abs().max().item() for name, value in pipe.full_state_dict().items())
    print(f"weights and running statistics differ by {difference:.1e} at most")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
