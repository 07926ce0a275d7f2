"""What real models do between their blocks is played again exactly, or refused."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.capture import Replay
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from penstock.stages import StageSequence
from tests.capture.models import Stack
from tests.parity import assert_stages_train_like_the_model
from tests.selection import covered

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Double(torch.autograd.Function):
    """Twice the input, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Handed(torch.autograd.Function):
    """Uses a module that it is given."""

    @staticmethod
    def forward(ctx, x, module):
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, 4:], x[:, :4]], dim=1)


GLUE = {
    "a mapped function whose number changes later": lambda self, x: mapped_before_assignment(x, 3.0),
    "a mapped function that holds a function twice": lambda self, x: mapped_twice(self.first, x),
    "a mapped function whose containers change later": lambda self, x: mapped_before_change(x),
    "a mapped function whose number is a tensor later": lambda self, x: mapped_before_assignment(x, x.mean(0)),
    "a plain attribute": lambda self, x: x * self.table,
    "a buffer": lambda self, x: x * self.norm.running_var,
    "a hook on a tensor": lambda self, x: (x.register_hook(lambda g: 2 * g), x)[1],
    "an autograd function": lambda self, x: Double.apply(x),
    "a scripted function": lambda self, x: scripted(x),
    "random numbers of torch": lambda self, x: x + torch.randn(8),
    "no gradient": lambda self, x: x + torch.no_grad()(lambda: self.embed(self.first))(),
    "a view of a parameter without gradient": lambda self, x: x + torch.no_grad()(lambda: self.head.weight.t())()[0, 0],
    "a mapped function": lambda self, x: torch.vmap(torch.tanh)(x),
    "a mapped function that holds values": lambda self, x: x + mapped_mask(self.first, x),
    "the gradient of a function": lambda self, x: torch.func.grad(lambda y: y.sin().sum())(x),
    "another type": lambda self, x: x.type(torch.float64).type(torch.float32),
    "a write into a part": lambda self, x: part_written(x * 1),
    "iteration over a tensor": lambda self, x: torch.stack(list(x)),
    "a number read from the input": lambda self, x: x * float(np.mean(self.first.numpy() > 0)),
    "a global variable": lambda self, x: x * ONES + ONES.sum(),
    "a tensor detached in place": lambda self, x: x + (y := x * 2).detach_() + y,
    "a gradient asked for": lambda self, x: x + self.first.detach().requires_grad_().sum(),
    "requires_grad set": lambda self, x: x + flagged(self.first * 1).sum(),
    "autocast": lambda self, x: torch.autocast("cpu", dtype=torch.bfloat16)(lambda: (x @ x.T) @ x)().float(),
}


