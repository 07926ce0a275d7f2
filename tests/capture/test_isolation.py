"""Recording leaves the model, its generators, gradients, buffers and Python attributes as they were."""

import gc
import math
import random
import sys
import weakref
from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capture import DispatchMode, capture, isolation
from penstock.capture.isolation import uncompiled, without_accumulation_hooks
from penstock.capture.tensors import same_content
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from tests.capture.models import Counting, Stack

BATCH = torch.randn(6, 4)


def state(model):
    return (
        [tensor.clone() for tensor in model.state_dict().values()],
        [parameter.grad for parameter in model.parameters()],
        [(module.training, len(module._forward_hooks), sorted(module.__dict__)) for module in model.modules()],
        (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
        [vars(kind).get("__call__") for module in model.modules() for kind in type(module).__mro__],
        vars(torch.autograd.Function).get("apply"),
    )


def same(one, other):
    return all(
        torch.equal(a, b)
        if isinstance(a, torch.Tensor)
        else np.array_equal(a, b)
        if isinstance(a, np.ndarray)
        else a == b
        for a, b in zip(flat(one), flat(other), strict=True)
    )


def flat(thing):
    return [leaf for item in thing for leaf in flat(item)] if isinstance(thing, list | tuple) else [thing]


def test_capture_leaves_everything_as_it_was():
    model = Stack()
    model.norm.register_forward_hook(lambda *_: None)
    model(BATCH).sum().backward()
    before = state(model)
    # Not penstock.capture: its modules are imported on first use, which draws random numbers.
    capture(model, (BATCH,))
    assert same(before, state(model))


def test_a_refused_capture_leaves_everything_as_it_was():
    model = Counting()
    before = state(model)
    with pytest.raises(CaptureError, match="the model runs differently each time"):
        capture(model, (BATCH,))
    assert same(before, state(model))


class Interrupted(nn.Module):
    """A block during which ctrl-c is pressed."""

    def forward(self, x):
        raise KeyboardInterrupt


def test_an_interrupted_capture_leaves_everything_as_it_was():
    model = Stack()
    model.drop = Interrupted()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        capture(model, (BATCH,))
    assert same(before, state(model))


def test_attributes_that_a_forward_sets_are_taken_back():
    class Setting(Stack):
        def forward(self, x):
            self.seen = x.shape
            return super().forward(x)

    model = Setting()
    penstock.capture(model, (BATCH,))
    assert not hasattr(model, "seen")


class Doing(nn.Module):
    """A block that does something to itself in every forward."""

    calls = 0

    def __init__(self, deed):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.deed = deed
        self.recent, self.counts, self.found = deque(maxlen=5), Counter(), defaultdict(int)
        self.notes, self.nested, self.own = SimpleNamespace(calls=0), [[]], torch.Generator().manual_seed(3)

    def forward(self, x):
        self.deed(self)
        return x * self.weight


def _replace(self):
    self.weight.data = self.weight.data * 0.9


def _write(self):
    with torch.no_grad():
        torch._foreach_mul_([self.weight], 0.9)


def _note(self):
    self.recent.append(1)
    self.counts["calls"] += 1
    self.found["calls"] += 1
    self.notes.calls += 1
    self.nested[0].append(1)


DEEDS = {
    "writes through data": lambda self: self.weight.data.mul_(0.9),
    "writes": _write,
    "replaces data": _replace,
    "takes gradients": lambda self: self.weight.sum().backward(),
    "needs no gradient": lambda self: self.weight.requires_grad_(False),
    "hooks": lambda self: self.weight.requires_grad and self.weight.register_hook(lambda gradient: gradient * 0.5),
    "notes": _note,
    "draws": lambda self: torch.rand(2, generator=self.own),
    "counts for all of its class": lambda self: setattr(Doing, "calls", Doing.calls + 1),
}


def being(block):
    """All that belongs to a block, as values."""
    return (
        block.weight.tolist(),
        block.weight.data_ptr(),
        block.weight.requires_grad,
        None if block.weight.grad is None else (id(block.weight.grad), block.weight.grad.tolist()),
        len(block.weight._backward_hooks or ()),
        (list(block.recent), dict(block.counts), dict(block.found), vars(block.notes).copy(), [list(block.nested[0])]),
        block.own.get_state().tolist(),
        Doing.calls,
    )


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("limit", [1 << 30, 0])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_block_that_does_something_to_itself_is_left_as_it_was(deed, limit, has_gradient, monkeypatch):
    monkeypatch.setattr(isolation, "_MAX_COPIED_BYTES", limit)
    model = nn.Sequential(Doing(DEEDS[deed]), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.grad = torch.ones(4) if has_gradient else None
    before = being(model[0])
    captured = penstock.capture(model, (BATCH,))
    assert being(model[0]) == before
    penstock.split(captured, uniform(captured.graph, 2))
    assert being(model[0]) == before


@pytest.mark.parametrize("limit", [1 << 30, 0])
def test_an_embedding_that_keeps_its_rows_short_is_left_as_it_was(limit, monkeypatch):
    monkeypatch.setattr(isolation, "_MAX_COPIED_BYTES", limit)
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 4), nn.Linear(4, 4))
    before = model[0].weight.detach().clone()
    captured = penstock.capture(model, (torch.arange(6),))
    penstock.split(captured, uniform(captured.graph, 2))
    assert torch.equal(model[0].weight, before)


