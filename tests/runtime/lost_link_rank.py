"""Script for torchrun on two hosts: trains until an error, and writes every loss and the error to DIRECTORY/rankN.json.

`lost_link_rank.py DIRECTORY SECONDS` with the deadline.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import penstock

MAX_STEPS = 100_000


def main(directory: Path, deadline_seconds: float) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), torch.randn(8, 32)
    speed = penstock.DeviceSpeed(1e9, 1e9)
    sizes = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "partitioner": "uniform", "speed": speed}
    plan = penstock.plan(model, (x,), loss_fn=mse_loss, **sizes)
    options = penstock.RunOptions(deadline_seconds=deadline_seconds)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, options=options)
    page = directory / f"rank{dist.get_rank()}.json"
    losses, error = set(), ""
    for number in range(MAX_STEPS):
        began = time.monotonic()
        try:
            losses.add(float(pipe.step(x, target=x).loss))
        except penstock.RunError as found:
            error = str(found)
        text = json.dumps({"steps": number, "losses": list(losses), "error": error, "last": time.monotonic() - began})
        # Replaced in one piece, as the test reads it meanwhile.
        page.with_suffix(".new").write_text(text)
        page.with_suffix(".new").rename(page)
        if error:
            sys.exit(1)
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
