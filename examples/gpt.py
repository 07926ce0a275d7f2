"""A small GPT that learns Python's grammar, as a pipeline of 3 ranks in this process, compared with plain PyTorch.

Run it with `python examples/gpt.py`. The plan is searched. For separate processes, see `mlp.py`.
"""

import copy
import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock

RANKS, STEPS, SAMPLES, LENGTH, WIDTH = 3, 6, 12, 32, 48
TEXT = torch.tensor(list(inspect.getsource(nn.Linear).encode("ascii")))


class Block(nn.Module):
    """Causal attention, then a small network, each with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        y = self.norm1(x)
        y = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return y + self.mlp(self.norm2(y))


class Gpt(nn.Module):
    """Predicts the next byte; the head is tied to the embedding, so first and last stage share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 128, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of every position."""
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1)))
        mask = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all positions."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Plan, train both, and compare."""
    torch.manual_seed(0)
    model, plain = (each := Gpt()), copy.deepcopy(each)
    rows = TEXT.unfold(0, LENGTH + 1, 1)[torch.randint(0, len(TEXT) - LENGTH, (STEPS, SAMPLES))]
    plan = penstock.plan(model, (rows[0, :, :-1],), ranks=RANKS, microbatches=4, budget_seconds=1)
    print(plan, end="\n\n")
    pipe = penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (pipe, plain))
    for step, (ids, targets) in enumerate((batch[:, :-1], batch[:, 1:]) for batch in rows):
        loss, expected = pipe.step(ids, target=targets).loss, loss_fn(plain(ids), targets)
        expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: pipeline {loss:.6f}, plain {expected:.6f}")
        assert abs(loss - expected) < 1e-3


if __name__ == "__main__":
    main()
