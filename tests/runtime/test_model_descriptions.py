"""Attributes in which the processes of one training may differ are not compared; those that change results are."""

import logging
import random
import time
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.capture import Granularity, capture, describe_model, describe_recording
from tests.small_models import WIDTH, noise

X = noise(4, WIDTH)


class Block(nn.Module):
    """A leaf. Its code reads all attributes that a case may give it, as logging and caching code does."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.linear.weight.data.fill_(0.1)
        self.linear.bias.data.fill_(0.1)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        self.note()
        return torch.tanh(self.linear(x))

    def note(self) -> None:
        """Read everything."""
        _ = [
            *(self.rank, self.local_rank, self.global_rank, self.is_main, self.is_main_process, self.is_rank_zero),
            *(self.print_stats, self.should_log, self.log, self.verbose, self.debug, self.show_progress),
            *(self.disable_tqdm, self.run_id, self.wandb_id, self.experiment_name, self.uid, self.key, self.created),
            *(self.start_time, self.t0, self.elapsed, self.output_dir, self.log_file, self.device, self.hostname),
            *(self.port, self.logger, self.writer, self.cache, self.seen, self.tag, self.config, self.settings),
            *(self.scale, self.eps, self.causal, self.mode, self.act, self.mask_value, self.window, self.heads, self.p),
        ]


class Counting(Block):
    """A leaf that counts its calls, and fills a cache."""

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        self.calls += 1
        self.cached = x.shape
        self.history.append(float(self.calls))
        return torch.tanh(self.linear(x))


@dataclass
class Config:
    """Settings with a path."""

    eps: float = 1e-5
    output_dir: str = "out"
    rank: int = 0


def random_text() -> str:
    return f"{random.SystemRandom().randrange(16**8):08x}1"


Model = Callable[[int], nn.Module]


def of(**attributes: Callable[[int], Any]) -> Model:
    """A model whose block has the attributes that these functions return for a rank."""
    return lambda rank: nn.Sequential(Block(**{name: make(rank) for name, make in attributes.items()}), Block())


HARMLESS: dict[str, Model] = {
    "rank": of(rank=lambda rank: rank),
    "local rank": of(local_rank=lambda rank: rank, global_rank=lambda rank: 8 + rank),
    "main process": of(is_main=lambda rank: rank == 0),
    "main process flag": of(is_main_process=lambda rank: not rank),
    "rank zero": of(is_rank_zero=lambda rank: rank == 0),
    "printing": of(print_stats=lambda rank: rank == 0),
    "should log": of(should_log=lambda rank: rank == 0),
    "log": of(log=lambda rank: rank == 0),
    "verbose": of(verbose=lambda rank: 2 - rank),
    "debug": of(debug=lambda rank: rank == 1),
    "progress": of(show_progress=lambda rank: rank == 0),
    "tqdm": of(disable_tqdm=lambda rank: rank > 0),
    "run id": of(run_id=lambda rank: random_text()),
    "wandb id": of(wandb_id=lambda rank: random_text()),
    "experiment": of(experiment_name=lambda rank: f"trial-{rank}"),
    "uuid": of(uid=lambda rank: uuid.uuid4().hex),
    "random key": of(key=lambda rank: random_text()),
    "created": of(created=lambda rank: time.time() + rank),
    "start time": of(start_time=lambda rank: time.monotonic() + rank),
    "t0": of(t0=lambda rank: time.perf_counter() + rank),
    "elapsed": of(elapsed=lambda rank: 0.1 * rank),
    "output path": of(output_dir=lambda rank: f"/runs/{rank}"),
    "output directory": of(output_dir=lambda rank: f"run{rank}"),
    "log file": of(log_file=lambda rank: f"train-{rank}.log"),
    "device": of(device=lambda rank: f"cuda:{rank}"),
    "torch device": of(device=lambda rank: torch.device("cuda", rank)),
    "host": of(hostname=lambda rank: f"node{rank}"),
    "port": of(port=lambda rank: 29500 + rank),
    "logger": of(logger=lambda rank: logging.getLogger(f"rank {rank}")),
    "writer of one process": of(writer=lambda rank: None if rank else logging.StreamHandler()),
    "cache": of(cache=lambda rank: {"mask": torch.zeros(rank + 1)}),
    "tag": of(tag=lambda rank: f"worker_{rank}"),
    "dict": of(settings=lambda rank: {"rank": rank, "output_dir": f"run{rank}", "eps": 1e-5}),
    "configuration": of(config=lambda rank: Config(output_dir=f"run{rank}", rank=rank)),
    "counter": lambda rank: counted(rank),
    "attribute that no code reads": of(unread=lambda rank: rank),
    "root flag": lambda rank: Root(rank == 0, random_text()),
}


def counted(rank: int) -> nn.Module:
    block = Counting(calls=0, cached=None, history=[])
    if rank:
        block(X)
    return nn.Sequential(block, Counting(calls=0, cached=None, history=[]))


class Root(nn.Module):
    """A model with attributes outside of blocks."""

    def __init__(self, speaks: bool, name: str, scale: float = 1.0, dim: int = -1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Block(), Block()))
        self.speaks, self.name, self.scale, self.dim = speaks, name, scale, dim

    def forward(self, x: Tensor) -> Tensor:
        """Blocks with a function between them."""
        for block in self.blocks:
            x = functional.softmax(block(x) * self.scale, self.dim)
        return x if self.speaks or self.name else +x


HARMFUL: dict[str, Model] = {
    "scale": of(scale=lambda rank: 1.0 + rank),
    "eps": of(eps=lambda rank: 10.0 ** (-5 - rank)),
    "causal": of(causal=lambda rank: rank == 0),
    "mode": of(mode=lambda rank: ("nearest", "bilinear")[rank]),
    "activation function": of(act=lambda rank: (torch.relu, torch.tanh)[rank]),
    "activation of the user": of(act=lambda rank: (lambda x: x * 2.0, lambda x: x * 3.0)[rank]),
    "mask value": of(mask_value=lambda rank: (-1e9, float("-inf"))[rank]),
    "window": of(window=lambda rank: (3, 3 + rank)),
    "heads": of(heads=lambda rank: 2**rank),
    "dropout": lambda rank: nn.Sequential(Block(), nn.Dropout(0.1 + 0.1 * rank)),
    "normalization": lambda rank: nn.Sequential(Block(), nn.LayerNorm(WIDTH, eps=10.0 ** (-5 - rank)).double()),
    "module": lambda rank: nn.Sequential(Block(), (nn.ReLU(), nn.GELU())[rank]),
    "configuration": of(config=lambda rank: Config(eps=10.0 ** (-5 - rank))),
    "namespace": of(config=lambda rank: types.SimpleNamespace(eps=0.1 + rank)),
    "dict": of(settings=lambda rank: {"eps": 0.1 + rank, "rank": rank}),
    "factor between blocks": lambda rank: Root(True, "", 1.0 + rank),
    "dimension between blocks": lambda rank: Root(True, "", dim=-1 - rank),
    "number of blocks": lambda rank: nn.Sequential(*(Block() for _ in range(2 + rank))),
}


def description(model: nn.Module) -> tuple[str, ...]:
    """What ranks compare of a model before its first step."""
    recording = capture(model, (X,)).example_recording
    opened = Granularity.of(recording.graph).opened
    return (*describe_model(model, opened), *describe_recording(recording))


@pytest.fixture(autouse=True)
def attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attribute that a case does not set is None."""
    for name in Block.note.__code__.co_names:
        monkeypatch.setattr(Block, name, None, raising=False)


@pytest.mark.parametrize("name", HARMLESS)
def test_ranks_may_differ_in_what_does_not_change_results(name: str) -> None:
    assert description(HARMLESS[name](0)) == description(HARMLESS[name](1))


@pytest.mark.parametrize("name", HARMFUL)
def test_ranks_may_not_differ_in_what_changes_results(name: str) -> None:
    assert description(HARMFUL[name](0)) != description(HARMFUL[name](1))
