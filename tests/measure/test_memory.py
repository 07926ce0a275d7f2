"""The memory of nodes, measured alone, adds up to the memory of stages for every cut."""

import pytest
import torch
from torch import nn

from penstock.ir import DeviceSpeed, SavedTensors, compute_stage_costs
from penstock.measure import estimate
from penstock.measure.measured_model import NodeVisit, visit_nodes
from penstock.measure.memory import Memory, memory_of
from penstock.measure.timing import Timing
from penstock.measure.work import WorkCounter
from penstock.partitioners import uniform
from tests.measure.held import held
from tests.measure.subjects import ROWS, WIDTH, chain, measured
from tests.selection import some
from tests.zoo import ZOO

SPEED = DeviceSpeed(1e11, 1e10)
VALUE = ROWS * WIDTH * 4
"""bytes of what passes between the blocks of a chain"""


def memory_by_node(subject) -> dict[str, Memory]:
    found = {}

    def visit(visited: NodeVisit) -> None:
        Timing.of_node(visited, WorkCounter(SPEED))
        found[visited.node.name] = memory_of(visited)

    with subject.isolated():
        visit_nodes(subject, visit)
    return found


@pytest.mark.parametrize(
    "name",
    some(
        ["llama_sdpa", "unet", "in_place", "tied", "batch_norm"],
        ["llama_sdpa", "mixtral", "t5", "unet", "in_place", "lstm", "tied", "batch_norm"],
    ),
)
def test_the_bytes_of_nodes_make_exactly_those_of_stages(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    subject = measured(model, *args, **kwargs)
    partition = uniform(subject.graph, 3)
    costs = compute_stage_costs(subject.graph, estimate(subject, SPEED), partition)
    whole, parts = (held(subject, partition, is_split) for is_split in (False, True))
    assert costs.activation_bytes == tuple(each.kept for each in whole) == tuple(each.kept for each in parts)
    assert costs.weight_grad_bytes == tuple(each.late for each in parts)


@pytest.mark.parametrize("name", ["llama_sdpa", "batch_norm", "unet"])
def test_so_do_they_if_blocks_are_recomputed(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    subject = measured(model, *args, **kwargs)
    partition = uniform(subject.graph, 2)
    costs = compute_stage_costs(subject.graph, estimate(subject, SPEED), partition, recomputed=(0, 1))
    found = held(subject, partition, True, recomputes=True)
    assert costs.activation_bytes == tuple(each.kept for each in found)
    assert costs.weight_grad_bytes == tuple(each.late for each in found)


def test_a_linear_holds_what_it_is_given_and_later_the_gradient_of_what_it_made() -> None:
    found = memory_by_node(measured(chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))))
    assert found["1"].holds == SavedTensors(values=("0",), late_values=("0",), late_gradients=("1",))


def test_a_relu_holds_what_it_made_and_nothing_for_weights() -> None:
    assert memory_by_node(measured(chain(nn.Linear(WIDTH, WIDTH), nn.ReLU())))["1"].holds == SavedTensors(values=("1",))


def test_memory_that_no_other_node_uses_counts_for_its_node() -> None:
    found = memory_by_node(measured(chain(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Sigmoid(), nn.Tanh()))))
    assert found["1"].holds == SavedTensors(own=VALUE, values=("1",))


def test_the_peak_counts_what_is_there_for_a_moment_only() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.detach().repeat(10, 1).sum()

    assert memory_by_node(measured(chain(nn.Linear(WIDTH, WIDTH), Wide())))["1"].peak >= 10 * VALUE


def test_a_model_without_numbers_holds_the_same() -> None:
    def model(device: str) -> nn.Module:
        with torch.device(device):
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True)
            return nn.Sequential(layer, nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True))

    here, there = (measured(model(device), torch.ones(2, 5, WIDTH, device=device)) for device in ("cpu", "meta"))
    one, other = (
        compute_stage_costs(each.graph, estimate(each, SPEED), uniform(each.graph, 2)) for each in (here, there)
    )
    assert one.activation_bytes == other.activation_bytes
    assert one.weight_grad_bytes == other.weight_grad_bytes