class Indexing(TorchFunctionMode):
    """Allows an index that torch.vmap maps."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return torch.ops.aten.index(args[0], [args[1]])
        return func(*args, **(kwargs or {}))


def mapped_mask(first, x):
    """As in the masks of Hugging Face models: the function holds an input, and a mode is active around it."""
    lengths = (first > 0).sum(-1)

    def is_inside(row, column):
        return column < lengths[row]

    mapped = torch.vmap(torch.vmap(is_inside, in_dims=(None, 0)), in_dims=(0, None))
    with Indexing():
        return mapped(torch.arange(x.shape[0]), torch.arange(x.shape[1])).float()


def mapped_twice(first, x):
    """The mapped function holds a function with a tensor by itself and in another function, which refers to itself."""
    shift = first.mean()

    def shifted(row):
        return row + shift

    def repeated(row, times):
        return repeated(shifted(row), times - 1) if times else row

    return torch.vmap(lambda row: shifted(row) * repeated(row, 2))(x)


def mapped_before_assignment(x, later):
    """The mapped function holds variables that are assigned, or assigned anew, after the call."""
    factor = 2.0

    def scaled(row):
        return row * factor if factor else row * unassigned

    scaled_x = torch.vmap(scaled)(x)
    factor, unassigned = later, later
    return scaled_x * factor + unassigned


def mapped_before_change(x):
    """The mapped function holds containers that change after the call."""
    factors, shifts = [2.0], {"all": 1.0}
    scaled = torch.vmap(lambda row: row * factors[0] + shifts["all"])(x)
    factors[0], shifts["all"] = 3.0, 4.0
    return scaled * factors[0] + shifts["all"]


def flagged(x):
    x.requires_grad = True
    return x * 2


def part_written(x):
    x[:, :2] += 1
    view = x[:, 3]
    view.mul_(2)
    return x


class Glued(Stack):
    """Does one thing between its blocks."""

    def __init__(self, glue):
        super().__init__()
        self.table = torch.arange(8.0)
        self.glue = GLUE[glue]

    def forward(self, x):
        self.first = x
        x = self.blocks[0](self.embed(x))
        return self.head(self.blocks[2](self.glue(self, self.blocks[1](x))))


CUTS = [(glue, depth, stages) for glue in GLUE for depth in (None, 9) for stages in (2, 3, 4)]


@pytest.mark.parametrize(("glue", "depth", "stages"), covered(CUTS))
def test_stages_give_the_outputs_and_gradients_of_the_model(glue, depth, stages):
    captured = penstock.capture(Glued(glue), (BATCH,), depth=depth)
    assert_stages_train_like_the_model(captured, uniform(captured.graph, stages))


ONES, TRAINED, COUNT = torch.ones(8), torch.ones(8, requires_grad=True), torch.zeros(())
REFUSED = {
    "a tensor from nowhere": (
        lambda self, x: x * torch.from_numpy(np.ones(8, np.float32)),
        r"a tensor of unknown origin is used \(shape: \(8,\), dtype: torch.float32, where: /mul, line: .*y:\d+\)",
    ),
    "a parameter from nowhere": (lambda self, x: x * TRAINED, "a tensor of unknown origin is used"),
    "a global variable that is written": (lambda self, x: x + COUNT.add_(1), "writes into a tensor that is not part"),
    "a mapped module": (lambda self, x: torch.vmap(lambda row: self.head(row))(x), "other than through tensors in its"),
    "a linearized function": (lambda self, x: torch.func.jvp(torch.sin, (x,), (x,))[1], "a tensor of unknown origin"),
    "a gradient": (
        lambda self, x: torch.autograd.grad(x.sum(), x, create_graph=True)[0],
        r"takes gradients between its blocks.* \(module: the model, line: .*, function: grad\)\ntry: keep the module",
    ),
    "a backward": (lambda self, x: (x.sum().backward(), x)[1], "takes gradients between its blocks"),
    "a gradient that is there": (
        lambda self, x: x if self.head.weight.grad is None else x * 2,
        r"reads the gradient of a parameter between its blocks \(module: the model, line: .*, function: grad\)",
    ),
    "a generator that is set": (
        lambda self, x: (torch.manual_seed(11), x + torch.randn(8))[1],
        r"sets torch's generator between its blocks.* \(module: the model, line: .*, function: randn\)\ntry: keep",
    ),
    "a generator made in the forward": (
        lambda self, x: x + torch.randn(8, generator=torch.Generator().manual_seed(3)),
        r"runs differently each time.*where: generator\)",
    ),
    "random numbers of numpy": (lambda self, x: x * np.random.rand(8).sum(), "computes with an array that numpy drew"),
    "a module given to a function": (lambda self, x: Handed.apply(x, self.blocks[3]), "a module is passed to"),
    "a function that holds tensors": (lambda self, x: self.unbox(lambda: x), "an object that holds tensors is passed"),
}


class Unbox(nn.Linear):
    """A module that takes a function."""

    def forward(self, box):
        return super().forward(box())


@pytest.mark.parametrize("glue", REFUSED)
def test_code_that_cannot_be_replayed_is_refused(glue, monkeypatch):
    function, problem = REFUSED[glue]
    monkeypatch.setitem(GLUE, glue, function)
    model = Glued(glue)
    model.unbox = Unbox(8, 8)
    with pytest.raises(CaptureError, match=problem):
        penstock.capture(model, (BATCH,))


def test_a_function_that_a_mapped_function_holds_twice_reads_the_batch_of_the_step():
    model = Glued("a mapped function that holds a function twice").eval()
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
    assert torch.equal(run(BATCH + 1), model(BATCH + 1))


def test_a_global_variable_that_is_written_is_put_back():
    test_code_that_cannot_be_replayed_is_refused("a global variable that is written", pytest.MonkeyPatch())
    assert COUNT == 0


def test_a_global_variable_is_read_again_in_every_step(monkeypatch):
    model = Glued("a global variable").eval()
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
    monkeypatch.setattr(ONES, "data", torch.full((8,), 2.0))
    assert torch.equal(run(BATCH), model(BATCH))


def test_a_model_that_writes_into_its_input_leaves_the_users_batch_alone():
    class Writing(Stack):
        def forward(self, x):
            x.add_(1)
            return super().forward(x)

    batch = BATCH.clone()
    captured = penstock.capture(Writing(), (batch,))
    penstock.split(captured, uniform(captured.graph, 3))
    assert torch.equal(batch, BATCH)


def test_names_from_the_model_are_only_data():
    model = nn.Sequential()
    model.add_module("'); raise SystemExit  #", nn.Linear(4, 4))
    model.add_module("b/c@2", nn.Linear(4, 4))
    captured = penstock.capture(model, (BATCH,))
    assert [next(iter(stage.state_dict())) for stage in penstock.split(captured, uniform(captured.graph, 2))] == [
        "'); raise SystemExit  #.weight",
        "b/c@2.weight",
    ]


def test_compiled_blocks_stay_compiled():
    model = Stack().eval()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
    assert torch.equal(run(BATCH), model(BATCH))


class Constant(Stack):
    """Uses what is not a number between its blocks, and looks at one."""

    def forward(self, x):
        x = self.blocks[0](self.embed(x))
        found = torch.full((), float("nan")).item()
        x = x.masked_fill(x > 1e9, float("nan")) if found != found else x * 2
        return self.head(self.blocks[1](x))


def test_nan_decides_the_same_each_time():
    captured = penstock.capture(Constant(), (torch.randn(6, 4),))
    assert_stages_train_like_the_model(captured, uniform(captured.graph, 2))


class Choosing(Stack):
    """Branches on the number of positive entries, as `look` returns it."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        x = self.blocks[0](self.embed(x))
        found = x[x > 0]
        return self.head(self.blocks[1](x)) * (2 if self.look(found) else 1)


