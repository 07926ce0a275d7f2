"""Pipelines together with what else torch offers: sharded parameters, autocast, compiled blocks."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import penstock
from tests.plans import quick_plan

# From a generator of its own: every process that loads this file has the same.
X, Y = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])


def shard_blocks(stage, mesh):
    for block in list(stage.children()):
        fully_shard(block, mesh=mesh["dp"])


def shard_all(stage, mesh):
    shard_blocks(stage, mesh)
    fully_shard(stage, mesh=mesh["dp"])


def trained_sharded(parallelize_fn, schedule):
    """Norms of the gradients, and the parameters of this rank, after three steps on two replicas of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    half = slice(6 * mesh.get_local_rank("dp"), 6 * mesh.get_local_rank("dp") + 6)
    model = chain().double()
    plan = quick_plan(model, (X[half],), ranks=2, microbatches=3, schedule=schedule)
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, mesh=mesh, parallelize_fn=parallelize_fn)
    optimizer, norms = torch.optim.Adam(pipe.parameters(), 1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        pipe.step(X[half], target=Y[half])
        pipe.eval(X[half], target=Y[half])  # must not keep parameters gathered that the optimizer changes
        norms.append(pipe.clip_grad_norm_(0.1).item())
        optimizer.step()
    return norms, {name: parameter.full_tensor().detach() for name, parameter in pipe.named_parameters()}


@pytest.mark.gloo
@pytest.mark.parametrize("parallelize_fn", [shard_blocks, shard_all])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_sharded_stages_train_like_the_whole_model(pools, parallelize_fn, schedule):
    model = chain().double()
    optimizer, norms = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        functional.mse_loss(model(X), Y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    expected = dict(model.named_parameters())
    for found, parameters in pools[4].run(trained_sharded, parallelize_fn, schedule):
        assert found == pytest.approx(norms, rel=1e-12)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name].detach(), rtol=0, atol=1e-12)


def sharded_with_new_lengths(inputs):
    """Gradients of steps in which the number of samples is new to one replica only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, has_batch = mesh.get_local_rank("dp"), inputs == "all" or mesh.get_local_rank("pp") == 0
    model = chain().double()
    plan = quick_plan(model, (X[:6],), ranks=2, microbatches=2, schedule="1f1b")
    options = {"mesh": mesh, "parallelize_fn": shard_all, "inputs": inputs}
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, **options)
    for sizes in ((6, 6), (6, 5), (4, 5), (6, 1)):
        own = slice(0, sizes[0]) if replica == 0 else slice(sizes[0], sum(sizes))
        # The last one has fewer microbatches on one replica, which only a step allows.
        for call in (pipe.step, pipe.eval) if sizes[1] > 1 else (pipe.step,):
            _ = call(X[own], target=Y[own]) if has_batch else call()
    if inputs == "all":
        with pytest.raises(penstock.RunError, match="the same number of microbatches in an evaluation"):
            pipe.eval(X[:6] if replica == 0 else X[:1])
        own = slice(0, 6) if replica == 0 else slice(6, 8)
        with pytest.raises(penstock.RunError, match="cannot find the batch dimensions of outputs"):
            pipe.eval(X[own], return_outputs=True)
        outputs = pipe.eval(X[own], return_outputs=True, output_dims=0).outputs
        torch.testing.assert_close(outputs, chain().double()(X[own]).detach())
    return {name: parameter.grad.full_tensor() for name, parameter in pipe.named_parameters()}


@pytest.mark.gloo
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_a_length_may_be_new_to_one_replica_of_sharded_stages(pools, inputs):
    model = chain().double()
    for size in (12, 11, 9, 7):
        functional.mse_loss(model(X[:size]), Y[:size]).backward()
    for found in pools[4].run(sharded_with_new_lengths, inputs):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=0, atol=1e-12)


def gradients_of(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_autocast_around_a_step_gives_every_bit_of_the_loop(schedule):
    model, x, y = chain(), X.float(), Y.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for start in (0, 4, 8):
            loss = functional.mse_loss(model(x[start : start + 4]).float(), y[start : start + 4])
            loss.backward(torch.tensor(1 / 3))
        expected = gradients_of(model)
        model.zero_grad()
        plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule=schedule)
        pipe = penstock.Pipeline(model, plan, loss_fn=lambda o, t: functional.mse_loss(o.float(), t), local=True)
        pipe.step(x, target=y)
    assert all(map(torch.equal, gradients_of(model), expected))


def errors_with_other_autocast(inputs):
    """The errors of steps for which rank 0 computes in bfloat16, and rank 1 in float32 or float16."""
    model, x, y, rank = chain(), X.float(), Y.float(), torch.distributed.get_rank()
    pipe = penstock.Pipeline(
        model,
        quick_plan(model, (x,), ranks=2, microbatches=3),
        loss_fn=lambda o, t: (o.float() - t).square().mean(),
        inputs=inputs,
    )
    batch, target, errors = ((x,), y, []) if rank == 0 or inputs == "all" else ((), None, [])
    for _ in range(2):
        for dtype, is_on in ((torch.bfloat16, rank == 0), (torch.float16 if rank else torch.bfloat16, True)):
            with pytest.raises(penstock.RunError) as refused, torch.autocast("cpu", dtype, enabled=is_on):
                pipe.step(*batch, target=target)
            errors.append(str(refused.value))
        for is_on in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
                pipe.step(*batch, target=target)
    return errors


@pytest.mark.gloo
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_autocast_on_one_rank_is_refused_on_all(pools, inputs):
    first, second = pools[2].run(errors_with_other_autocast, inputs)
    assert first == second
    for error, other in zip(first, ["off", "torch.float16"] * 2, strict=True):
        assert "autocast must be the same on every rank" in error
        assert f"rank 0: torch.bfloat16, rank 1: {other}" in error


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_are_trained_right_and_described(backend):
    # All compiled modules of a process share one limit on recompilations: other tests may have reached it.
    torch.compiler.reset()
    model, x, y = chain(), X.float(), Y.float()
    plain = copy.deepcopy(model)
    functional.mse_loss(plain(x), y).backward()
    for place in range(len(model)):
        model[place] = torch.compile(model[place], backend=backend)
    plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule="zb_h1")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, local=True)
    pipe.step(x, target=y)
    for gradient, expected in zip(gradients_of(model), gradients_of(plain), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    # Compiled code computes both gradients at once; code that is only traced is deferred as usual.
    assert ("does a full backward" in pipe.describe()) is (backend == "aot_eager")
