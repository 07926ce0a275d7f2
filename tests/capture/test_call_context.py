"""Grad mode and autocast that a model changes between its blocks are the same in a replay."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capture import Replay
from penstock.ir import Call
from tests.codegen.generated import generated

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
SEEN: list[dict[str, bool]] = []
"""of every call of a Watching block: for which device types autocast was on"""


class Watching(nn.Linear):
    """A block that notes the autocast around it, with a result for blocks with and without autocast."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append({kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")})
        return super().forward(x).float()


class WithoutAutocast(nn.Module):
    """Turns autocast off around its second block, for one device type or for several."""

    def __init__(self, *device_types: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Watching(8, 8) for _ in range(3))
        self.device_types = device_types

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        second = self.blocks[1]
        for device_type in self.device_types:
            second = torch.autocast(device_type, enabled=False)(second)
        return self.blocks[2](second(x))


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """Autocast for CUDA, which `torch.autocast` does not turn on where there is no GPU."""
    was_enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", was_enabled)


@pytest.mark.usefixtures("cuda_autocast")
@pytest.mark.parametrize("device_types", [("cpu",), ("cuda",), ("cpu", "cuda")], ids="+".join)
def test_autocast_that_a_model_turns_off_is_off_in_a_replay(device_types: tuple[str, ...], tmp_path: Path) -> None:
    model = WithoutAutocast(*device_types)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = penstock.capture(model, (BATCH,))
        SEEN.clear()
        expected = model(BATCH)
        seen_by_model = [*SEEN]
        SEEN.clear()
        recording = captured.example_recording
        Replay(recording, [node.name for node in captured.graph.nodes], model, ()).run({"x": BATCH})
        assert seen_by_model == SEEN
        SEEN.clear()
        found = generated(captured, 2, tmp_path).run(model, BATCH)
        assert seen_by_model == SEEN
    assert torch.equal(found, expected)
    assert seen_by_model[1] == {kind: kind not in device_types for kind in ("cpu", "cuda")}


@pytest.mark.usefixtures("cuda_autocast")
def test_a_call_records_only_the_autocast_that_the_model_changes() -> None:
    captured = penstock.capture(WithoutAutocast("cuda"), (BATCH,))
    contexts = [step.context.autocast for step in captured.example_recording.record.steps if isinstance(step, Call)]
    assert contexts == [(), (("cuda", False, "torch.float16"),), ()]
