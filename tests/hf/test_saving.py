"""What a PipelineTrainer writes, loads and leaves to the first rank."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from penstock.hf import PipelineTrainer
from penstock.ir import Plan
from tests.hf import runs

pytestmark = pytest.mark.gloo

SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2}


def best_of(plan: Plan, directory: str) -> tuple[str | None, bool, str, dict[str, torch.Tensor]]:
    """A run that ends with its best model, each rank with a directory of its own for what it writes unasked."""
    kept = {**SAVING, "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.8}
    kept["max_steps"] = 4
    trainer = runs.made(PipelineTrainer, directory, kept, plan=plan)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    trainer.save_model(f"{directory}/final")
    is_first = trainer.is_world_process_zero()
    return trainer.state.best_model_checkpoint, is_first, printed.getvalue(), trainer.pipe.full_state_dict()


def test_the_best_checkpoint_is_loaded_and_saved_for_from_pretrained(pools: Any, tmp_path: Path) -> None:
    (best, is_first, printed, state), (other, is_second, nothing, _) = pools[2].run(
        best_of, runs.the_plan(), str(tmp_path)
    )
    assert (is_first, is_second) == (True, False)
    assert "loss" in printed
    assert nothing == ""
    assert best == other
    assert Path(best or "").name in {path.name for path in tmp_path.iterdir()}
    assert len(list(tmp_path.glob("checkpoint-*"))) <= 2
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float64)
    assert all(torch.equal(tensor, state[name]) for name, tensor in saved.state_dict().items())
    best_one = hf.AutoModelForCausalLM.from_pretrained(best, dtype=torch.float64)
    ids = runs.samples(2)[0]["input_ids"][None]
    assert torch.equal(saved(ids).logits, best_one(ids).logits)


def from_meta(plan: Plan, directory: str, given: dict[str, Any]) -> tuple[runs.Numbers, int, int]:
    """A run that begins with a model without numbers."""
    with torch.device("meta"):
        bare = hf.LlamaForCausalLM(runs.config()).double()
    trainer = runs.made(PipelineTrainer, directory, given, model=bare, plan=plan)
    loaded = trainer.pipe.load(directory)
    return runs.trained(trainer), loaded.bytes_read, sum(parameter.nbytes for parameter in trainer.pipe.parameters())


# In 4, rotary tables are attributes too, and the model's initialisation does not set them.
@runs.NEEDS_5
def test_a_model_on_the_meta_device_is_loaded_and_trained_as_one_with_numbers(pools: Any, tmp_path: Path) -> None:
    given = {"max_steps": 2}
    runs.model().save_pretrained(tmp_path)
    expected = runs.trained(runs.made(hf.Trainer, tmp_path, given))
    results = pools[2].run(from_meta, runs.the_plan(), str(tmp_path), given)
    assert list(runs.differences(expected, results[0][0])) == []
    assert all(bytes_read == own for _, bytes_read, own in results)
    # Together the ranks read the model, and the table that both use a second time.
    shared = runs.VOCABULARY * 8 * 8
    assert sum(own for _, _, own in results) == sum(p.nbytes for p in runs.model().parameters()) + shared
