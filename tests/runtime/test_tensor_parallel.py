"""Stages whose blocks are split over tensor-parallel ranks train like the unsplit model."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock
from tests.auto.models import batches, decoder, mean_loss
from tests.plans import quick_plan

STEPS = 3
pytestmark = pytest.mark.gloo
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "layers": 2}


def by_own_plan(stage, mesh):
    """Apply the tensor-parallel plan that the model's configuration has."""
    plan = stage.whole_model.config.base_model_tp_plan
    parallelize_module(stage.model, mesh["tp"], {name: STYLES[style]() for name, style in plan.items()})


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
    pipe = penstock.Pipeline(model, plan, loss_fn=logits_loss, mesh=mesh, parallelize_fn=by_own_plan)
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
        ("1f1b", {}, {}),
        ("zb_h1", {}, {"tie_word_embeddings": True}),
        ("1f1b", {"recompute": "full"}, {}),
    ],
)
def test_a_model_split_by_its_own_plan_trains_like_the_whole_model(pools, schedule, options, changes):
    found = pools[4].run(trained, (2, 2), ("pp", "tp"), schedule, options, changes)
    assert_alike(found, trained_alone(**changes))


def test_replicas_of_tensor_parallel_pipelines_train_like_the_whole_model(pools):
    found = pools[8].run(trained, (2, 2, 2), ("pp", "dp", "tp"), "1f1b", {}, {"tie_word_embeddings": True})
    assert_alike(found, trained_alone(tie_word_embeddings=True))
