"""Experts that `parallelize_fn` distributes over replicas have the gradients of the unsplit model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

import penstock
from penstock import AutoPipeline, AutoPipelineConfig
from penstock.errors import RunError
from tests.plans import quick_plan

WIDTH, EXPERTS, STEPS = 8, 4, 3
X, Y = torch.randn(2, STEPS, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.gloo


class GatherTokens(torch.autograd.Function):
    """The tokens of all ranks of a group."""

    @staticmethod
    def forward(ctx, tokens, group):
        ctx.group = group
        return gathered(tokens, group)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return own_rows(total, ctx.group), None


class SumExperts(torch.autograd.Function):
    """The sum over the experts of all ranks, for the own tokens."""

    @staticmethod
    def forward(ctx, results, group):
        ctx.group = group
        total = results.clone()
        dist.all_reduce(total, group=group)
        return own_rows(total, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


def gathered(tokens, group):
    rows = [torch.empty_like(tokens) for _ in range(group.size())]
    dist.all_gather(rows, tokens.contiguous(), group=group)
    return torch.cat(rows)


def own_rows(tokens, group):
    return tokens.chunk(group.size())[group.rank()].clone()


class Experts(nn.Module):
    """A residual block of experts, each weighted by a gate."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.group = None

    def forward(self, x):
        gates, tokens, experts = self.gate(x).softmax(-1), x, self.experts
        if self.group is not None:
            gates, tokens = GatherTokens.apply(gates, self.group), GatherTokens.apply(x, self.group)
            experts = experts.to_local() if isinstance(experts, DTensor) else experts
            first = len(experts) * self.group.rank()
            gates = gates[:, first : first + len(experts)]
        result = torch.einsum("te,eio,ti->to", gates, experts, tokens)
        return x + torch.tanh(result if self.group is None else SumExperts.apply(result, self.group))


def mixture():
    torch.manual_seed(0)
    return nn.Sequential(*[Experts() for _ in range(4)]).double()


def as_dtensors(stage, mesh):
    for block in stage.children():
        block.group = mesh.get_group("ep")
        block.experts = nn.Parameter(distribute_tensor(block.experts.data, mesh["ep"], [Shard(0)]))


def as_shards_of_dtensors(stage, mesh):
    as_dtensors(stage, mesh)
    for block in stage.children():
        fully_shard(block, mesh=mesh["dp"])


def as_shards_with_their_own_divisor(stage, mesh):
    as_shards_of_dtensors(stage, mesh)
    for block in stage.children():
        block.set_gradient_divide_factor(4.0)


def as_plain_parts(stage, mesh):
    for block in stage.children():
        block.group = mesh.get_group("ep")
        block.experts = nn.Parameter(block.experts.data.chunk(2)[mesh.get_local_rank("ep")].clone())


def without_experts_elsewhere(stage, mesh):
    if mesh.get_local_rank("ep"):
        for block in stage.children():
            block.experts = None


def over_the_pipeline(stage, mesh):
    for block in stage.children():
        block.experts = nn.Parameter(distribute_tensor(block.experts.data, mesh["pp"], [Shard(0)]))


def as_tensor_parallel(stage, mesh):
    for block in stage.children():
        parallelize_module(block.gate, mesh["ep"], ColwiseParallel())


def as_sequences(stage, mesh):
    for block in stage.children():
        parallelize_module(block[0], mesh["ep"], SequenceParallel(sequence_dim=0, use_local_output=True))


def built(shape, names, parallelize_fn):
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), mixture()
    rows = len(X[0]) // (dist.get_world_size() // mesh["pp"].size())
    plan = quick_plan(model, (X[0][:rows],), ranks=mesh["pp"].size(), microbatches=2, schedule="1f1b")
    return mesh, penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, mesh=mesh, parallelize_fn=parallelize_fn)


def trained(shape, names, parallelize_fn):
    mesh, pipe = built(shape, names, parallelize_fn)
    replica = 0
    for name in names:
        replica = replica if name == "pp" else replica * mesh[name].size() + mesh.get_local_rank(name)
    replicas = dist.get_world_size() // mesh["pp"].size()
    optimizer, norms = torch.optim.AdamW(pipe.parameters(), 1e-2), []
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        pipe.step(x.chunk(replicas)[replica], target=y.chunk(replicas)[replica])
        norms.append(pipe.clip_grad_norm_(0.1).item())
        optimizer.step()
    state = pipe.full_state_dict(everywhere=True)
    return norms, state


@pytest.mark.parametrize(
    ("shape", "names", "parallelize_fn"),
    [
        ((2, 2), ("pp", "ep"), as_dtensors),
        pytest.param((1, 2, 2), ("pp", "dp", "ep"), as_dtensors, marks=pytest.mark.whole),
        ((1, 2, 2), ("pp", "dp", "ep"), as_shards_of_dtensors),
        ((1, 2, 2), ("pp", "dp", "ep"), as_shards_with_their_own_divisor),
    ],
)
def test_experts_of_several_replicas_train_like_the_whole_model(pools, shape, names, parallelize_fn):
    model = mixture()
    optimizer, norms = torch.optim.AdamW(model.parameters(), 1e-2), []
    for x, y in zip(X, Y, strict=True):
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    for found, state in pools[4].run(trained, shape, names, parallelize_fn):
        assert found == pytest.approx(norms, rel=1e-12)
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def auto_job():
    """The experts are placed along an axis of another mesh of the same processes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    experts_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "pp"))
    given = {"moe_mesh": experts_mesh, "ep_axis_name": "ep", "pp_batch_size": 4, "scale_grads_in_schedule": True}

    def place_experts(model, world_mesh, moe_mesh, **axes):
        as_dtensors(model, moe_mesh)

    ap = AutoPipeline(AutoPipelineConfig(mesh, **given))
    ap.build(mixture(), loss_fn=functional.mse_loss, parallelize_fn=place_experts, args=(X[0][:4],))
    rows = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)
    ap.step(X[0][rows], target=Y[0][rows])
    return ap.clip_grad_norm(1.0).item(), {name: whole(p.grad) for name, p in ap.pipeline.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_experts_of_an_auto_pipeline_have_the_gradients_of_the_whole_model(pools):
    model = mixture()
    functional.mse_loss(model(X[0]), Y[0]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    for found, gradients in pools[4].run(auto_job):
        assert found == pytest.approx(norm, rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=0, atol=1e-12)


def refusals():
    torch.manual_seed(0)
    found = []
    for parallelize_fn in (as_plain_parts, without_experts_elsewhere, over_the_pipeline, as_tensor_parallel):
        with pytest.raises(RunError) as refused:
            built((2, 2), ("pp", "ep"), parallelize_fn)
        found.append(str(refused.value))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]).double()
    plan = quick_plan(model, (X[0],), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, mesh=mesh, parallelize_fn=as_sequences)
    with pytest.raises(RunError) as refused:
        pipe.step(X[0], target=Y[0])
    return [*found, str(refused.value)]


def test_parameters_that_differ_between_replicas_in_other_ways_are_refused(pools):
    for parts, missing, pipeline, layer, partial in pools[4].run(refusals):
        assert "must have the same values on all ranks" in parts or "must have the same shape on all ranks" in parts
        assert "experts" in parts
        assert "parameters of the same names" in missing
        assert "must be distributed over ranks that have its stage" in pipeline
        assert "split by tensor parallelism over replicas" in layer
        assert "a partial sum over replicas" in partial
