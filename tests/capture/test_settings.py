"""Settings of a model that its user changes between two batches: what was recorded before no longer holds."""

import copy
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.capture import Replay

SHARED = {"factor": 2.0}


def times(x):
    return x * SHARED["factor"]


class Slots:
    """Keeps its value in no dict."""

    __slots__ = ("value",)

    def __init__(self):
        self.value = 2.0


class Caller:
    """An object that is called."""

    factor = 2.0

    def __call__(self, x):
        return x * self.factor


class Model(nn.Module):
    """Blocks, and glue that goes by a setting."""

    scale = 2.0

    def __init__(self, glue):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.config = SimpleNamespace(scale=2.0, inner={"shift": [1.0]})
        self.kind, self.act, self.table = torch.float32, torch.relu, {"a": torch.ones(8)}
        self.array, self.names, self.slots, self.caller = np.ones(3), {"a"}, Slots(), Caller()
        self.many, self.remembered = [2.0] * 300, [2.0]
        self.remembering = lambda x, kept=self.remembered: x * kept[0]
        self.blocks[0].factor = 2.0
        self.glue = glue

    def outer(self, x):
        """By a global variable that a function mentions."""
        return times(x)

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
        (lambda m, x: x * m.scale, lambda m: setattr(Model, "scale", 3.0)),
        (lambda m, x: m.outer(x), lambda m: SHARED.__setitem__("factor", SHARED["factor"] + 1)),
        (lambda m, x: x * float(m.array[0]), lambda m: m.array.__setitem__(0, 5.0)),
        (lambda m, x: x * len(m.names), lambda m: m.names.add("b")),
        (lambda m, x: x * m.slots.value, lambda m: setattr(m.slots, "value", 5.0)),
        (lambda m, x: m.caller(x), lambda m: setattr(m.caller, "factor", 5.0)),
        (lambda m, x: x * m.many[0], lambda m: m.many.__setitem__(0, 5.0)),
        (lambda m, x: m.remembering(x), lambda m: m.remembered.__setitem__(0, 5.0)),
        (lambda m, x: x * m.blocks[0].factor, lambda m: setattr(m.blocks[0], "factor", 5.0)),
    ],
)
def test_a_changed_setting_is_recorded_again(glue, change):
    model, x = Model(glue), torch.randn(4, 8)
    captured = penstock.capture(model, (x,))
    change(model)
    recording = captured.recording((x,), {})
    assert recording is not captured.example_recording
    found = Replay(recording, [node.name for node in recording.graph.nodes], model, recording.graph.outputs)
    (output,) = found.run(captured.inputs((x,), {})).values()
    assert torch.equal(output, model(x))


def test_unchanged_settings_need_no_other_recording():
    model, x = Model(lambda m, x: x * m.config.scale), torch.randn(4, 8)
    captured = penstock.capture(model, (x,))
    assert captured.recording((torch.randn(4, 8),), {}) is captured.example_recording
    assert captured.num_recordings == 1


def test_attributes_that_the_forward_changes_are_no_settings():
    class Counting(nn.Sequential):
        def forward(self, x):
            self[0].calls = getattr(self[0], "calls", 0) + 1
            SHARED["calls"] = SHARED.get("calls", 0) + 1
            return super().forward(times(x))

    model, x = Counting(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    captured = penstock.capture(model, (x,))
    model(x)
    assert captured.recording((x,), {}) is captured.example_recording


class Scaled(nn.Sequential):
    """Goes by something that is no tensor."""

    def forward(self, x, by):
        """As the sum of an array, or an attribute of an object."""
        return super().forward(x) * float(by.sum() if isinstance(by, np.ndarray) else by.factor)


def array(place):
    found = np.zeros(5000)
    found[place] = place
    return found


@pytest.mark.parametrize(("one", "other"), [(array(2000), array(2001)), (Caller(), SimpleNamespace(factor=3.0))])
def test_an_argument_that_is_no_tensor_is_compared_by_its_content(one, other):
    model, x = Scaled(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    captured = penstock.capture(model, (x, one))
    assert captured.recording((x, copy.deepcopy(one)), {}) is captured.example_recording
    assert captured.recording((x, other), {}) is not captured.example_recording


def test_an_object_that_was_changed_since_is_another():
    model, x, given = Scaled(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), SimpleNamespace(factor=3.0)
    captured = penstock.capture(model, (x, given))
    given.factor = 4.0
    assert captured.recording((x, given), {}) is not captured.example_recording


def test_another_dtype_of_autocast_is_recorded_again():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = penstock.capture(model, (x,))
    with torch.autocast("cpu", dtype=torch.float16):
        assert captured.recording((x,), {}) is not captured.example_recording
