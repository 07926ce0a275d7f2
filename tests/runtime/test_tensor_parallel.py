"""Stages whose blocks are split over tensor-parallel ranks train like the unsplit model."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import penstock
from penstock import AutoPipeline, AutoPipelineConfig
from penstock.errors import PenstockError, RunError
from penstock.runtime.initial_weights import check_replica_weights
from tests.auto.models import batches, decoder, mean_loss
from tests.plans import quick_plan

STEPS = 2
pytestmark = pytest.mark.gloo
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "layers": 2}


def by_own_plan(stage, mesh):
    """Apply the tensor-parallel plan that the model's configuration has."""
    plan = stage.whole_model.config.base_model_tp_plan
    parallelize_module(stage.model, mesh["tp"], {name: STYLES[style]() for name, style in plan.items()})


def with_the_head(stage, mesh):
    """Split the head too; if its weight is that of the embedding, then on the stage of the head only."""
    by_own_plan(stage, mesh)
    if hasattr(stage, "lm_head"):
        parallelize_module(stage.lm_head, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def logits_loss(output, target):
    return mean_loss(output.logits, target)


def trained_alone(**changes):
    """Losses, norms, gradients of the first step, and parameters after all steps, of one process."""
    model = decoder(**{**SIZES, **changes})
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), 1e-2), [], []
    for ids, labels in batches(STEPS):
        optimizer.zero_grad()
        loss = logits_loss(model(ids), labels)
        loss.backward()
        if not losses:
            gradients = {name: parameter.grad.clone() for name, parameter in every_name(model)}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, gradients, {name: parameter.detach() for name, parameter in every_name(model)}


def every_name(model):
    return model.named_parameters(remove_duplicate=False)


def trained(shape, names, schedule, options, changes):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = decoder(**{**SIZES, **changes})
    rows = slice(None)
    if "dp" in names:
        replica = mesh.get_local_rank("dp")
        rows = slice(2 * replica, 2 * replica + 2)
    given = [(ids[rows], labels[rows]) for ids, labels in batches(STEPS)]
    plan = quick_plan(model, given[0][:1], ranks=mesh["pp"].size(), microbatches=2, schedule=schedule, **options)
    pipe = penstock.Pipeline(model, plan, loss_fn=logits_loss, mesh=mesh, parallelize_fn=with_the_head)
    optimizer, losses, norms = torch.optim.AdamW(pipe.parameters(), 1e-2), [], []
    for ids, labels in given:
        optimizer.zero_grad()
        result = pipe.step(ids, target=labels)
        if not losses:
            gradients = {name: full(parameter.grad).clone() for name, parameter in pipe.named_parameters()}
        norms.append(pipe.clip_grad_norm_(0.5).item())
        losses.append(result.loss.item())
        optimizer.step()
    return losses, norms, gradients, {name: full(parameter).detach() for name, parameter in pipe.named_parameters()}


def assert_alike(found, expected):
    losses, norms, gradients, parameters = expected
    for rank_losses, rank_norms, rank_gradients, rank_parameters in found:
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        assert rank_norms == pytest.approx(norms, rel=1e-12)
        for name, gradient in rank_gradients.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12)
        for name, parameter in rank_parameters.items():
            torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=1e-10)
    assert {name for _, _, _, parameters in found for name in parameters} == parameters.keys()


@pytest.mark.parametrize(
    ("schedule", "options", "changes"),
    [
        ("zb_h1", {"recompute": "full"}, {"tie_word_embeddings": True}),
        pytest.param("1f1b", {"recompute": "full"}, {}, marks=pytest.mark.whole),
        pytest.param("zb_h1", {}, {"tie_word_embeddings": True}, marks=pytest.mark.whole),
    ],
)
def test_a_model_split_by_its_own_plan_trains_like_the_whole_model(pools, schedule, options, changes):
    found = pools[4].run(trained, (2, 2), ("pp", "tp"), schedule, options, changes)
    assert_alike(found, trained_alone(**changes))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [((1, 2, 2), {}), pytest.param((2, 2, 2), {"tie_word_embeddings": True}, marks=pytest.mark.whole)],
)
def test_replicas_of_tensor_parallel_pipelines_train_like_the_whole_model(pools, shape, changes):
    found = pools[math.prod(shape)].run(trained, shape, ("pp", "dp", "tp"), "1f1b", {}, changes)
    assert_alike(found, trained_alone(**changes))


