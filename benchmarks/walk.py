"""Counts the Python functions and files that run in one training step, in penstock and in torch's pipelining.

    python -m benchmarks.walk          # calls, functions and files of both
    python -m benchmarks.walk --list   # also the files with their functions

Both train the same MLP with `mse_loss` as one stage with 4 microbatches in one process: penstock with
`Pipeline(..., local=True)` and the schedule gpipe, torch with `ScheduleGPipe` in a gloo group of one process. The fifth
step is counted. Only functions of penstock and of torch.distributed.pipelining are counted. Comprehensions, generator
expressions and lambdas are not, because they are read as a part of the function around them.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

import penstock

WIDTH, SAMPLES, MICROBATCHES, WARM_STEPS = 16, 8, 4, 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def penstock_step() -> Callable[[], object]:
    """Returns a step of a Pipeline, after warmup."""
    model, x, target = make_model(), torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    speed = penstock.DeviceSpeed(1e9, 1e9)
    options = {"ranks": 1, "microbatches": MICROBATCHES, "schedule": "gpipe", "partitioner": "uniform", "speed": speed}
    plan = penstock.plan(model, (x,), loss_fn=mse_loss, **options)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    return warm_up(lambda: pipe.step(x, target=target))


def torch_step() -> Callable[[], object]:
    """Returns a step of torch's schedule, after warmup; needs an initialised process group."""
    model, x, target = make_model(), torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, MICROBATCHES, mse_loss)
    # pipe.step does not return outputs by default either.
    return warm_up(lambda: schedule.step(x, target=target, return_outputs=False))


def warm_up(step: Callable[[], object]) -> Callable[[], object]:
    for _ in range(WARM_STEPS):
        step()
    return step


def count_calls(step: Callable[[], object], directory: Path) -> Counter[CodeType]:
    """Counts the calls of every function in the files below a directory during one step."""
    calls: Counter[CodeType] = Counter()
    prefix = f"{directory}/"

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions and lambdas have names such as <listcomp>.
        if event == "call" and code.co_filename.startswith(prefix) and not code.co_name.startswith("<"):
            calls[code] += 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def print_files(calls: Counter[CodeType], directory: Path) -> None:
    """Prints every file with its functions and the number of calls of each."""
    for file in sorted({code.co_filename for code in calls}):
        print(f"  {Path(file).relative_to(directory)}")
        found = sorted((code for code in calls if code.co_filename == file), key=lambda code: code.co_firstlineno)
        for code in found:
            print(f"    {calls[code]:5}  {code.co_qualname} (line {code.co_firstlineno})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description="Count the functions of a step.")
    parser.add_argument("--list", action="store_true", help="list the files with their functions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch_calls = count_calls(torch_step(), Path(pipelining.__file__).parent)
    # With local=True a user has no process group.
    dist.destroy_process_group()
    for name, module, calls in (
        ("penstock", penstock, count_calls(penstock_step(), Path(penstock.__file__).parent)),
        ("torch.distributed.pipelining", pipelining, torch_calls),
    ):
        files = len({code.co_filename for code in calls})
        print(f"{name:30} {calls.total():6} calls {len(calls):5} functions {files:4} files")
        if options.list:
            print_files(calls, Path(module.__file__).parent)


if __name__ == "__main__":
    main()
