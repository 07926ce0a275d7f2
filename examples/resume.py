"""A training run that starts on 4 processes, resumes on 2 with another schedule, and has the losses of one process.

Run it with `python examples/resume.py`.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import penstock

WIDTH, LAYERS, STEPS = 32, 8, 5


def make_model() -> nn.Module:
    """Build eight blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step, the same on every rank."""
    x, y = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, y


def make_plan(ranks: int, schedule: str) -> penstock.Plan:
    """Make a plan with the same microbatches for any number of ranks, so that the losses are the same."""
    return penstock.plan(
        make_model(), (batch(0)[0],), ranks=ranks, microbatches=4, schedule=schedule, loss_fn=functional.mse_loss
    )


def train(plan: penstock.Plan, saved: Path) -> list[float]:
    """Train on one rank: resume from the checkpoint, if there is one, and take some steps."""
    pipe = penstock.Pipeline(make_model(), plan, loss_fn=functional.mse_loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    if saved.exists():
        print(f"a rank resumes and reads {pipe.load(saved, optimizer).bytes_read:,} bytes, those of its own stages")
    losses = []
    for step in range(pipe.num_steps, pipe.num_steps + STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        losses.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
    pipe.save(saved, optimizer, keep=1)
    return losses


def train_alone() -> list[float]:
    """Train in plain PyTorch without a stop."""
    model, losses = make_model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train in two parts, and compare with one uninterrupted run."""
    with tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "saved"
        losses = penstock.launch(train, 4, make_plan(4, "1f1b"), saved)[0]
        losses += penstock.launch(train, 2, make_plan(2, "zbv"), saved)[0]
    for step, (ours, plain) in enumerate(zip(losses, train_alone(), strict=True)):
        print(f"step {step}: {ours:.6f}, one process {plain:.6f}, difference {abs(ours - plain):.1e}")
        assert abs(ours - plain) < 1e-5


if __name__ == "__main__":
    main()
