"""Two replicas of a pipeline of two ranks on 4 local processes, compared with one process.

Run it with `python examples/dp_pp.py`. Each replica takes its half of the batch; gradients are averaged over both, and
the loss of a step is that of the whole batch on every rank.
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
    """Return whole batches, for all replicas together."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, SAMPLES, WIDTH, generator=generator)
    return list(zip(inputs, torch.randint(0, 5, (STEPS, SAMPLES), generator=generator), strict=True))


def train() -> list[float]:
    """Train on one process; return the losses of the whole batches, which are the same on all processes."""
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))
    model, half = make_model(), batches()[0][0][: SAMPLES // REPLICAS]
    options = {"microbatches": 4, "schedule": "1f1b", "partitioner": "linear"}
    # The first rank measures and plans; the cluster has the ranks of one pipeline, and its replicas.
    plan = penstock.plan_together(lambda cluster: penstock.plan(model, (half,), ranks=cluster, **options), mesh=mesh)
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.cross_entropy, mesh=mesh)
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
    """Train, and compare with one process."""
    first, *others = penstock.launch(train, REPLICAS * RANKS)
    assert all(losses == first for losses in others)
    for step, (ours, plain) in enumerate(zip(first, train_alone(), strict=True)):
        print(f"step {step}: replicas {ours:.6f}, one process {plain:.6f}, difference {abs(ours - plain):.1e}")
        assert abs(ours - plain) < 1e-4


if __name__ == "__main__":
    main()
