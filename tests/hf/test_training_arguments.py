"""Settings that change how a step computes: precision, recomputation, compilation, optimizers, batch sizes."""

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from penstock.errors import RunError
from penstock.hf import PipelineTrainer
from penstock.ir import Plan
from tests.hf import runs

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}


def single() -> Any:
    """The small Llama in float32."""
    return runs.model().float()


@cache
def plan_of_single() -> Plan:
    return runs.plan_for(single())


def local(directory: Path, given: dict[str, Any], **others: Any) -> Any:
    model = others.pop("model", None) or runs.model()
    plan = plan_of_single() if model.dtype == torch.float32 else runs.the_plan()
    return runs.made(PipelineTrainer, directory, given, model=model, plan=plan, local=True, **others)


def logged(numbers: runs.Numbers, name: str) -> torch.Tensor:
    return torch.tensor([entry[name] for entry in numbers[0] if name in entry], dtype=torch.float64)


class HalfTrainer(hf.Trainer):  # type: ignore[misc]
    """fp16 as with a GPU: accelerate leaves it out on the CPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = self.scaler = torch.amp.GradScaler("cpu")

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        with torch.autocast("cpu", torch.float16):
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _clip_grad_norm(self, model: Any) -> Any:
        self.scaler.unscale_(self.optimizer.optimizer)
        return super()._clip_grad_norm(model)


PRECISIONS = {
    "bf16": (hf.Trainer, {"bf16": True, **EVALUATED}),
    "bf16, smoothed": (hf.Trainer, {"bf16": True, "label_smoothing_factor": 0.1, "max_steps": 2}),
    "fp16": (HalfTrainer, {"fp16": True, "max_steps": 2}),
}


# HalfTrainer unscales gradients in a method of transformers 5.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=runs.NEEDS_5 if name == "fp16" else ()) for name in PRECISIONS]
)
def test_mixed_precision_differs_from_that_of_one_process_by_its_rounding_only(name: str, tmp_path: Path) -> None:
    kind, given = PRECISIONS[name]
    expected = runs.trained(runs.made(kind, tmp_path, given, model=single()))
    found = runs.trained(local(tmp_path, given, model=single()))
    exact = runs.trained(local(tmp_path, {**given, "bf16": False, "fp16": False, "max_steps": 1}, model=single()))
    for field in ("loss", "grad_norm", "eval_loss"):
        torch.testing.assert_close(logged(found, field), logged(expected, field), rtol=5e-3, atol=0.0)
    assert logged(found, "loss")[0] != logged(exact, "loss")[0]
    assert all(tensor.dtype == torch.float32 for tensor in found[1].values())


def test_a_step_whose_gradients_overflow_in_float16_is_skipped(tmp_path: Path) -> None:
    trainer = local(tmp_path, {"fp16": True, "max_steps": 3}, model=single())
    trainer.accelerator.scaler.scale = 1e30
    before = {name: tensor.clone() for name, tensor in trainer.pipe.full_state_dict().items()}
    logs, state = runs.trained(trainer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
    assert trainer.accelerator.scaler.scale == 1e30 / 8
    # The schedule waits for a step that is taken.
    assert len({entry["learning_rate"] for entry in logs if "learning_rate" in entry}) == 1


def test_evaluation_in_bfloat16_has_the_numbers_of_one_process(tmp_path: Path) -> None:
    given = {"bf16_full_eval": True}
    expected = runs.made(hf.Trainer, tmp_path, given, model=single()).evaluate()["eval_loss"]
    assert local(tmp_path, given, model=single()).evaluate()["eval_loss"] == pytest.approx(expected, rel=2e-3)


@pytest.fixture(scope="module")
def num_plain_calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of the attention of the first layer, in two steps without recomputation."""
    model, calls = runs.model(), []
    trainer = local(tmp_path_factory.mktemp("plain"), {"max_steps": 2}, model=model)
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    runs.trained(trainer)
    return len(calls)