def auto_job(path):
    """Train with an AutoPipeline whose axes have other names, save in the middle, and resume from that."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "stage"))

    def split(model, world_mesh, moe_mesh, *, tp_axis_name, **axes):
        plan = {**model.whole_model.config.base_model_tp_plan, **HEAD}
        names = {name if name in HEAD else f"model.{name}": STYLES[style]() for name, style in plan.items()}
        with warnings.catch_warnings():  # a name of the plan that is on another stage
            warnings.simplefilter("ignore")
            parallelize_module(model, world_mesh[tp_axis_name], names)

    def built():
        config = AutoPipelineConfig(
            mesh, pp_axis_name="stage", tp_axis_name="tensor", pp_batch_size=4, scale_grads_in_schedule=True
        )
        ap = AutoPipeline(config).build(decoder(**SIZES), loss_fn=mean_loss, parallelize_fn=split)
        return ap, torch.optim.AdamW(ap.parameters(), 1e-2)

    losses, norms = [], []
    ap, optimizer = built()
    for number, (ids, labels) in enumerate(batches(STEPS)):
        if number == STEPS - 1:
            ap.pipeline.save(path, optimizer)
            ap, optimizer = built()
            ap.pipeline.load(path, optimizer)
        optimizer.zero_grad()
        losses.append(ap.step(ids, target=labels).loss.item())
        norms.append(ap.clip_grad_norm(0.5).item())
        optimizer.step()
    return losses, norms, {}, ap.pipeline.full_state_dict(everywhere=True)


STYLES["gathered"] = lambda: ColwiseParallel(output_layouts=Replicate())
HEAD = {"lm_head": "gathered"}


def test_an_auto_pipeline_with_a_tensor_axis_trains_saves_and_resumes_like_the_whole_model(pools, tmp_path):
    losses, norms, gradients, parameters = trained_alone()
    found = pools[4].run(auto_job, str(tmp_path))
    # The losses of microbatches are means over labels, of which each has the same number.
    assert_alike(found, (losses, norms, gradients, parameters))


# Plans of a chain of blocks of sequences


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)]).double()


X, Y = torch.randn(2, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def split_linears(stage, mesh):
    for block in stage.children():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_sequences(stage, mesh):
    """Inside a block each rank has a part of the sequence, except in its linears."""
    split_inside(stage, mesh, {"norm": SequenceParallel()})


def split_sequences_of_plain_norms(stage, mesh):
    split_inside(stage, mesh, {})


def split_inside(stage, mesh, plan):
    for block in stage.children():
        linears = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(block, mesh["tp"], {**plan, **linears})
        whole, parts = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
        parallelize_module(block, mesh["tp"], PrepareModuleInput(**whole, use_local_output=True))
        parallelize_module(block, mesh["tp"], PrepareModuleOutput(**parts, desired_output_layouts=Replicate()))


def keep_parts_between_blocks(stage, mesh):
    for block in stage.children():
        parallelize_module(
            block, mesh["tp"], PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        )


def keep_dtensors_between_blocks(stage, mesh):
    layouts = {"output_layouts": Replicate(), "desired_output_layouts": Replicate()}
    for block in stage.children():
        parallelize_module(block, mesh["tp"], PrepareModuleOutput(**layouts, use_local_output=False))


def split_and_shard(stage, mesh):
    split_sequences(stage, mesh)
    for block in stage.children():
        fully_shard(block, mesh=mesh["dp"])


def chain_pipe(shape, names, parallelize_fn, model, **options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plan = quick_plan(model, (X,), ranks=mesh["pp"].size(), microbatches=2, schedule="zb_h1")
    return mesh, penstock.Pipeline(
        model, plan, loss_fn=functional.mse_loss, mesh=mesh, parallelize_fn=parallelize_fn, **options
    )


def chain_job(shape, names, parallelize_fn, path):
    """Two accumulated steps; gradients, and a checkpoint of them that a pipeline without tensor parallelism reads."""
    model = chain().eval()
    scaler = penstock.GradScaler(8.0)
    mesh, pipe = chain_pipe(shape, names, parallelize_fn, model, scaler=scaler)
    rows = slice(None)
    if "dp" in names:
        rows = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    for _ in range(2):
        pipe.step(X[rows], target=Y[rows])
    scaler.unscale_(optimizer)
    norm = pipe.clip_grad_norm_(0.1)
    gradients = {name: full(parameter.grad).clone() for name, parameter in pipe.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    pipe.save(path, optimizer)
    return norm, gradients, {name: full(value) for name, value in pipe.state_dict().items()}


@pytest.mark.parametrize(
    ("shape", "names", "parallelize_fn"),
    [
        pytest.param((2, 2), ("pp", "tp"), split_sequences, marks=pytest.mark.whole),
        ((1, 2, 2), ("pp", "dp", "tp"), split_and_shard),
    ],
)
def test_sequence_parallel_blocks_have_whole_gradients_and_checkpoints(pools, tmp_path, shape, names, parallelize_fn):
    model = chain().eval()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    (2 * functional.mse_loss(model(X), Y)).backward()
    expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for norm, found, state in pools[4].run(chain_job, shape, names, parallelize_fn, str(tmp_path)):
        torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-10)
    # One process with another plan reads the checkpoint, and writes one that tensor-parallel ranks read.
    alone = chain().eval()
    plan = quick_plan(alone, (X,), ranks=2, microbatches=2, schedule="gpipe")
    pipe = penstock.Pipeline(alone, plan, loss_fn=functional.mse_loss, local=True)
    adam = torch.optim.AdamW(pipe.parameters(), 1e-2)
    pipe.load(tmp_path, adam)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(alone.state_dict()[name], value, rtol=0, atol=1e-10)
    averages = {name: adam.state[parameter]["exp_avg"] for name, parameter in pipe.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(averages[name], optimizer.state[parameter]["exp_avg"], rtol=0, atol=1e-12)
    pipe.step(X, target=Y)
    adam.step()
    pipe.save(tmp_path / "alone", adam)
    for state, averages in pools[4].run(loaded_job, shape, names, parallelize_fn, str(tmp_path / "alone")):
        for name, value in state.items():
            assert torch.equal(value, alone.state_dict()[name])
        for name, value in averages.items():
            assert torch.equal(value, adam.state[alone.get_parameter(name)]["exp_avg"])


def loaded_job(shape, names, parallelize_fn, path):
    _, pipe = chain_pipe(shape, names, parallelize_fn, chain())
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    pipe.load(path, optimizer)
    averages = {name: full(optimizer.state[parameter]["exp_avg"]) for name, parameter in pipe.named_parameters()}
    return {name: full(value) for name, value in pipe.state_dict().items()}, averages


def dropout_job(parallelize_fn):
    """A step and an evaluation of a batch that only the first stages are given."""
    mesh, pipe = chain_pipe((2, 2), ("pp", "tp"), parallelize_fn, chain(), inputs="first")
    given, target = ((X,), Y) if mesh.get_local_rank("pp") == 0 else ((), None)
    loss = pipe.step(*given, target=target).loss
    outputs = pipe.eval(*given, target=target, return_outputs=True).outputs
    return loss, outputs, {name: full(parameter.grad) for name, parameter in pipe.named_parameters()}


def test_dropout_of_whole_activations_is_that_of_a_pipeline_without_tensor_parallelism(pools):
    model = chain()
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    loss = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, local=True).step(X, target=Y).loss
    for found, outputs, gradients in pools[4].run(dropout_job, split_linears):
        torch.testing.assert_close(outputs, model.eval()(X), rtol=0, atol=1e-12)
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=0, atol=1e-12)


def mistakes_job():
    """The messages of steps that are refused on every rank; a good step follows each."""
    found = []
    mesh, pipe = chain_pipe((2, 2), ("pp", "tp"), split_linears, chain())
    tensor_rank = mesh.get_local_rank("tp")
    for x in (X + tensor_rank, X[: 4 - 2 * tensor_rank]):
        with pytest.raises(RunError) as refused:
            pipe.step(x, target=Y[: len(x)])
        found.append(str(refused.value))
    assert pipe.step(X, target=Y).loss.isfinite()
    with pytest.raises(RunError) as refused:
        pipe.step(X * torch.inf, target=Y)
    found.append(str(refused.value))
    assert pipe.step(X, target=Y).loss.isfinite()
    with pytest.raises(RunError) as refused:
        pipe.step(X, target=Y) if tensor_rank else pipe.clip_grad_norm_(1.0)
    found.append(str(refused.value))
    _, pipe = chain_pipe((2, 2), ("pp", "tp"), split_sequences_of_plain_norms, chain().eval())
    with pytest.raises(RunError) as refused:
        pipe.step(X, target=Y)
    found.append(str(refused.value))
    for parallelize_fn in (keep_parts_between_blocks, keep_dtensors_between_blocks):
        _, pipe = chain_pipe((2, 2), ("pp", "tp"), parallelize_fn, chain().eval())
        with pytest.raises(PenstockError) as refused:
            pipe.step(X, target=Y)
        found.append(str(refused.value))
    with pytest.raises(RunError, match="must keep tied parameters tied"):
        trained((1, 4), ("pp", "tp"), "1f1b", {}, {"num_key_value_heads": 4, "tie_word_embeddings": True})
    with pytest.raises(RunError, match="an axis 'tp' needs a parallelize_fn"):
        chain_pipe((2, 2), ("pp", "tp"), None, chain())
    torch.manual_seed(tensor_rank)
    with pytest.raises(RunError) as refused:
        chain_pipe((2, 2), ("pp", "tp"), split_linears, nn.Sequential(*[Block() for _ in range(4)]).double())
    found.append(str(refused.value))
    return found


def test_mistakes_with_tensor_parallel_ranks_are_refused_on_every_rank(pools):
    for values, shapes, infinite, calls, norms, parts, dtensors, weights in pools[4].run(mistakes_job):
        assert "tensor-parallel ranks were given different batches" in values
        assert "tensor-parallel ranks were given different batches" in shapes
        assert "is NaN or Inf" in infinite
        assert "called clip_grad_norm_" in calls
        assert "norm.weight" in norms or "norm.bias" in norms
        assert "must be equal on all tensor-parallel ranks" in norms
        assert "disagree about the values that pass between the stages" in parts
        assert "mixed torch.Tensor and DTensor" in dtensors
        assert "tensor-parallel ranks start with different weights (tensor ranks: (0, 1))" in weights


def test_different_weights_name_the_tensor_rank_within_its_replica():
    # Two replicas of two tensor-parallel ranks: the last one differs.
    groups = SimpleNamespace(
        peers=object(), num_tensor_ranks=2, gather=lambda x: x, gather_peers=lambda _: torch.tensor([1, 1, 1, 2])
    )
    with pytest.raises(RunError, match=r"\(tensor ranks: \(0, 1\)\)"):
        check_replica_weights(groups, [nn.Linear(2, 2)])
