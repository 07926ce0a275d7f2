"""Two replicas of a pipeline of two ranks on 4 local processes, compared with one process.

Run it with `python examples/dp_pp.py`. Each replica takes its half of the batch; gradients are averaged over both.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import penstock

REPLICAS, RANKS, STEPS, SAMPLES, WIDTH = 2, 2, 5, 16, 32


def make_model() -> nn.Module:
    """Build six blocks and a head, with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Linear(WIDTH, 5))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Yield whole batches, for all replicas together."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, SAMPLES, WIDTH, generator=generator)
    return list(zip(inputs, torch.randint(0, 5, (STEPS, SAMPLES), generator=generator), strict=True))


def train(plan: penstock.Plan) -> list[float]:
    """Train on one process; return the losses of its replica's half of every batch."""
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))
    pipe = penstock.Pipeline(make_model(), plan, loss_fn=functional.cross_entropy, mesh=mesh)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    replica, losses = mesh["dp"].get_local_rank(), []
    for x, y in batches():
        optimizer.zero_grad()
        own = slice(replica * SAMPLES // REPLICAS, (replica + 1) * SAMPLES // REPLICAS)
        losses.append(pipe.step(x[own], target=y[own]).loss.item())
        optimizer.step()
    return losses


def train_alone() -> list[float]:
    """Train in plain PyTorch on whole batches."""
    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Plan for half a batch, train, and compare the mean of the replicas."""
    half = batches()[0][0][: SAMPLES // REPLICAS]
    plan = penstock.plan(make_model(), (half,), ranks=RANKS, microbatches=4, schedule="1f1b", partitioner="linear")
    print(plan, end="\n\n")
    losses = torch.tensor(penstock.launch(train, REPLICAS * RANKS, plan))  # a row per process
    for step, (ours, plain) in enumerate(zip(losses.mean(0).tolist(), train_alone(), strict=True)):
        print(f"step {step}: replicas {ours:.6f}, one process {plain:.6f}, difference {abs(ours - plain):.1e}")
        assert abs(ours - plain) < 1e-4


if __name__ == "__main__":
    main()