@pytest.mark.parametrize(
    "settings", [None, {"use_reentrant": True}, pytest.param({"every_n_layers": 2}, marks=runs.NEEDS_5)]
)
def test_layers_are_computed_again_with_the_same_numbers(
    settings: dict[str, Any] | None, tmp_path: Path, num_plain_calls: int
) -> None:
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": settings, "max_steps": 2}
    expected = runs.trained(runs.made(hf.Trainer, tmp_path, given))
    model, calls = runs.model(), []
    trainer = local(tmp_path, given, model=model)
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert list(runs.differences(expected, runs.trained(trainer))) == []
    assert len(calls) > num_plain_calls


def test_blocks_are_compiled(tmp_path: Path) -> None:
    given = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    model = runs.model()
    found = runs.trained(local(tmp_path, given, model=model))
    assert model.model.layers[0]._compiled_call_impl is not None
    assert list(runs.differences(runs.trained(runs.made(hf.Trainer, tmp_path, {"max_steps": 2})), found)) == []


def test_noise_is_added_to_embeddings_in_training_only(tmp_path: Path) -> None:
    given = {"neftune_noise_alpha": 5.0, "max_steps": 2, "learning_rate": 0.0}
    exact = runs.trained(local(tmp_path, {**given, "neftune_noise_alpha": None, "max_steps": 1}))
    noisy = runs.trained(local(tmp_path, given))
    trainer = local(tmp_path, given)
    again = runs.trained(trainer)
    assert logged(noisy, "loss")[0] != logged(exact, "loss")[0]
    assert logged(noisy, "loss").tolist() == logged(again, "loss").tolist()
    plain = runs.made(hf.Trainer, tmp_path, {}).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-6)


def optimizer_and_schedule(model: Any) -> Any:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 0.02},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.5},
    ]
    optimizer = torch.optim.Adagrad(groups)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def test_an_optimizer_and_a_schedule_of_the_users_own_are_used(tmp_path: Path) -> None:
    one, two = runs.model(), runs.model()
    given = {"max_steps": 3}
    expected = runs.trained(runs.made(hf.Trainer, tmp_path, given, model=one, optimizers=optimizer_and_schedule(one)))
    found = runs.trained(local(tmp_path, given, model=two, optimizers=optimizer_and_schedule(two)))
    assert list(runs.differences(expected, found)) == []


def test_an_optimizer_class_is_used(tmp_path: Path) -> None:
    given, others = {"max_steps": 2}, {"optimizer_cls_and_kwargs": (torch.optim.Adamax, {"lr": 0.01})}
    expected = runs.trained(runs.made(hf.Trainer, tmp_path, given, **others))
    assert list(runs.differences(expected, runs.trained(local(tmp_path, given, **others)))) == []


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    other = torch.optim.SGD(runs.model().parameters(), lr=0.1)
    with pytest.raises(RunError, match="parameters of the model only"):
        local(tmp_path, {}, optimizers=(other, None))
    with pytest.raises(RunError, match="LBFGS"):
        local(tmp_path, {}, optimizer_cls_and_kwargs=(torch.optim.LBFGS, {}))


def test_a_model_is_made_for_every_run(tmp_path: Path) -> None:
    given = {"args": runs.settings(tmp_path, max_steps=2), "model_init": lambda: runs.model()}
    given |= {"data_collator": hf.default_data_collator, "train_dataset": runs.samples(22)}
    expected = runs.trained(hf.Trainer(**given))
    trainer = PipelineTrainer(**given, plan=runs.the_plan(), local=True)
    assert list(runs.differences(expected, runs.trained(trainer))) == []
    assert list(runs.differences(expected, runs.trained(trainer))) == []


def test_a_batch_that_does_not_fit_is_tried_with_fewer_samples(tmp_path: Path) -> None:
    model, sizes = runs.model(), []

    def check(module: Any, given: Any, *_: Any) -> None:
        sizes.append(len(given[0]))
        if len(given[0]) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

    trainer = local(tmp_path, {"auto_find_batch_size": True, "max_steps": 2}, model=model)
    model.model.layers[1].mlp.register_forward_pre_hook(check)
    with contextlib.suppress(RuntimeError):
        trainer.train()
    assert trainer.state.train_batch_size == 2  # 4, 3, 2: two microbatches of one sample
    assert trainer.state.global_step == 2
