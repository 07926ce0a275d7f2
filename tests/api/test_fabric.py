"""The loop on the page about Lightning Fabric has the losses of a plain loop, on two processes that torchrun starts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fabric.md"


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    x, y = torch.randn(32, 8), torch.randn(32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, target in zip(x.split(8), y.split(8), strict=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_loop_of_the_page_trains_as_a_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert json.loads(line) == pytest.approx(plain_losses(), rel=1e-5)