LOOKS = {
    "bytes": lambda found: found.nbytes > 4,
    "strides": lambda found: found[None].stride(0) > 1,
    "sizes": lambda found: not found.is_same_size(torch.zeros(1)),
}


@pytest.mark.parametrize("way", LOOKS)
def test_a_size_that_depends_on_numbers_is_compared_however_it_is_read(way):
    model = Choosing(LOOKS[way])
    captured = penstock.capture(model, (torch.randn(6, 4),))
    run = StageSequence(captured, uniform(captured.graph, 2))
    with torch.no_grad():
        model.embed.bias.fill_(-1e3), model.embed.weight.zero_(), model.blocks[0].linear.weight.zero_()
    with pytest.raises(CaptureError, match=r"recorded: size \(.*found: size \(0?,?"):
        run(torch.randn(6, 4))


class Lazy(Stack):
    """Makes a table in its first forward and keeps it."""

    def __init__(self, content, keep):
        super().__init__()
        self.content = content
        keep(self)

    def forward(self, x):
        if self.table is None:
            self.table = self.content(x)
        return super().forward(x * self.table)


POSITIONS, MEANS = (lambda x: torch.cos(torch.arange(4.0))), (lambda x: x.mean(0))
ATTRIBUTE, UNSAVED, SAVED = (
    lambda model: setattr(model, "table", None),
    lambda model: model.register_buffer("table", None, persistent=False),
    lambda model: model.register_buffer("table", None),
)


