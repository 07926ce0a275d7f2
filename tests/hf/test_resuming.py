"""A PipelineTrainer that resumes trains on as if it had not been interrupted."""

import json
from functools import cache
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
    "save_strategy": "steps",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 100.0,
}


def dropping() -> Any:
    """The small Llama, with random numbers in every step."""
    return runs.model(attention_dropout=0.2)


@cache
def plan_for(ranks: int) -> Plan:
    return runs.plan_for(dropping(), ranks)


def train(
    directory: Path | str, ranks: int, resume: Any = None, plan: Plan | None = None, **changes: Any
) -> runs.Numbers:
    """A run with dropout, whose steps depend on random numbers and on the order of the samples."""
    given = {"plan": plan} if plan is not None else {"plan": plan_for(ranks), "local": True}
    trainer = runs.made(PipelineTrainer, directory, {**SETTINGS, **changes}, model=dropping(), **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.log_history, trainer.pipe.full_state_dict()


def numbers(logs: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [
        (entry["step"], entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in logs if "loss" in entry
    ]


# An epoch has 3 steps.
@pytest.mark.parametrize(("num_steps", "every"), [(6, 2), pytest.param(26, 6, marks=pytest.mark.whole)])
def test_steps_after_a_checkpoint_are_bit_identical_on_any_number_of_ranks(
    tmp_path: Path, num_steps: int, every: int
) -> None:
    given = {"max_steps": num_steps, "save_steps": every}
    logs, state = train(tmp_path / "whole", 2, **given)
    for ranks, saved in ((2, every), (3, 2 * every)):
        checkpoint = tmp_path / "whole" / f"checkpoint-{saved}"
        resumed_logs, resumed = train(tmp_path / "again", ranks, str(checkpoint), **given)
        assert numbers(resumed_logs) == numbers(logs)
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in state.items())


def test_the_last_checkpoint_is_resumed_from_and_old_ones_are_removed(tmp_path: Path) -> None:
    whole_logs, whole = train(tmp_path / "whole", 2, max_steps=5, save_steps=1)

    # The schedule of the whole run, interrupted after step 3.
    class Stop(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = state.global_step == 3
            return control

    given = {"max_steps": 5, "save_steps": 1, "save_total_limit": 2}
    others = {"model": dropping(), "plan": plan_for(2), "local": True, "callbacks": [Stop()]}
    runs.made(PipelineTrainer, tmp_path, {**SETTINGS, **given}, **others).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    saved = tmp_path / "checkpoint-3"
    assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 3
    hf.AutoModelForCausalLM.from_pretrained(saved)
    logs, state = train(tmp_path, 2, resume=True, **given)
    assert numbers(logs) == numbers(whole_logs)
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.items())


def on_rank(plan: Plan, directory: str) -> tuple[runs.Numbers, runs.Numbers, runs.Numbers]:
    """A whole run, the same resumed, and one resumed from a checkpoint of another number of ranks."""
    given = {"max_steps": 4, "save_steps": 2}
    whole = train(f"{directory}/whole", 2, None, plan, **given)
    resumed = train(f"{directory}/resumed", 2, f"{directory}/whole/checkpoint-2", plan, **given)
    return whole, resumed, train(f"{directory}/other", 2, f"{directory}/local/checkpoint-2", plan, **given)


@pytest.mark.gloo
def test_two_processes_resume_bit_by_bit_and_from_a_checkpoint_of_one_process(pools: Any, tmp_path: Path) -> None:
    logs, state = train(tmp_path / "local", 3, max_steps=4, save_steps=2)
    (whole, resumed, other), _ = pools[2].run(on_rank, plan_for(2), str(tmp_path))
    assert numbers(whole[0]) == numbers(resumed[0])
    assert all(torch.equal(tensor, resumed[1][name]) for name, tensor in whole[1].items())
    # Processes add up norms, and gradients of tied parameters, in another order.
    assert torch.allclose(torch.tensor(numbers(other[0])), torch.tensor(numbers(logs)), rtol=1e-6, atol=0.0)
    assert all(torch.allclose(tensor, other[1][name], rtol=1e-9) for name, tensor in state.items())


def test_a_checkpoint_of_the_model_alone_resumes_with_a_new_optimizer(tmp_path: Path) -> None:
    train(tmp_path, 2, max_steps=1, save_steps=1, save_only_model=True)
    assert not (tmp_path / "checkpoint-1" / "pipeline").exists()
    logs, _ = train(tmp_path, 2, resume=str(tmp_path / "checkpoint-1"), max_steps=2, save_strategy="no")
    assert [entry["step"] for entry in logs if "loss" in entry] == [1, 2]


def test_the_optimizer_of_one_process_is_refused(tmp_path: Path) -> None:
    runs.trained(runs.made(hf.Trainer, tmp_path, {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}))
    trainer = runs.made(PipelineTrainer, tmp_path, {}, plan=runs.the_plan(), local=True)
    with pytest.raises(CheckpointError, match=r"trainer\.pipe\.load"):
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_that_does_not_exist_is_named(tmp_path: Path) -> None:
    trainer = runs.made(PipelineTrainer, tmp_path, {}, plan=runs.the_plan(), local=True)
    with pytest.raises(CheckpointError, match=r"Can't find a valid checkpoint at .*missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "missing"))
