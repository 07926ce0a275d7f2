"""Settings of a model that its user changes between two batches: what was recorded before no longer holds."""

from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn

import penstock


class Model(nn.Module):
    """Blocks, and glue that goes by a setting."""

    def __init__(self, glue):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.config = SimpleNamespace(scale=2.0, inner={"shift": [1.0]})
        self.kind, self.act, self.table = torch.float32, torch.relu, {"a": torch.ones(8)}
        self.glue = glue

    def forward(self, x):
        """All blocks, then the glue."""
        for block in self.blocks:
            x = block(x)
        return self.glue(self, x)


def other_forward(self, x):
    return self.blocks[0](x) * 3


@pytest.mark.parametrize(
    ("glue", "change"),
    [
        (lambda m, x: x * m.config.scale, lambda m: setattr(m.config, "scale", 5.0)),
        (lambda m, x: x + m.config.inner["shift"][0], lambda m: m.config.inner["shift"].__setitem__(0, 7.0)),
        (lambda m, x: x.to(m.kind), lambda m: setattr(m, "kind", torch.float64)),
        (lambda m, x: m.act(x), lambda m: setattr(m, "act", torch.sigmoid)),
        (lambda m, x: x * m.table["a"], lambda m: m.table.__setitem__("a", torch.full((8,), 4.0))),
        (lambda m, x: x, lambda m: setattr(m, "forward", MethodType(other_forward, m))),
    ],
)
def test_a_changed_setting_is_recorded_anew(glue, change):
    model, x = Model(glue), torch.randn(4, 8)
    captured = penstock.capture(model, (x,))
    change(model)
    recording = captured.recording((x,), {})
    assert recording is not captured.first
    found = captured.replay(recording, [node.name for node in recording.graph.nodes], model, recording.graph.outputs)
    (output,) = found.run(captured.inputs((x,), {})).values()
    assert torch.equal(output, model(x))


def test_unchanged_settings_need_no_other_recording():
    model, x = Model(lambda m, x: x * m.config.scale), torch.randn(4, 8)
    captured = penstock.capture(model, (x,))
    assert captured.recording((torch.randn(4, 8),), {}) is captured.first
    assert captured.num_recordings == 1
