"""A PipelineTrainer on two ranks has the numbers of a plain Trainer in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import default_data_collator

import penstock
from penstock import RunError
from penstock.hf import PipelineTrainer
from tests.hf import runs
from tests.selection import some

pytestmark = pytest.mark.gloo

RUNS = {
    "with clipping": {},
    "with accumulation": {"gradient_accumulation_steps": 2, "max_steps": 4},
    "with decay and warmup": {"weight_decay": 0.3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 4},
    "without clipping": {"max_grad_norm": 0.0, "optim": "sgd", "max_steps": 2},
    "with evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3, "max_steps": 2},
    "with losses only": {"eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True, "max_steps": 2},
}


@pytest.mark.parametrize("name", some(set(RUNS) - {"with clipping", "with losses only"}, RUNS))
def test_a_run_has_the_numbers_of_one_process(name: str, pools: Any, tmp_path: Path) -> None:
    expected = runs.alone(tmp_path, RUNS[name])
    first, second = pools[2].run(runs.piped, runs.the_plan(), str(tmp_path), RUNS[name])
    assert list(runs.differences(expected, first)) == []
    # Every rank knows what was logged; parameters are collected on the first.
    assert list(runs.differences((expected[0], {}), second)) == []


def padded_samples(count: int, width: int = 24) -> list[dict[str, Any]]:
    """Texts of unequal lengths, padded on the right."""
    lengths = [1 + 7 * index % width for index in range(count)]
    texts = []
    for index, length in enumerate(lengths):
        words = torch.randint(1, runs.VOCABULARY, (width,), generator=torch.Generator().manual_seed(index))
        mask = torch.arange(width) < length
        labels = words.masked_fill(~mask, -100)
        texts.append({"input_ids": words * mask, "attention_mask": mask.long(), "labels": labels})
    return texts


def test_a_budget_of_tokens_gives_the_numbers_of_one_process(tmp_path: Path) -> None:
    # Adam would enlarge differences of rounding, which sums over other groups of samples have.
    given = {"max_steps": 2, "per_device_train_batch_size": 8, "optim": "sgd"}
    data = {"train_dataset": padded_samples(16)}
    expected = runs.trained(runs.made(runs.hf.Trainer, tmp_path, given, **data))
    options = {"plan": runs.the_plan(), "local": True, "budget_tokens": 32}
    trainer = runs.made(PipelineTrainer, tmp_path, given, **data, **options)
    assert list(runs.differences(expected, runs.trained(trainer))) == []
    smoothed = runs.made(PipelineTrainer, tmp_path, {**given, "label_smoothing_factor": 0.1}, **data, **options)
    with pytest.raises(RunError, match="budget_tokens needs a model that returns its loss"):
        smoothed.train()


def test_a_split_output_layer_is_evaluated_but_has_no_predictions(tmp_path: Path) -> None:
    batch = default_data_collator(runs.samples(4))
    quick = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "budget_seconds": 0.1}
    plan = penstock.plan(runs.model(), kwargs=batch, vocabulary_shards=2, **quick)
    trainer = runs.made(PipelineTrainer, tmp_path, {}, plan=plan, local=True)
    with torch.no_grad():
        expected = runs.model().eval()(**batch).loss
    assert trainer.evaluate(runs.samples(4))["eval_loss"] == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(RunError, match="has no whole logits to predict"):
        trainer.predict(runs.samples(4))