class Slopes(Lazy):
    """Makes the table from a buffer, as linear biases of attention are."""

    def __init__(self, content, keep):
        super().__init__(content, keep)
        self.register_buffer("slopes", torch.tensor(0.5))

    def forward(self, x):
        if self.table is None:
            self.table = self.content(x) * self.slopes
        return super().forward(x)


@pytest.mark.parametrize("keep", [ATTRIBUTE, UNSAVED])
@pytest.mark.parametrize("lazy", [Lazy, Slopes])
def test_a_constant_that_the_first_forward_keeps_is_computed_in_every_replay(lazy, keep):
    model = lazy(POSITIONS, keep).eval()
    captured = penstock.capture(model, (BATCH,))
    assert model.table is None
    assert torch.equal(StageSequence(captured, uniform(captured.graph, 2))(BATCH), model(BATCH))


@pytest.mark.parametrize("is_used", [True, False])
def test_a_constant_that_a_cached_function_keeps_is_computed_in_every_replay(is_used):
    @lru_cache(maxsize=1)
    def table(samples):
        return torch.cos(torch.arange(samples * 4.0).view(samples, 4))

    class Cached(Stack):
        def forward(self, x):
            return (super().forward(x * table(len(x))) if is_used else super().forward(x)), table(len(x))

    model = Cached().eval()
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 2))
    for batch in (BATCH, BATCH[:2], BATCH):
        assert all(map(torch.equal, run(batch), model(batch)))


@pytest.mark.parametrize(
    ("content", "keep", "problem"),
    [(MEANS, ATTRIBUTE, "the first forward initialises"), (POSITIONS, SAVED, "is replaced during")],
)
def test_a_model_that_initialises_itself_is_refused_until_it_was_called(content, keep, problem):
    model = Lazy(content, keep).eval()
    with pytest.raises(CaptureError, match=rf"{problem}.*\ntry: call the model once"):
        penstock.capture(model, (BATCH,))
    model(BATCH)
    captured = penstock.capture(model, (BATCH,))
    assert torch.equal(StageSequence(captured, uniform(captured.graph, 2))(BATCH), model(BATCH))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_never_opened():
    model = Stack().eval()
    model.blocks[1] = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    captured = penstock.capture(model, (BATCH,), depth=9)
    assert torch.equal(StageSequence(captured, uniform(captured.graph, 3))(BATCH), model(BATCH))


class Recomputing(Stack):
    """A reentrant checkpoint around a block whose input needs no gradient: the block is not trained."""

    def forward(self, x):
        return self.head(checkpoint(self.embed, x, use_reentrant=True))


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_what_a_reentrant_checkpoint_does_not_train_is_not_trained():
    captured = penstock.capture(Recomputing(), (BATCH,))
    penstock.split(captured, uniform(captured.graph, 2))
    assert not captured.graph.spec("embed").requires_grad


def test_a_long_guard_value_is_abbreviated():
    captured = penstock.capture(Glued("a number read from the input"), (BATCH,))
    replay = Replay(captured.example_recording, [node.name for node in captured.graph.nodes], captured.model, ())
    with pytest.raises(CaptureError, match=r"recorded: [^,]{,64}, found: [^,]{,64}\)\ntry"):
        replay.run({"x": -BATCH})


class Checkpointing(Stack):
    """A checkpoint around a module that updates buffers: plain PyTorch updates them again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(checkpoint(self.norm, self.embed(x), use_reentrant=self.reentrant))


class Surrounding(nn.Module):
    """Has such a module between its blocks."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Checkpointing(reentrant), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_call_that_writes_buffers_is_refused_until_it_is_kept_whole(reentrant):
    with pytest.raises(CaptureError, match=r"call: norm, buffer: norm\.running_mean.*\n.*into a submodule"):
        penstock.capture(Checkpointing(reentrant), (BATCH,))
    model = Surrounding(reentrant)
    with pytest.raises(CaptureError, match=r'basic_blocks=\["Checkpointing"\]'):
        penstock.capture(model, (BATCH,))
    captured = penstock.capture(model, (BATCH,), basic_blocks=["Checkpointing"])
    assert_stages_train_like_the_model(captured, uniform(captured.graph, 2))
