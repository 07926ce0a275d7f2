"""Ranks with different models, batches or optimizers are refused with the first difference; harmless ones are not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.capture import capture, describe_model, describe_recording
from penstock.runtime import checksum
from penstock.runtime.agreement import BATCH_INTERVAL
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, noise

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
SCALE = 1.0


class Block(nn.Module):
    """A leaf with a constant, a function, a table, and a counter that each rank increases for its own stages."""

    def __init__(self, scale: float, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.scale, self.activation, self.calls = scale, activation, 0
        self.register_buffer("table", torch.ones(WIDTH))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.activation(self.norm(self.linear(x))) * self.scale * SCALE * self.table


class Net(nn.Module):
    """Blocks with a product between them, and positions that only the first forward computes."""

    def __init__(self, k: float = 1.0, scale: float = 1.0, activation: Any = torch.relu, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(scale, activation) for _ in range(4))
        self.k, self.rank, self.device, self.positions, self.prints = k, 0, "cpu", None, True

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None and self.prints is not None:
            self.positions = torch.arange(WIDTH, dtype=torch.float64)
        for block in self.blocks:
            x = block(x) * self.k + self.positions * (self.rank * 0)
        return x if self.device != "meta" else x.cpu()


class OtherNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


OtherNet.__qualname__ = "Net"


def build(model: nn.Module, **given: Any) -> Any:
    plan = quick_plan(Net(), (X,), loss_fn=mse_loss, ranks=2, microbatches=2, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=mse_loss, **given)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except penstock.RunError as error:
        return str(error).partition("\n")[0]
    return "not refused"


def filled_table(model: Net, value: float) -> Net:
    model.blocks[1].table.fill_(value)
    return model


def different(rank: int) -> dict[str, Callable[[], nn.Module]]:
    """For every way in which models may differ, the model of this rank."""
    return {
        "where: /mul, rank 0: tuple(0: %1.0, 1: 1.0), rank 1: tuple(0: %1.0, 1: 2.0)": lambda: Net(k=1.0 + rank),
        "where: blocks.0, rank 0: scale 1.0, rank 1: scale 2.0": lambda: Net(scale=1.0 + rank),
        "where: blocks.0, rank 0: activation relu, rank 1: activation tanh": lambda: Net(
            activation=(torch.relu, torch.tanh)[rank]
        ),
        "where: blocks.0, rank 0: nothing, rank 1: activation different": lambda: Net(
            activation=(nn.ReLU(), lambda x: x)[rank]
        ),
        "where: Net, rank 0: code ": lambda: (Net, OtherNet)[rank](),
        "name: blocks.0.linear.weight, tensor: float64[4, 4], rank 0: ": lambda: Net(seed=rank),
        "name: blocks.1.table, tensor: float64[4], rank 0: 1.0, rank 1: 2.0": lambda: filled_table(Net(), 1.0 + rank),
    }


def different_models() -> list[str]:
    models = different(dist.get_rank()).values()
    return [refused(lambda make=make: build(make()).step(X, target=TARGET)) for make in models]


@pytest.mark.gloo
def test_different_models_are_refused_with_the_first_difference_and_both_ranks(pools: Pools) -> None:
    first, second = pools[2].run(different_models)
    assert first == second
    for words, expected in zip(first, different(0), strict=True):
        assert words.startswith(("the ranks have different models (", "the ranks start with different weights ("))
        assert expected in words


def harmless_models(path: str) -> list[float]:
    """The losses of ranks that differ where they may."""
    rank, losses = dist.get_rank(), []

    def train(model: Net, load: bool = False, **given: Any) -> None:
        model.prints = rank == 0
        pipe = build(model, **given)
        if load:
            pipe.load(path)
        torch.manual_seed(rank)
        losses.extend(float(pipe.step(X, target=TARGET).loss) for _ in range(2))
        # A new shape is recorded and compared again, when the counters and statistics of the ranks differ.
        losses.append(float(pipe.step(X[:4], target=TARGET[:4]).loss))
        if not load:
            pipe.save(path)

    train(Net())
    own = Net()
    own.rank, own.device = rank, f"cuda:{rank}"
    own.blocks[0].cache = torch.zeros(rank)
    if rank:
        own(X)  # computes the positions
        for block in own.blocks:
            block.norm.reset_running_stats()
            block.norm.running_mean.add_(0.5)
    train(own)
    train(Net(seed=rank), load=True)
    train(Net(k=1.0, seed=rank), options=penstock.RunOptions(check_model=False))
    pipe = build(Net(), inputs="first")
    losses.append(float((pipe.step() if rank else pipe.step(X, target=TARGET)).loss))
    return losses


@pytest.mark.gloo
def test_harmless_differences_are_not_refused(pools: Pools, tmp_path: Any) -> None:
    first, second = pools[2].run(harmless_models, str(tmp_path))
    assert first == second
    assert first[0] == first[3] == first[-1]


def other_batches() -> list[str]:
    """The errors of batches that differ in one step that is not a multiple of check_inputs_every."""
    rank, pipe = dist.get_rank(), build(Net())
    for _ in range(2):
        pipe.step(X, target=TARGET)
    changed = TARGET.clone()
    changed[3, 2] += 1e-9 * rank
    words = [
        refused(lambda: pipe.step(X + rank, target=TARGET)),
        refused(lambda: pipe.step(X, target=changed)),
        refused(lambda: pipe.evaluate(X[: 6 - 2 * rank], target=TARGET[: 6 - 2 * rank])),
    ]
    silent = build(Net(), options=penstock.RunOptions(check_inputs_every=0))
    return [*words, refused(lambda: silent.step(X + rank, target=TARGET))]


@pytest.mark.gloo
def test_a_batch_that_differs_in_any_step_is_refused_with_the_input_and_its_first_difference(pools: Pools) -> None:
    first, second = pools[2].run(other_batches)
    assert first == second
    x, target, shape, silent = first
    assert x.startswith("the ranks were given different batches (step: 2, input: x, rank 0: float64[6, 4] entry 0: ")
    assert "input: target, rank 0: float64[6, 4] entry 14: " in target
    assert "rank 0: stages 0 to 1" in shape or "rank 0: float64[6, 4], rank 1: float64[4, 4]" in shape
    assert silent == "not refused"


def test_every_entry_of_a_large_tensor_is_compared_within_as_many_comparisons_as_samples_it_has() -> None:
    tensor, steps = torch.zeros(32, 1024), range(0, 8 * BATCH_INTERVAL, BATCH_INTERVAL)
    before = [checksum({"x": tensor}, step) for step in steps]
    for index in range(0, tensor.numel(), 997):
        tensor.view(-1)[index] = 1.0
        after = [checksum({"x": tensor}, step) for step in steps]
        assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
        tensor.view(-1)[index] = 0.0


def test_the_memory_layout_of_a_batch_does_not_change_its_checksum() -> None:
    tensor = noise(64, 300)
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert [checksum({"x": tensor}, step) for step in range(4)] == [
        checksum({"x": transposed}, step) for step in range(4)
    ]


def test_conjugated_and_negated_views_have_the_checksums_of_their_entries() -> None:
    conjugated = torch.complex(noise(4, 3), noise(4, 3)).conj()
    for view in (conjugated, conjugated.imag):
        assert view.is_conj() or view.is_neg()
        assert checksum({"x": view}) == checksum({"x": view.clone()})


def other_optimizers(path: str) -> list[str]:
    rank, sgd, adam = dist.get_rank(), torch.optim.SGD, torch.optim.AdamW
    pipe = build(Net())
    own = list(pipe.parameters())
    data = [(X, TARGET)]
    slow, own_groups = sgd(own, lr=0.1 * (1 + rank)), sgd([{"params": own, "lr": 0.1 * (1 + rank)}], lr=0.1)
    return [
        refused(lambda: pipe.check_optimizer(slow)),
        refused(lambda: penstock.fit(pipe, data, (sgd(own, lr=0.1), adam(own, lr=0.1))[rank])),
        refused(lambda: pipe.save(path, slow)),
        refused(lambda: pipe.check_optimizer(own_groups)),
        refused(lambda: pipe.check_optimizer(slow if rank else None)),
        refused(lambda: penstock.fit(pipe, data, sgd(own, lr=0.1))),
    ]


@pytest.mark.gloo
def test_different_optimizers_are_refused(pools: Pools, tmp_path: Any) -> None:
    first, second = pools[2].run(other_optimizers, str(tmp_path))
    assert first == second
    assert first[0] == first[2] == "lr of the optimizer must be the same on every rank (rank 0: 0.1, rank 1: 0.2)"
    assert first[1] == "optimizer must be the same on every rank (rank 0: SGD, rank 1: AdamW)"
    assert first[3:] == ["not refused"] * 3


def test_a_description_has_the_plain_arguments_of_every_call_and_no_names_of_values() -> None:
    model = Net(k=3.0)
    first = capture(model, (X,)).example_recording
    model(X)  # the positions are now a constant
    again = capture(model, (X,)).example_recording
    assert describe_recording(first) == describe_recording(again)
    assert any("3.0" in line for line in describe_recording(first))
    assert describe_model(model) == describe_model(Net(k=3.0, seed=1))
    assert not math.isnan(checksum({"x": X}))


class Labelled(Net):
    """A model with attributes that its code reads, and that differ between processes."""

    def __init__(self, log_dir: str, is_main: bool, names: dict[str, int]) -> None:
        super().__init__()
        self.log_dir, self.is_main, self.names = log_dir, is_main, names

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_main or self.log_dir or self.names else x


def test_paths_flags_of_one_process_and_the_order_of_a_dict_are_not_compared() -> None:
    first = describe_model(Labelled("/runs/0", True, {"a": 1, "b": 2}))
    assert first == describe_model(Labelled("/runs/1", False, {"b": 2, "a": 1}))
    assert first != describe_model(Labelled("/runs/0", True, {"a": 1, "b": 3}))
