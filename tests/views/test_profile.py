"""profile: a table of costs in ms and MB."""

import pytest

from penstock.errors import ViewError
from penstock.ir import NodeBytes, NodeCost
from penstock.ir import Profile as Costs
from penstock.views import Profile
from penstock.views.base import printed

BYTES = NodeBytes(4_000_000, 3_000_000, 5_000_000, 2_000_000, 500_000, 100_000, 200_000)


def layer(name: str) -> NodeCost:
    return NodeCost(name, 0.002, 0.004, 0.0025, 0.002, BYTES)


EMBED = NodeCost("embed", 0.001, 0.001, 0.0, 0.001, NodeBytes(peak=7_000_000))
COSTS = Costs((EMBED, *(layer(f"layers.{n}") for n in range(4))), 0.025, "0" * 64, "cpu", (("torch", "2.13.0"),))


def test_the_table_is_in_ms_and_mb_and_equal_nodes_are_one_line():
    heading, device, _, header, _, *rows = Profile()(COSTS).splitlines()
    assert (heading, device) == ("5 nodes, a step of one microbatch 25 ms", "cpu; torch 2.13.0")
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *rows)] == [
        ["node", "forward ms", "backward ms", "input ms", "weight ms", "share",
         "kept MB", "waiting MB", "peak MB", "size MB", "in MB", "out MB"],
        ["embed", "1.000", "1.000", "0.000", "1.000", "7.7 %",
         "0.000", "0.000", "7.000", "0.000", "0.000", "0.000"],
        ["layers.0 … layers.3, 4 x", "2.000", "4.000", "2.500", "2.000", "23.1 %",
         "4.000", "3.000", "5.000", "2.500", "0.100", "0.200"],
        ["all", "9.000", "17.000", "10.000", "9.000", "100.0 %",
         "16.000", "12.000", "7.000", "10.000", "", ""],
    ]  # fmt: skip


def test_every_node_can_have_a_line_of_its_own():
    assert [line.split()[1] for line in Profile(collapse=0)(COSTS).splitlines()[5:]] == [
        "embed", "layers.0", "layers.1", "layers.2", "layers.3", "all"
    ]  # fmt: skip


def test_a_console_shows_the_same_figures():
    assert "23.1 %" in printed(Profile().renderable(COSTS), 200)


def test_names_cannot_change_a_terminal():
    hostile = Costs((NodeCost("\x1b[31mred\x00", 1.0, 1.0, 1.0, 1.0),), 2.0, "", "\x1b[2Jdevice", (("\x07", "\x07"),))
    assert not set("\x1b\x00\x07") & set(Profile()(hostile))


def test_a_profile_of_nothing_is_a_table_without_nodes():
    assert Profile()(Costs((), 0.0, "", "cpu")).splitlines()[-1].startswith("| all")


def test_anything_but_a_profile_is_refused():
    with pytest.raises(ViewError, match="this view must be given a profile"):
        Profile()("costs")
