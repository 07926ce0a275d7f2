"""Losses that a PipelineTrainer computes from the outputs of the model, compared with a plain Trainer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy

from penstock.errors import RunError
from penstock.hf import PipelineTrainer, pipelined
from penstock.ir import Plan
from tests.hf import runs

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}


class Inseparable:
    """A loss of the whole batch: not a sum of losses of its microbatches."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        spread = outputs.logits.square().mean().sqrt()
        loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + 0.1 * spread
        return (loss, outputs) if return_outputs else loss


class Changed:
    """A function of the loss that Trainer computes, which is changed in place."""

    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)  # type: ignore[misc]
        loss *= 2
        return (loss, outputs) if return_outputs else loss


class TwoCalls:
    """Two calls of the model, and one without gradients."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        reversed_inputs = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
        with torch.no_grad():
            level = model(**reversed_inputs).logits.abs().mean()
        loss = outputs.loss + 0.5 * model(**reversed_inputs).loss + level
        return (loss, outputs) if return_outputs else loss


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss function as it is passed to Trainer."""
    losses = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch


class PlainReversed(hf.Trainer):  # type: ignore[misc]
    """Changes the batch before the step, and the loss after it."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = {name: tensor.flip(1) for name, tensor in inputs.items()}
        return super().training_step(model, tokens, *args, **kwargs) * 3


class PlainStep(hf.Trainer):  # type: ignore[misc]
    """A step of its own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        outputs = model(**self._prepare_inputs(inputs))
        loss = (outputs.loss + 0.1 * outputs.logits.square().mean().sqrt()) / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


class PlainInseparable(Inseparable, hf.Trainer):  # type: ignore[misc]
    pass


class PlainChanged(Changed, hf.Trainer):  # type: ignore[misc]
    pass


class PlainTwoCalls(TwoCalls, hf.Trainer):  # type: ignore[misc]
    pass


RUNS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "smoothed": (hf.Trainer, {"label_smoothing_factor": 0.1, **EVALUATED}, {}),
    "smoothed, accumulated": (
        hf.Trainer,
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "max_steps": 2},
        {},
    ),
    "of a function": (
        hf.Trainer,
        {"gradient_accumulation_steps": 2, **EVALUATED},
        {"compute_loss_func": summed},
    ),
    "overridden": (PlainInseparable, EVALUATED, {}),
    "overridden, accumulated": (PlainChanged, {"gradient_accumulation_steps": 2, "max_steps": 2}, {}),
    "overridden, with two calls": (PlainTwoCalls, {"max_steps": 2}, {}),
    "of a changed batch": (PlainReversed, {"gradient_accumulation_steps": 2, "max_steps": 2}, {}),
    "of an overridden step": (PlainStep, {"gradient_accumulation_steps": 2, "max_steps": 2}, {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_loss_of_outputs_has_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    kind, given, others = RUNS[name]
    expected = runs.trained(runs.made(kind, tmp_path, given, **others))
    found = runs.trained(runs.made(pipelined(kind), tmp_path, given, plan=runs.the_plan(), local=True, **others))
    assert list(runs.differences(expected, found)) == []


def test_a_step_of_its_own_without_backward_through_the_pipeline_is_refused(tmp_path: Path) -> None:
    class Direct(hf.Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = model.train()(**inputs).loss
            loss.backward()
            return loss.detach()

    trainer = runs.made(pipelined(Direct), tmp_path, {}, plan=runs.the_plan(), local=True)
    with pytest.raises(RunError, match=r"self\.accelerator\.backward\(loss\)"):
        trainer.train()


def overridden(plan: Plan, directory: str, given: dict[str, Any]) -> runs.Numbers:
    """By this rank of a pipeline."""
    return runs.trained(runs.made(pipelined(PlainInseparable), directory, given, plan=plan))


@pytest.mark.gloo
def test_a_loss_of_outputs_has_the_numbers_of_one_process_on_two_ranks(pools: Any, tmp_path: Path) -> None:
    expected = runs.trained(runs.made(PlainInseparable, tmp_path, EVALUATED))
    first, second = pools[2].run(overridden, runs.the_plan(), str(tmp_path), EVALUATED)
    assert list(runs.differences(expected, first)) == []
    assert list(runs.differences((expected[0], {}), second)) == []


def test_a_forward_and_its_backward_draw_the_same_random_numbers(tmp_path: Path) -> None:
    # A loss that is the model's own is computed in one pass by PipelineTrainer, and in two by its subclass.
    class Same(PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    def run(kind: type) -> runs.Numbers:
        model = runs.model(attention_dropout=0.3)
        return runs.trained(
            runs.made(kind, tmp_path, {"max_steps": 2}, model=model, plan=runs.plan_for(model), local=True)
        )

    assert list(runs.differences(run(PipelineTrainer), run(Same))) == []


def test_a_loss_may_call_the_model_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Positional(PipelineTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(inputs["input_ids"], labels=inputs["labels"]).loss

    found: list[Any] = []

    def made(model: Any, args: Any, kwargs: Any, **given: Any) -> Plan:
        found.append((len(args), list(kwargs)))
        return runs.the_plan()

    monkeypatch.setattr("penstock.hf.trainer.make_plan", made)
    runs.made(Positional, tmp_path, {}, ranks=2, local=True)
    assert found == [(1, ["labels"])]


def test_a_loss_that_calls_no_model_is_refused_at_construction(tmp_path: Path) -> None:
    class Without(PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return torch.tensor(math.pi, requires_grad=True)

    with pytest.raises(RunError, match="does not call the model"):
        runs.made(Without, tmp_path, {}, ranks=2, local=True)


def test_a_trainer_that_uses_parameters_in_its_loss_is_refused(tmp_path: Path) -> None:
    class Decayed(PipelineTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss + self.model.lm_head.weight.square().sum()

    trainer = runs.made(Decayed, tmp_path, {}, plan=runs.the_plan(), local=True)
    with pytest.raises(RunError, match=r"lm_head\.weight|embed_tokens\.weight"):
        trainer.train()
