"""The pipeline as the model of a Trainer."""

import torch
from torch import nn

import penstock
from penstock.hf.model import PipelineModel
from tests.plans import quick_plan


def test_complex_outputs_have_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.complex128) for _ in range(3)))
    x = torch.randn(6, 4, dtype=torch.complex128)
    weights = torch.randn(6, 4, dtype=torch.complex128)
    plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule="1f1b")
    # Not real-valued before `real`, so that a wrong conjugate would change the gradients.
    (model(x).square() * weights).sum().real.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    wrapped = PipelineModel(penstock.Pipeline(model, plan, local=True), model, "cpu", None)
    (wrapped(x).square() * weights).sum().real.backward()
    wrapped.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
