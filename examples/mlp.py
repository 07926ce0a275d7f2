"""A small model trained as a pipeline on 2 local processes, compared with one process.

Run it with `python examples/mlp.py`.
"""

import copy

import torch
from torch import nn
from torch.nn import functional

import penstock

WIDTH, LAYERS, STEPS, RANKS = 64, 8, 10, 2


def make_model() -> nn.Module:
    """Build eight blocks and a head."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the same batches on every rank; some labels are ignored, like padding."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        labels = torch.randint(0, 10, (32,), generator=generator)
        labels[torch.rand(32, generator=generator) < 0.2] = -100
        found.append((torch.randn(32, WIDTH, generator=generator), labels))
    return found


def train(model: nn.Module, plan: penstock.Plan) -> list[float]:
    """Train on one rank: an ordinary training loop with `pipe` in place of the model."""
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        losses.append(pipe.step(x, target=y).loss.item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
    return losses


def train_alone(model: nn.Module) -> list[float]:
    """Train in plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Plan, train on processes, and compare."""
    model = make_model()
    plan = penstock.plan(model, (batches()[0][0],), ranks=RANKS, microbatches=4, schedule="zb_h1")
    print(plan, end="\n\n")
    first, *_ = penstock.launch(train, RANKS, copy.deepcopy(model), plan)
    for step, (ours, plain) in enumerate(zip(first, train_alone(model), strict=True)):
        print(f"step {step}: pipeline {ours:.6f}, one process {plain:.6f}, difference {abs(ours - plain):.1e}")
        assert abs(ours - plain) < 1e-4


if __name__ == "__main__":
    main()
