"""A PipelineTrainer that resumes trains on as if it had not been interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from penstock.errors import CheckpointError
from penstock.hf import PipelineTrainer
from penstock.ir import Plan
from tests.hf import runs

SETTINGS = {
    "max_steps": 26,
    "save_strategy": "steps",
    "save_steps": 6,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 100.0,
}


def train(
    directory: Path | str, ranks: int, resume: Any = None, plan: Plan | None = None, **changes: Any
) -> runs.Numbers:
    """A run with dropout, whose steps depend on random numbers and on the order of the samples."""
    model = runs.model(attention_dropout=0.2)
    given = {"plan": plan} if plan is not None else {"plan": runs.plan_for(model, ranks), "local": True}
    trainer = runs.made(PipelineTrainer, directory, {**SETTINGS, **changes}, model=model, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.log_history, trainer.pipe.full_state_dict()


def numbers(logs: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [
        (entry["step"], entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in logs if "loss" in entry
    ]


def test_twenty_steps_after_a_checkpoint_are_bit_identical_on_any_number_of_ranks(tmp_path: Path) -> None:
    logs, state = train(tmp_path / "whole", 2)
    for ranks, checkpoint in ((2, "checkpoint-6"), (3, "checkpoint-12")):
        resumed_logs, resumed = train(tmp_path / "again", ranks, str(tmp_path / "whole" / checkpoint))
        assert numbers(resumed_logs) == numbers(logs)
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in state.items())


def test_the_last_checkpoint_is_resumed_from_and_old_ones_are_removed(tmp_path: Path) -> None:
    whole_logs, whole = train(tmp_path / "whole", 2, max_steps=10, save_steps=2)

    # The schedule of the whole run, interrupted after step 6.
    class Stop(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = state.global_step == 6
            return control

    model = runs.model(attention_dropout=0.2)
    given = {**SETTINGS, "max_steps": 10, "save_steps": 2, "save_total_limit": 2}
    others = {"model": model, "plan": runs.plan_for(model), "local": True, "callbacks": [Stop()]}
    runs.made(PipelineTrainer, tmp_path, given, **others).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    saved = tmp_path / "checkpoint-6"
    assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 6
    hf.AutoModelForCausalLM.from_pretrained(saved)
    logs, state = train(tmp_path, 2, resume=True, max_steps=10, save_steps=2, save_total_limit=2)
    assert numbers(logs) == numbers(whole_logs)
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.items())


def on_rank(plan: Plan, directory: str) -> tuple[runs.Numbers, runs.Numbers, runs.Numbers]:
    """A whole run, the same resumed, and one resumed from a checkpoint of another number of ranks."""
    whole = train(f"{directory}/whole", 2, None, plan, max_steps=6, save_steps=3)
    resumed = train(f"{directory}/resumed", 2, f"{directory}/whole/checkpoint-3", plan, max_steps=6)
    return whole, resumed, train(f"{directory}/other", 2, f"{directory}/local/checkpoint-3", plan, max_steps=6)


@pytest.mark.gloo
def test_two_processes_resume_bit_by_bit_and_from_a_checkpoint_of_one_process(pools: Any, tmp_path: Path) -> None:
    logs, state = train(tmp_path / "local", 3, max_steps=6, save_steps=3)
    plan = runs.plan_for(runs.model(attention_dropout=0.2))
    (whole, resumed, other), _ = pools[2].run(on_rank, plan, str(tmp_path))
    assert numbers(whole[0]) == numbers(resumed[0])
    assert all(torch.equal(tensor, resumed[1][name]) for name, tensor in whole[1].items())
    # Processes add up norms, and gradients of tied parameters, in another order.
    assert torch.allclose(torch.tensor(numbers(other[0])), torch.tensor(numbers(logs)), rtol=1e-6, atol=0.0)
    assert all(torch.allclose(tensor, other[1][name], rtol=1e-9) for name, tensor in state.items())


def test_a_checkpoint_of_the_model_alone_resumes_with_a_new_optimizer(tmp_path: Path) -> None:
    train(tmp_path, 2, max_steps=4, save_steps=2, save_only_model=True)
    assert not (tmp_path / "checkpoint-2" / "pipeline").exists()
    logs, _ = train(tmp_path, 2, resume=str(tmp_path / "checkpoint-2"), max_steps=4)
    assert [entry["step"] for entry in logs if "loss" in entry] == [1, 2, 3, 4]


def test_the_optimizer_of_one_process_is_refused(tmp_path: Path) -> None:
    runs.trained(runs.made(hf.Trainer, tmp_path, {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}))
    trainer = runs.made(PipelineTrainer, tmp_path, {}, plan=runs.the_plan(), local=True)
    with pytest.raises(CheckpointError, match=r"trainer\.pipe\.load"):
        trainer.train(resume_from_checkpoint=True)
