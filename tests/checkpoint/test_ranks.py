"""Every rank of a pipeline reads its own tensors, and none goes on alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from penstock.errors import PenstockError
from penstock.ir import Plan
from tests.runtime.plans import quick_plan

pytestmark = pytest.mark.gloo

X = torch.ones(4, 3)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))


def sharded(directory: Path) -> Path:
    """A file for every layer."""
    state = chain().state_dict()
    for name, tensor in state.items():
        save_file({name: tensor}, directory / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in state}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def load(plan: Plan, *directories: str) -> tuple[Any, str, float]:
    """What this rank reads from a directory, what it says of one that only one rank finds, and the loss after that."""
    with torch.device("meta"):
        bare = chain()
    pipe = penstock.Pipeline(bare, plan, loss_fn=nn.functional.mse_loss)
    loaded = pipe.load(directories[0])
    try:
        pipe.load(directories[int(torch.distributed.get_rank() == 1)])
        said = ""
    except PenstockError as error:
        said = str(error)
    return loaded, said, pipe.step(X, target=X).loss.item()


def test_each_rank_opens_its_own_files_and_a_refusal_is_one_of_all(pools: Any, tmp_path: Path) -> None:
    plan = quick_plan(chain(), (X,), ranks=2, microbatches=2, schedule="gpipe", loss_fn=nn.functional.mse_loss)
    results = pools[2].run(load, plan, str(sharded(tmp_path)), str(tmp_path / "nowhere"))
    expected = nn.functional.mse_loss(chain()(X), X).item()
    for rank, (loaded, said, loss) in enumerate(results):
        assert loaded.files == tuple(
            f"{2 * rank + n}.{kind}.safetensors" for n in (0, 1) for kind in ("bias", "weight")
        )
        assert (loaded.num_tensors, loaded.bytes_read) == (4, 96)
        assert "no such directory" in said
        assert loss == pytest.approx(expected)
