"""Replicas of a pipeline train on parts of one batch, and have the gradients of all of it, every bit alike."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss

import penstock
from tests.parity import Values, WholeModel, assert_close, assert_identical, gradients
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import every_third
from tests.small_models import WIDTH, Block, chain, noise, seeded, tied, token_loss, tokens

pytestmark = pytest.mark.gloo

X, TARGET = tokens(8, 6), tokens(8, 6, seed=1)
LABELS = TARGET.masked_fill(torch.arange(6) >= torch.tensor([[5], [1], [6], [2], [0], [3], [6], [4]]), -100)
ROWS, ANSWERS = noise(8, WIDTH), noise(8, WIDTH, seed=1)
SHARES = ((5, 3), (4, 4), (7, 1))
"""samples of the first and of the second replica"""


@cache
def mesh() -> DeviceMesh:
    """Two replicas of a pipeline of two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def share(tensor: Tensor, sizes: tuple[int, int] = SHARES[0]) -> Tensor:
    """This replica's part of a batch."""
    return tensor.split(sizes)[mesh().get_local_rank("dp")]


def replicated(model: nn.Module, x: Tensor, loss_fn: Any, schedule: str = "1f1b", **options: Any) -> Any:
    """A pipeline with a replica."""
    plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule=schedule)
    return penstock.Pipeline(model, plan, loss_fn=loss_fn, mesh=mesh(), **options)


def assert_whole(parts: Any, plain: nn.Module, losses: list[Tensor]) -> None:
    """Replicas have the same bits, and together with the other rank all gradients of the plain model."""
    assert_identical(parts[0], parts[2])
    assert_identical(parts[1], parts[3])
    held = plain.named_parameters(remove_duplicate=False)
    expected = gradients(nn.Module(), losses) | {f"gradient {name}": parameter.grad for name, parameter in held}
    assert parts[0].keys() | parts[1].keys() >= {f"gradient {name}" for name, _ in plain.named_parameters()}
    for part in parts[:2]:
        assert_close(part, {name: expected[name] for name in part})


def token_steps(cases: list[tuple[str, tuple[int, int]]]) -> list[Values]:
    """Two accumulated steps for a schedule and a way to share the batch."""
    found = []
    for schedule, sizes in cases:
        pipe = replicated(tied(), X, token_loss, schedule)
        x, labels = share(X, sizes), share(LABELS, sizes)
        found.append(gradients(pipe, [pipe.step(x, target=labels).loss for _ in range(2)]))
    return found


def test_gradients_and_loss_are_those_of_the_whole_batch(pools: Pools, is_whole: bool) -> None:
    plain = tied()
    losses = [WholeModel(plain, token_loss).step(X, target=LABELS).loss for _ in range(2)]
    schedules = ("1f1b", "interleaved", "zbv")
    cases = [(name, sizes) for k, name in enumerate(schedules) for sizes in every_third(SHARES, k, is_whole)]
    for parts in zip(*pools[4].run(token_steps, cases), strict=True):
        assert_whole(parts, plain, losses)


def input_gradients() -> Tensor | None:
    """The gradient of this replica's inputs after two steps."""
    pipe, x = replicated(chain(4), ROWS, mse_loss), share(ROWS).clone().requires_grad_()
    for _ in range(2):
        pipe.step(x, target=share(ANSWERS))
    return x.grad


def test_gradients_of_inputs_are_those_of_the_whole_batch(pools: Pools) -> None:
    x = ROWS.clone().requires_grad_()
    (2 * mse_loss(chain(4)(x), ANSWERS)).backward()
    found = pools[4].run(input_gradients)
    torch.testing.assert_close(torch.cat([found[0], found[2]]), x.grad, rtol=0, atol=1e-12)


def freeze_different_blocks(inputs: str) -> str:
    """The error of this rank if each replica freezes another block of the same size."""
    model, replica, is_first = chain(4), mesh().get_local_rank("dp"), mesh().get_local_rank("pp") == 0
    pipe = replicated(model, ROWS, mse_loss, inputs=inputs)
    batch = {"target": share(ANSWERS)} if inputs == "all" or is_first else {}
    args = (share(ROWS),) if batch else ()
    pipe.step(*args, **batch)
    model[replica].requires_grad_(False)
    with pytest.raises(penstock.RunError) as caught:
        pipe.step(*args, **batch)
    pipe.eval(*args, **batch)
    model.requires_grad_(True)
    pipe.step(*args, **batch)
    return str(caught.value)


