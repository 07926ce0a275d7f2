"""The topology on real processes: groups that work, queries by name, and a setup that all ranks must make alike."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.flat import topology
from penstock.flat.topology import Topology
from tests.process_pool import Pools

NEIGHBOURS = {0: (2, 2), 1: (3, 3), 2: (0, 0), 3: (1, 1)}


def queries() -> dict[str, object]:
    topology.setup_process_groups([("pipe", 2), ("data", 2)])
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=topology.get_group("pipe"))
    return {
        "pipe": topology.get_ranks_in_group("pipe"),
        "data": topology.get_ranks_in_group("data"),
        "sum over pipe": float(total),
        "ranks": (topology.get_pp_rank(), topology.get_dp_rank(), topology.get_mp_rank()),
        "sizes": (topology.get_pp_size(), topology.get_dp_size(), topology.get_mp_size()),
        "pipe ends": (topology.is_first_in_pipeline_group(), topology.is_last_in_pipeline_group()),
        "data ends": (topology.is_first_in_data_group(), topology.is_last_in_data_group()),
        "model ends": (topology.is_first_in_model_group(), topology.is_last_in_model_group()),
        "neighbours": (topology.get_prev_global_rank(), topology.get_next_global_rank()),
        "inited": [mode for mode in ("data", "pipe", "tensor", "model", "global") if topology.is_mode_inited(mode)],
        "first": topology.is_first_group("data"),
    }


@pytest.mark.gloo
def test_every_process_knows_its_place(pools: Pools) -> None:
    for rank, found in enumerate(pools[4].run(queries)):
        pipe, data = divmod(rank, 2)
        assert found == {
            "pipe": [data, data + 2],
            "data": [2 * pipe, 2 * pipe + 1],
            "sum over pipe": 2.0 * data + 2,
            "ranks": (pipe, data, pipe),
            "sizes": (2, 2, 2),
            "pipe ends": (pipe == 0, pipe == 1),
            "data ends": (data == 0, data == 1),
            "model ends": (pipe == 0, pipe == 1),
            "neighbours": NEIGHBOURS[rank],
            "inited": ["data", "pipe", "model", "global"],
            "first": pipe == 0,
        }


def set_up_differently() -> str:
    with pytest.raises(RunError) as caught:
        topology.setup_process_groups([("pipe", 2)] if dist.get_rank() else [("data", 2)])
    return str(caught.value)


@pytest.mark.gloo
def test_different_dimensions_are_an_error_on_every_rank(pools: Pools) -> None:
    first, second = pools[2].run(set_up_differently)
    assert first == second
    assert "dimensions must be the same on every rank" in first


def test_without_processes_the_error_hints_at_launching_them() -> None:
    with pytest.raises(RunError, match=r"try: dist.init_process_group\('gloo'\), torchrun, or penstock.launch"):
        Topology().setup_process_groups([("pipe", 2)])
    with pytest.raises(RunError, match="setup_process_groups must be called first"):
        Topology().get_pp_rank()


def set_up_after_a_failure() -> tuple[str, bool, list[int]]:
    fresh = Topology()
    failing = mock.patch("penstock.flat.topology.FlatPipeline", side_effect=RunError("no connection"))
    with failing, pytest.raises(RunError, match="no connection"):
        fresh.setup_process_groups([("pipe", 2)])
    with pytest.raises(RunError) as caught:
        _ = fresh.pipeline.groups
    was_set_up = fresh.is_mode_inited("pipe")
    fresh.setup_process_groups([("pipe", 2)])
    return str(caught.value), was_set_up, fresh.get_ranks_in_group("pipe")


@pytest.mark.gloo
def test_a_topology_whose_setup_failed_is_not_set_up(pools: Pools) -> None:
    for text, was_set_up, ranks in pools[2].run(set_up_after_a_failure):
        assert "setup_process_groups must be called first" in text
        assert (was_set_up, ranks) == (False, [0, 1])
