"""Write the stages of a model as a Python file, read it, and run it by hand.

Run it with `python examples/readable_stages.py`. Replace model, batch and plan by your own.
"""

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch
from torch import Tensor, nn

import penstock


class Net(nn.Module):
    """Blocks with a skip connection from the first to the last; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for every token."""
        x = first = self.embedding(tokens) * 4.0
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + first)


def imported(path: Path) -> ModuleType:
    """Import a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Write the stages of a plan, show them, and compare a step by hand with the model."""
    torch.manual_seed(0)
    model, tokens = Net(), torch.randint(0, 50, (8, 12))
    plan = penstock.plan(model, (tokens,), ranks=2, microbatches=1, schedule="1f1b")
    captured = penstock.capture(model, (tokens,))
    with TemporaryDirectory() as directory:
        path = penstock.generate_code(captured, plan, Path(directory) / "stages.py")
        text, file = path.read_text(encoding="utf-8"), imported(path)
    print(text[text.index("class Stage0") :])

    loss = model(tokens).square().mean()
    loss.backward()
    expected = model.embedding.weight.grad
    model.zero_grad()
    file.run(model, tokens).square().mean().backward()
    print("the same gradients:", torch.equal(model.embedding.weight.grad, expected))


if __name__ == "__main__":
    main()
