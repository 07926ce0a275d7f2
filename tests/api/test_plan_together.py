"""Planning together: the first rank plans with the links that all have measured, and none is left waiting."""

import os
from itertools import permutations
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import penstock
from penstock.ir import Cluster, Plan
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise


def make(cluster: Cluster) -> Plan:
    """A plan of a small chain, by the first rank only."""
    assert dist.get_rank() == 0
    return quick_plan(chain(2), (noise(4, WIDTH),), ranks=cluster, microbatches=2, schedule="1f1b")


def make_for_others(cluster: Cluster) -> Plan:
    """A plan for another number of ranks."""
    return make(Cluster(1))


def make_nothing(cluster: Cluster) -> Plan:
    """No plan: an error of penstock with values and a hint."""
    raise penstock.FitError("too large", bytes=7, hint="less", report="rank 0: 7")


class OfUser(penstock.PlanError):
    """An error that the other ranks may not know."""


def refuse(cluster: Cluster) -> Plan:
    """An error of a class that penstock does not have."""
    raise OfUser("not today", hint="tomorrow")


def stumble(cluster: Cluster) -> Plan:
    """What a user's model may do."""
    raise KeyError("weights")


def together(cores: tuple[int, ...] = (0, 1)) -> Plan:
    """The plan that this rank receives, as a process that may use these cores."""
    with mock.patch.object(os, "sched_getaffinity", return_value=set(cores)):
        return penstock.plan_together(make, memory="1GiB")


def on_a_core_of_its_own() -> Plan:
    return together((dist.get_rank(),))


def refusal(make: Any) -> tuple[str, str]:
    """The kind of the error that this rank raises, and its message; the ranks can synchronise afterwards."""
    try:
        penstock.plan_together(make)
    except penstock.PenstockError as error:
        dist.barrier()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.gloo
def test_all_ranks_take_the_plan_that_the_first_made_with_their_links(pools: Pools) -> None:
    first, second = pools[2].run(together)
    assert first == second
    assert {(link.source, link.target) for link in first.cluster.links} == set(permutations(range(2), 2))
    assert first.cluster.limits == (2**30,) * 2


@pytest.mark.gloo
@pytest.mark.parametrize(("cores", "shared"), [((0,), 1), ((0, 1), None), ((4, 5, 6), None)])
def test_ranks_of_one_host_share_its_cores(pools: Pools, cores: tuple[int, ...], shared: int | None) -> None:
    assert pools[2].run(together, cores)[0].cluster.cores == shared


@pytest.mark.gloo
def test_ranks_that_are_bound_to_different_cores_share_none(pools: Pools) -> None:
    assert pools[2].run(on_a_core_of_its_own)[0].cluster.cores is None


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (make_nothing, "FitError", "too large (bytes: 7)\nrank 0: 7\ntry: less"),
        (refuse, "PlanError", "not today\ntry: tomorrow"),
        (stumble, "PlanError", "planning failed on the first rank (reason: KeyError: 'weights')"),
        (make_for_others, "PlanError", "make must return a plan for all ranks (ranks: 2, got: 1)"),
    ],
)
def test_an_error_of_the_first_rank_is_the_same_on_all(pools: Pools, make: Any, kind: str, words: str) -> None:
    first, second = pools[2].run(refusal, make)
    assert first == second
    assert first[0] == kind
    assert first[1].startswith(words)


def test_without_a_group_nobody_plans_together() -> None:
    with pytest.raises(penstock.RunError, match="initialised process group"):
        penstock.plan_together(make)
