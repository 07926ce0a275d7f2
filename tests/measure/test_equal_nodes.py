"""Nodes that do the same work are grouped, and measured once."""

import pytest
import torch
from torch import Tensor, nn

from penstock.measure.identity import group_equal_nodes
from tests.measure.subjects import WIDTH, Block, batch, chain, measured


def names(model: nn.Module, *args: Tensor) -> list[list[str]]:
    return [[node.name for node in family] for family in group_equal_nodes(measured(model, *args))]


def test_blocks_that_differ_in_their_number_only_are_a_family_but_for_the_first_which_returns_no_gradient():
    assert names(chain(*(Block(number) for number in range(4)))) == [["0"], ["1", "2", "3"]]


def frozen() -> Block:
    block = Block()
    block.linear.weight.requires_grad_(False)
    return block


def unhooked() -> Block:
    block = Block()
    block.register_forward_hook(lambda *_: None)
    return block


@pytest.mark.parametrize(
    "other",
    [Block(slope=0.2), Block().double().float().eval(), frozen(), unhooked(), nn.Linear(WIDTH, WIDTH)],
    ids=["setting", "mode", "frozen", "hook", "class"],
)
def test_a_block_of_another_form_is_another_family(other: nn.Module):
    assert names(chain(Block(), Block(1), other)) == [["0"], ["1"], ["2"]]


def test_other_shapes_are_another_family():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x[:, :4]).sum() + self.act(x[:, :2]).sum() + self.act(x[:, 4:]).sum()

    found = [family for family in names(Halves(), batch()) if "act" in family[0]]
    assert sorted(map(len, found)) == [1, 2]


def test_functions_with_other_arguments_are_another_family():
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sum(x, 0).sum() + torch.sum(x, 1).sum()

    sums = [family for family in names(Sums(), batch()) if family[0].startswith("/sum")]
    assert ["/sum"] in sums
