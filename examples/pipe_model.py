"""Cuts of a model with branches by several methods, and the stages as a Python file.

Run it with `python examples/pipe_model.py`. Replace model and batch by your own.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

import penstock


class Inception(nn.Module):
    """Two branches of different cost that are joined."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))
        self.narrow = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return torch.tanh(self.wide(x) + self.narrow(x))


class Net(nn.Module):
    """Blocks that become smaller, so that equal numbers of blocks are not equal work."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inception(64, inner) for inner in (512, 512, 256, 256, 64, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    """Compare the methods, show the metrics of a block, and write the stages of one of them."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 64)
    for method in ("pipedream", "acyclic", "mpipe"):
        print(penstock.pipe_model(model, (x,), ranks=3, method=method, depth=3, iterations=3), end="\n\n")

    piped = penstock.pipe_model(model, (x,), ranks=3, method="pipedream", basic_blocks=[Inception], iterations=3)
    print("blocks.0:", piped.metrics["blocks.0"], end="\n\n")
    with TemporaryDirectory() as directory:
        text = piped.generate_code(Path(directory) / "stages.py").read_text(encoding="utf-8")
    print(text[text.index("class Stage1") : text.index("class Stage2")])


if __name__ == "__main__":
    main()
