"""Planning for replicas: `plan(mesh=...)` and `plan_together(mesh=...)` know them, and all follow the first plan."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock
from penstock.ir import Cluster, Plan, Replicas
from tests.parity import Values, WholeModel, assert_close, assert_identical, gradients
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import tied, token_loss, tokens

pytestmark = pytest.mark.gloo

X, TARGET = tokens(8, 6), tokens(8, 6, seed=1)


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def share(tensor: Tensor) -> Tensor:
    return tensor.chunk(2)[mesh().get_local_rank("dp")]


def planned(model: nn.Module, x: Tensor, **options: Any) -> Plan:
    return quick_plan(model, (x,), microbatches=2, schedule="1f1b", loss_fn=token_loss, **options)


def with_mesh() -> tuple[tuple[int, int], Values]:
    model = tied()
    plan = planned(model, share(X), mesh=mesh())
    pipe = penstock.Pipeline(model, plan, loss_fn=token_loss, mesh=mesh())
    loss = pipe.step(share(X), target=share(TARGET)).loss
    return (plan.num_ranks, plan.cluster.replicas.count), gradients(pipe, [loss])


def assert_whole(parts: list[Values]) -> None:
    plain = tied()
    expected = gradients(nn.Module(), [WholeModel(plain, token_loss).step(X, target=TARGET).loss])
    expected |= {f"gradient {name}": p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
    assert_identical(parts[0], parts[2])
    for part in parts:
        assert_close(part, {name: expected[name] for name in part})


def test_a_plan_for_a_mesh_has_its_ranks_and_replicas(pools: Pools) -> None:
    found = pools[4].run(with_mesh)
    assert [sizes for sizes, _ in found] == [(2, 2)] * 4
    assert_whole([values for _, values in found])


def together() -> tuple[Plan, Values]:
    model = tied()
    plan = penstock.plan_together(lambda cluster: planned(model, share(X), ranks=cluster), mesh=mesh())
    pipe = penstock.Pipeline(model, plan, loss_fn=token_loss, mesh=mesh())
    return plan, gradients(pipe, [pipe.step(share(X), target=share(TARGET)).loss])


def test_planning_together_measures_the_links_of_a_pipeline_and_between_replicas(pools: Pools) -> None:
    found = pools[4].run(together)
    plan = found[0][0]
    assert all(other == plan for other, _ in found)
    assert (plan.num_ranks, plan.cluster.replicas.count) == (2, 2)
    assert plan.cluster.replicas.latency > 0
    assert plan.cluster.replicas.bandwidth
    assert {(link.source, link.target) for link in plan.cluster.links} == {(0, 1), (1, 0)}
    assert_whole([values for _, values in found])


def padded() -> tuple[str, Values]:
    """Each replica plans with an example of its own length."""
    model = tied()
    plan = planned(model, tokens(4, 6 + 3 * mesh().get_local_rank("dp")), mesh=mesh())
    pipe = penstock.Pipeline(model, plan, loss_fn=token_loss, mesh=mesh())
    loss = pipe.step(share(X), target=share(TARGET)).loss
    return pipe.plan.graph.fingerprint, gradients(pipe, [loss])


def test_replicas_that_planned_with_other_lengths_follow_the_first(pools: Pools) -> None:
    found = pools[4].run(padded)
    expected = planned(tied(), tokens(4, 6), ranks=2).graph.fingerprint
    assert [fingerprint for fingerprint, _ in found] == [expected] * 4
    assert_whole([values for _, values in found])


class Wider(nn.Module):
    """A model of which one parameter has another shape on some ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Two layers."""
        return self.second(self.first(x))


def misfits() -> str:
    model = Wider(4 + mesh().get_local_rank("dp"))
    plan = quick_plan(model, (torch.ones(4, 4),), mesh=mesh(), microbatches=2, schedule="1f1b")
    with pytest.raises(penstock.RunError) as caught:
        penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss, mesh=mesh())
    return str(caught.value)


def test_the_error_names_the_parameter_that_differs(pools: Pools) -> None:
    texts = pools[4].run(misfits)
    assert set(texts) == {texts[0]}
    assert "parameter first.weight must be the same on every replica" in texts[0]
    assert "(replica 0: float32[4, 4], replica 1: float32[5, 4])" in texts[0]


def wrong_sizes() -> list[str]:
    found = []
    model, x = tied(), X[:4]
    wrong: list[dict[str, Any]] = [
        {"mesh": mesh(), "ranks": 4},
        {"mesh": mesh(), "ranks": Cluster(2, replicas=Replicas(3))},
        {"mesh": 2},
        {},
    ]
    for options in wrong:
        with pytest.raises(penstock.PenstockError) as caught:
            planned(model, x, **options)
        found.append(str(caught.value))
    with pytest.raises(penstock.RunError) as caught:
        penstock.plan_together(lambda cluster: planned(model, x, ranks=cluster), mesh=mesh(), group=dist.group.WORLD)
    return [*found, str(caught.value)]


def test_ranks_that_do_not_fit_the_mesh_are_refused(pools: Pools) -> None:
    expected = (
        'ranks must be those along the axis "pp" of the mesh (got: 4)\ntry: ranks=2',
        'must have the replicas along the axis "dp" of the mesh (got: 3, mesh: 2)',
        "mesh must be a DeviceMesh (got: int)",
        "ranks must be given\ntry: ranks=2, or the mesh",
        "group and mesh must not both be given",
    )
    for texts in pools[4].run(wrong_sizes):
        assert [words in text for words, text in zip(expected, texts, strict=True)] == [True] * len(expected)
