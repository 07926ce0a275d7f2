"""Devices of local ranks, simulated: which one a rank uses, what connects them, and what is refused."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError
from penstock.launch import check_devices, group_device, num_cores, pipeline_mesh, use_local_device


def test_fewer_devices_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    check_devices("cuda", 3)
    with pytest.raises(PlanError, match=r"needs a device of its own \(ranks: 4, devices: 3\)\ntry: --ranks 3"):
        check_devices("cuda", 4)


def test_a_rank_uses_the_device_with_its_number_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "7")
    assert use_local_device("cuda") == torch.device("cuda", 3)
    assert use_local_device("cpu") == torch.device("cpu")
    assert used == [3]


def test_a_group_of_several_backends_sends_cpu_tensors_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: "undefined")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    assert group_device() == torch.device("cpu")


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_the_device_decides_the_backend(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, str]] = []

    def new_groups(ranks: list[list[int]], backend: str) -> tuple[str, list[str]]:
        asked.append((ranks, backend))
        return f"group {len(asked)}", []

    made: dict[str, Any] = {}
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", new_groups)
    monkeypatch.setattr(DeviceMesh, "from_group", lambda groups, kind, **given: made.update(groups=groups, **given))
    pipeline_mesh(kind, replicas=2, ranks=3)
    assert asked == [([[0, 3], [1, 4], [2, 5]], backend), ([[0, 1, 2], [3, 4, 5]], backend)]
    assert made["groups"] == ["group 1", "group 2"]
    assert made["mesh_dim_names"] == ("dp", "pp")
    assert made["mesh"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_cores_are_counted_where_the_system_has_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert num_cores() == 12
