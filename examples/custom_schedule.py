"""A schedule written by hand: prove it, compare it with 1f1b, train with it; and one that is refused.

Run it with `python examples/custom_schedule.py`. To add a named schedule to penstock, see CONTRIBUTING.md.
"""

import copy

import torch
from torch import nn
from torch.nn import functional

import penstock

# A row per rank, a cell per action: stage, kind (F, B, or I and W), microbatch.
EAGER = """\
0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
"""
BLOCKED = """\
0F0,0B0,0F1,0B1
1F0,1F1,1B0,1B1
"""


def main() -> None:
    """Prove and time one order and train with it; show why the other is refused."""
    own = penstock.Schedule.from_csv(EAGER)
    penstock.verify(own)
    for name, schedule in {"own": own, "1f1b": penstock.schedule("1f1b", 2, 4)}.items():
        trace = penstock.simulate(schedule)
        print(f"{name}: {trace.makespan:g} s, {trace.bubble:.1%} bubble")
    try:
        penstock.verify(penstock.Schedule.from_csv(BLOCKED))
    except penstock.PenstockError as error:
        print(error)
    train(own)


def train(schedule: penstock.Schedule) -> None:
    """Take some steps with the order, all ranks in this process, and compare with plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    plain, x, y = copy.deepcopy(model), torch.randn(8, 16), torch.randn(8, 16)
    plan = penstock.plan(model, (x,), ranks=2, microbatches=4, schedule=schedule, partitioner="linear")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, local=True)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (pipe, plain))
    for step in range(3):
        loss, expected = pipe.step(x, target=y).loss, functional.mse_loss(plain(x), y)
        expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: own order {loss:.6f}, plain {expected:.6f}")
        assert abs(loss - expected) < 1e-5


if __name__ == "__main__":
    main()