def test_hooks_that_step_an_optimizer_can_be_kept_from_running():
    model, seen = Stack(), []
    model.head.weight.register_post_accumulate_grad_hook(lambda _: seen.append("step"))
    with without_accumulation_hooks(model):
        model(BATCH).sum().backward()
    assert seen == []
    model(BATCH).sum().backward()
    assert seen == ["step"]


def test_a_batch_of_one_is_turned_within_itself_for_the_check():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    captured = penstock.capture(model, (BATCH[:1],))
    (other,), _ = captured.other_batch()
    assert torch.equal(other, BATCH[:1].roll(1, 1))


def test_a_batch_of_one_that_decides_otherwise_when_turned_is_checked_as_it_is():
    class First(Stack):
        def forward(self, x):
            return super().forward(x * 2 if x[0, 0] > 0 else x)

    captured = penstock.capture(First().eval(), (torch.tensor([[1.0, -1.0, -1.0, -1.0]]),))
    (other,), _ = captured.other_batch()
    assert torch.equal(other, captured.example[0][0])


class Saving(torch.autograd.Function):
    """Has an object that lives as long as the autograd graph."""

    graphs: list[weakref.ref] = []  # noqa: RUF012
    num_alive: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        Saving.num_alive.append(sum(graph() is not None for graph in Saving.graphs))
        ctx.graph = nn.Module()
        Saving.graphs.append(weakref.ref(ctx.graph))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class SavingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Saving.apply(x * self.scale)


class Keeping(nn.Module):
    """Finds out whether autograd still has the activations of the blocks before."""

    nodes: list[Any] = []  # noqa: RUF012
    has_activations: list[bool] = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        for node in Keeping.nodes:
            try:
                Keeping.has_activations.append(isinstance(node._saved_result, Tensor))
            except IndexError:
                Keeping.has_activations.append(False)
        hidden = torch.sigmoid(self.linear(x))
        Keeping.nodes.append(hidden.grad_fn)
        return hidden + 1


def test_a_recording_keeps_the_activations_of_one_block_only() -> None:
    Keeping.nodes, Keeping.has_activations = [], []
    capture(nn.Sequential(Keeping(), Keeping(), Keeping()), (torch.randn(2, 4),))
    assert len(Keeping.nodes) == 6
    assert not any(Keeping.has_activations)


class Bypassing(nn.Module):
    """Calls the modules inside a block, which is found in the first forward: the block is opened, and two more run."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([SavingBlock(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

    def forward(self, x):
        x = self.blocks[0](x)
        for layer in self.blocks[1]:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("model", "num_forwards"), [(nn.Sequential(SavingBlock(), nn.Linear(4, 4)), 2), (Bypassing(), 3)]
)
def test_the_activations_of_a_forward_are_freed_before_the_next(model: nn.Module, num_forwards: int) -> None:
    Saving.graphs, Saving.num_alive = [], []
    gc.collect()
    gc.disable()
    try:
        capture(model, (torch.randn(2, 4),))
    finally:
        gc.enable()
    assert Saving.num_alive == [0] * num_forwards


def test_the_compiler_is_on_again_after_contexts_that_overlap() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    num_compiled = 0

    def backend(module, inputs):
        nonlocal num_compiled
        num_compiled += 1
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(twice, backend=backend)
    first, second = uncompiled(), uncompiled()
    # As two threads would: the first to enter is the first to exit.
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    compiled(torch.ones(2))
    assert num_compiled == 0
    second.__exit__(None, None, None)
    compiled(torch.ones(2))
    assert num_compiled == 1


def test_a_dispatch_mode_does_not_load_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    seen = []

    class Mode(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2)
    assert seen
    assert "torch._dynamo" not in sys.modules


def test_tensors_with_nan_in_the_same_places_are_the_same() -> None:
    for dtype in (torch.float32, torch.complex64):
        tensor = torch.tensor([1.0, math.nan], dtype=dtype)
        assert same_content(tensor, tensor.clone())
        assert not same_content(tensor, tensor + 1)


class Observer(nn.Module):
    """Resizes a buffer in its first forward, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.largest.numel():
            self.largest.resize_(4)
        self.largest.copy_(x.detach().amax(0))
        return self.linear(x)


def test_a_buffer_that_a_block_resizes_is_as_before() -> None:
    model = nn.Sequential(Observer(), Observer())
    captured = penstock.capture(model, (torch.randn(3, 4),))
    assert len(captured.graph.nodes) == 2
    assert all(block.largest.shape == (0,) for block in model)
