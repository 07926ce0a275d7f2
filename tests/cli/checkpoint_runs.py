"""Options, data and ways to run the command, for tests of training with checkpoints."""

import os
import sys
from pathlib import Path

from benchmarks.short_training import COMMAND, ShortTraining
from penstock.cli import main

DATA = """\
import random
import numpy as np
import torch

def drawn():
    order = np.random.permutation(100)
    for number in order:
        yield torch.full((8, 16), number + random.random()), torch.randn(8, 16)

def broken():
    while True:
        yield torch.full((8, 16), float("nan")), torch.randn(8, 16)

class Breaking(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.count = getattr(self, "count", 0) + 1
        if self.count == 3:
            self.param_groups[0]["params"][0].data[0] = float("nan")

def breaking(parameters):
    return Breaking(parameters, lr=0.1)
"""

LASTING = ("--checkpoint", "saved", "--every", "3", "--resume", "auto", "--out", "out")


def refused(training: ShortTraining, *options: object) -> str:
    code, output = training.call(*COMMAND, *options)
    assert code in (2, 5, 6), output
    assert "Traceback" not in output
    return output


def in_a_copy(
    directory: Path, output: Path, *options: str, command: tuple[str, ...] = COMMAND, **environment: str
) -> int:
    """Run the command in a copy of this process, which starts at once; returns its pid. Its output goes into a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(directory)
        os.environ.update(environment)
        sys.stdout = sys.stderr = output.open("w", buffering=1)
        sys.argv = ["penstock", *command, *options]
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)