@pytest.mark.parametrize("inputs", ["all", "first"])
def test_replicas_that_freeze_different_parameters_are_refused(pools: Pools, inputs: str) -> None:
    for text in pools[4].run(freeze_different_blocks, inputs):
        assert "requires_grad must be the same on all replicas" in text
        assert "parameter: 0.linear.bias" in text


class Penalised(Block):
    """A block that keeps its result small."""

    def forward(self, x: Tensor) -> Tensor:
        """One layer, and a penalty."""
        x = super().forward(x)
        penstock.add_loss((x**2).mean())
        return x


def penalised() -> nn.Module:
    return seeded(nn.Sequential(*(Penalised() for _ in range(4))))


def penalised_step() -> Values:
    pipe = replicated(penalised(), ROWS, mse_loss)
    return gradients(pipe, [pipe.step(share(ROWS), target=share(ANSWERS)).loss])


def test_added_losses_count_by_the_samples_of_all_replicas(pools: Pools) -> None:
    plain = penalised()
    with penstock.added_losses() as added:
        loss = mse_loss(plain(ROWS), ANSWERS)
    total = loss + torch.stack(added).sum()
    total.backward()
    assert_whole(pools[4].run(penalised_step), plain, [total.detach()])


def trained_replicas() -> tuple[list[Tensor], Values]:
    """Three steps with clipping: norms and weights."""
    pipe, norms = replicated(tied(), X, token_loss), []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        pipe.step(share(X), target=share(LABELS))
        norms.append(pipe.clip_grad_norm_(0.1))
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in pipe.named_parameters()}


