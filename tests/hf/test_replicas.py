"""Replicas of a pipeline, and adapters of peft, on real processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from penstock.errors import RunError
from penstock.hf import PipelineTrainer, pipelined
from penstock.ir import Plan, Rows
from tests.hf import runs
from tests.hf.test_losses import PlainChanged

APART = {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2, "max_steps": 3}
# 22 samples in batches of 4: the last one, of the third step with accumulation, has a sample for each replica.
RUNS = {
    "with accumulation": {"gradient_accumulation_steps": 2, "max_steps": 3},
    "with evaluation": {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "weight_decay": 0.1},
}


def on_rank(plan: Plan, directory: str) -> list[runs.Numbers]:
    """Two replicas of a pipeline of two ranks, each with half of every batch."""
    halves = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
    numbers = []
    for given in RUNS.values():
        trainer = runs.made(
            PipelineTrainer, directory, {**given, **halves}, compute_metrics=runs.accuracy, plan=plan, replicas=2
        )
        numbers.append(runs.trained(trainer))
    trainer = runs.made(pipelined(PlainChanged), directory, {**halves, "max_steps": 2}, plan=plan, replicas=2)
    numbers.append(runs.trained(trainer))
    trainer = runs.made(PipelineTrainer, directory, {**halves, **APART}, plan=plan, replicas=2)
    return [*numbers, runs.trained(trainer)]


class MeanOfHalves(hf.Trainer):  # type: ignore[misc]
    """Each half of a batch is averaged over its own tokens of all accumulated batches."""

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        halves = zip(*(halves_of(batch) for batch in batch_samples), strict=True)
        self.items = [super(MeanOfHalves, self)._get_num_items_in_batch(list(half), device) for half in halves]
        return sum(self.items)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        if not model.training:
            return model(**inputs).loss
        pairs = zip(halves_of(inputs), self.items, strict=True)
        return sum(model(**half, num_items_in_batch=items).loss for half, items in pairs) / 2


def halves_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    middle = len(batch["labels"]) // 2
    return [{name: tensor[part] for name, tensor in batch.items()} for part in (slice(middle), slice(middle, None))]


@pytest.mark.gloo
def test_two_replicas_of_two_ranks_have_the_numbers_of_one_process(pools: Any, tmp_path: Path) -> None:
    expected = [runs.alone(tmp_path, given) for given in RUNS.values()]
    expected.append(runs.trained(runs.made(PlainChanged, tmp_path, {"max_steps": 2})))
    expected.append(runs.trained(runs.made(MeanOfHalves, tmp_path, APART)))
    first, *others = pools[4].run(on_rank, runs.the_plan(), str(tmp_path))
    for index, numbers in enumerate(expected):
        assert list(runs.differences(numbers, first[index])) == []
        for other in others:
            assert list(runs.differences((numbers[0], {}), other[index])) == []


def test_replicas_need_processes(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="replicas need processes"):
        runs.made(PipelineTrainer, tmp_path, {}, plan=runs.the_plan(), local=True, replicas=2)
    with pytest.raises(RunError, match="1 or more"):
        runs.made(PipelineTrainer, tmp_path, {}, plan=runs.the_plan(), local=True, replicas=0)


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(runs.model(), settings).double()


def adapter_on_rank(plan: Plan, directory: str, given: dict[str, Any]) -> tuple[runs.Numbers, runs.Numbers]:
    """A run that ends with its best adapter, and the same resumed."""
    trainer = runs.made(PipelineTrainer, f"{directory}/whole", given, model=adapted(), plan=plan)
    whole = runs.trained(trainer)
    trainer.save_model(f"{directory}/adapter")
    again = runs.made(PipelineTrainer, f"{directory}/again", given, model=adapted(), plan=plan)
    again.train(resume_from_checkpoint=f"{directory}/whole/checkpoint-2")
    return whole, (again.state.log_history, again.pipe.full_state_dict())


@pytest.mark.gloo
def test_an_adapter_of_peft_is_trained_resumed_and_saved_on_two_ranks(pools: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    given = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    given |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5}
    expected = runs.trained(runs.made(hf.Trainer, tmp_path / "plain", given, model=adapted()))
    (whole, again), _ = pools[2].run(adapter_on_rank, runs.plan_for(adapted()), str(tmp_path), given)
    assert list(runs.differences(expected, whole)) == []
    assert all(torch.equal(tensor, again[1][name]) for name, tensor in whole[1].items())
    back = peft.PeftModel.from_pretrained(runs.model(), tmp_path / "adapter").double()
    names = [name for name in whole[1] if "lora" in name]
    assert all(torch.allclose(back.state_dict()[name], whole[1][name]) for name in names)


def test_a_replica_gets_its_samples_by_the_rules_of_the_plan() -> None:
    class TwoRowsPerSample(torch.nn.Module):
        def forward(self, tokens: Any, rows: Any) -> Any: ...

    trainer = PipelineTrainer.__new__(PipelineTrainer)
    trainer.model, trainer._replicas, trainer._budget = TwoRowsPerSample(), 2, {}
    trainer._mesh = SimpleNamespace(get_local_rank=lambda axis: 1)
    trainer._pipe = SimpleNamespace(plan=SimpleNamespace(split=(("rows", Rows(2)),)))
    own = trainer._own_samples({"tokens": torch.arange(4)[:, None], "rows": torch.arange(8)[:, None]})
    assert own["tokens"].flatten().tolist() == [2, 3]
    assert own["rows"].flatten().tolist() == [4, 5, 6, 7]
