"""Check whether a model has the same loss and gradients as a pipeline: one call, in this process.

Run it with `python examples/check_model.py`. Replace model, batch and loss by your own.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock


class Net(nn.Module):
    """Blocks with a long skip connection, dropout, and an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for every token."""
        x = first = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + first)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the labels that are not ignored."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    """Check a schedule with full backwards, and two with split backwards."""
    torch.manual_seed(0)
    model, tokens = Net(), torch.randint(0, 50, (10, 12))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    labels[3:, 6:] = -100
    for schedule in ("1f1b", "zb_h1", "zbv"):
        plan = penstock.plan(model, (tokens,), ranks=3, microbatches=4, schedule=schedule)
        report = penstock.check(model, plan, (tokens,), loss_fn=loss_fn, target=labels)
        print(f"{schedule}: {report}\n")


if __name__ == "__main__":
    main()