def test_replicas_stay_identical_and_share_one_norm(pools: Pools) -> None:
    plain, norms = tied(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        WholeModel(plain, token_loss).step(X, target=LABELS)
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        optimizer.step()
    results = pools[4].run(trained_replicas)
    assert all(found == results[0][0] for found, _ in results)
    assert_close(dict(enumerate(results[0][0])), dict(enumerate(norms)))
    assert_identical(results[0][1], results[2][1])
    assert_identical(results[1][1], results[3][1])
    for _, part in results[:2]:
        assert_close(part, {name: plain.get_parameter(name).detach() for name in part})


def overflowing() -> tuple[float, int]:
    """The scale and the skipped steps after the second replica alone has overflowed."""
    scaler = penstock.GradScaler(init_scale=8.0)
    model = chain(4)
    pipe = replicated(model, ROWS, mse_loss, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for factor in (1.0, float("inf")):
        pipe.step(share(ROWS), target=share(ANSWERS) * (factor if dist.get_rank() > 1 else 1.0))
        scaler.step(optimizer)
        scaler.update()
    return scaler.scale, scaler.skipped


def test_all_replicas_skip_when_one_overflows(pools: Pools) -> None:
    assert pools[4].run(overflowing) == [(4.0, 1)] * 4


def broken_replica() -> str:
    """The error when the input of the second replica has a NaN."""
    pipe = replicated(chain(4), ROWS, mse_loss)
    x = share(ROWS).clone()
    x[0, 0] = float("nan") if dist.get_rank() > 1 else 0.0
    try:
        pipe.step(x, target=share(ANSWERS))
    except penstock.RunError as error:
        return str(error)
    return "not refused"


def test_all_replicas_refuse_a_step_that_one_of_them_broke(pools: Pools) -> None:
    words = pools[4].run(broken_replica)
    assert len(set(words)) == 1
    assert "stage: 0, during: forward" in words[0]


def begun_differently() -> str:
    try:
        replicated(seeded(nn.Sequential(*(Block() for _ in range(4))), seed=1 + dist.get_rank() // 2), ROWS, mse_loss)
    except penstock.RunError as error:
        return str(error)
    return "not refused"


def test_replicas_must_begin_with_the_same_weights(pools: Pools) -> None:
    (words,) = set(pools[4].run(begun_differently))
    assert words.startswith("the replicas start with different weights (replicas: (0, 1))")


def halves() -> tuple[list[str], list[str]]:
    """The types of gradients of a model of which one block is in float32, and those of its parameters."""
    model = seeded(nn.Sequential(*(Block() for _ in range(3)), Halved()))
    model[3].float()
    pipe = replicated(model, ROWS, mse_loss)
    pipe.step(share(ROWS), target=share(ANSWERS))
    return [str(p.grad.dtype) for p in pipe.parameters()], [str(p.dtype) for p in pipe.parameters()]


class Halved(Block):
    """A block that computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return super().forward(x.float()).double()


def test_gradients_of_different_types_keep_their_types(pools: Pools) -> None:
    for gradients_found, parameters in pools[4].run(halves):
        assert gradients_found == parameters


def recorded() -> list[list[str]]:
    """The actions of every rank, as recorded."""
    pipe = replicated(chain(4), ROWS, mse_loss, "interleaved")
    trace = pipe.step(share(ROWS), target=share(ANSWERS), record=True).trace
    order = sorted(trace.spans, key=lambda span: span.start)
    return [[str(span.action) for span in order if span.rank == rank] for rank in range(2)]


def test_averaging_begins_before_the_pipeline_is_drained(pools: Pools) -> None:
    for rank, order in enumerate(pools[4].run(recorded)[0]):
        assert order.index(f"{rank + 2}REDUCE_GRAD") < order.index(f"{rank}B2")


def differing_steps() -> Values:
    """The kind of the second batch is new to one replica only."""
    pipe = replicated(tied(), X, token_loss, inputs="first")
    is_first = mesh().get_local_rank("pp") == 0
    sizes = (SHARES[1], SHARES[0], SHARES[1])
    batches = [((share(X, one),), {"target": share(LABELS, one)}) if is_first else ((), {}) for one in sizes]
    return gradients(pipe, [pipe.step(*args, **kwargs).loss for args, kwargs in batches])


def test_a_kind_of_batch_may_be_new_to_one_replica(pools: Pools) -> None:
    plain = tied()
    losses = [WholeModel(plain, token_loss).step(X, target=LABELS).loss for _ in range(3)]
    assert_whole(pools[4].run(differing_steps), plain, losses)


class Adapter(nn.Module):
    """While `up` is zero, so is the gradient of `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What came, and a correction."""
        return x + self.up(self.down(x))


def adapted() -> dict[str, bool]:
    """Which parameters have a gradient after a step in which no label of the second replica counts."""
    model = seeded(nn.Sequential(*(Adapter() for _ in range(4))))
    for adapter in model:
        nn.init.zeros_(adapter.up.weight)
    pipe = replicated(model, ROWS, nn.functional.cross_entropy)
    labels = torch.arange(8).remainder(WIDTH).where(torch.arange(8) < 4, -100)
    pipe.step(share(ROWS, SHARES[1]), target=share(labels, SHARES[1]))
    return {name: parameter.grad is not None for name, parameter in pipe.named_parameters()}


def test_a_gradient_of_zeros_is_there_on_every_replica(pools: Pools) -> None:
    for found in pools[4].run(adapted):
        assert all(found.values()), found


def one_sided() -> list[str]:
    """The errors when only one replica has a target, and when only one has a valid batch."""
    pipe, is_second, found = replicated(tied(), X, token_loss), mesh().get_local_rank("dp") == 1, []
    for call, x, labels in (
        (pipe.eval, X, LABELS if is_second else None),
        (pipe.step, X if is_second else X.double(), LABELS),
    ):
        try:
            call(x, target=labels)
        except penstock.PenstockError as error:
            found.append(str(error))
    pipe.step(share(X), target=share(LABELS))
    return found


def test_all_replicas_refuse_a_call_that_is_invalid_on_one(pools: Pools) -> None:
    for without_target, without_batch in pools[4].run(one_sided):
        assert without_target.startswith("either all replicas or none must have a target or labels")
        assert without_batch.startswith("the model cannot be run on this batch")
