"""What a PipelineTrainer refuses, shows and does inside one process."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate.state import PartialState

import penstock
from penstock.errors import PlanError, RunError
from penstock.hf import PipelineMixin, PipelineTrainer, pipelined, settings
from tests.hf import runs
from tests.plans import quick_plan

REFUSED = [
    ({"push_to_hub": True}, "push_to_hub"),
    ({"use_liger_kernel": True}, "forward"),
    ({"debug": "underflow_overflow"}, "their stage"),
    ({"optim": "lomo"}, "adamw_torch"),
    ({"optim": "galore_adamw"}, "whole model"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[str(next(iter(given.values()))) for given, _ in REFUSED])
def test_a_setting_that_cannot_be_followed_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=said):
        runs.made(PipelineTrainer, tmp_path, given, local=True)


def test_an_argument_that_a_trainer_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="colour"):
        local(tmp_path, {}, colour="red")


def test_only_trainers_can_be_pipelined() -> None:
    assert pipelined(PipelineTrainer) is PipelineTrainer
    assert pipelined(hf.Seq2SeqTrainer) is pipelined(hf.Seq2SeqTrainer)
    with pytest.raises(RunError, match="subclass"):
        pipelined(dict)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Each sample once."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        yield from self.samples


class Loader:
    """Has batches and nothing else."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)


class PlainLoaded(hf.Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return Loader(super().get_train_dataloader())


@pytest.mark.parametrize("is_stream", [True, False])
def test_planning_takes_no_samples_of_a_stream_or_of_a_loader(
    is_stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.hf.trainer.make_plan", lambda model, **given: quick_plan(model, **given))
    given = {"microbatches": 2, "schedule": "1f1b", "ranks": 2, "local": True}
    kind: type = hf.Trainer if is_stream else PlainLoaded
    data = [{"train_dataset": Stream(iter(runs.samples(8)))} if is_stream else {} for _ in range(2)]
    expected = runs.trained(runs.made(kind, tmp_path, {"max_steps": 2}, **data[0]))
    found = runs.trained(runs.made(pipelined(kind), tmp_path, {"max_steps": 2}, **data[1], **given))
    assert list(runs.differences(expected, found)) == []


def test_a_stream_that_cannot_be_copied_needs_a_plan(tmp_path: Path) -> None:
    data = Stream(sample for sample in runs.samples(8))
    with pytest.raises(PlanError, match=r"cannot be copied(.|\n)*plan=penstock\.plan"):
        runs.made(PipelineTrainer, tmp_path, {}, local=True, ranks=2, train_dataset=data)


def test_where_to_run_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="ranks=2"):
        runs.made(PipelineTrainer, tmp_path, {}, local=True)
    with pytest.raises(RunError, match=r"penstock\.launch"):
        runs.made(PipelineTrainer, tmp_path, {})
    with pytest.raises(RunError, match=r"ranks must be the number of ranks of the plan \(got: 3, plan: 2\)"):
        local(tmp_path, {}, ranks=3)


def test_choices_beside_a_plan_must_be_those_of_the_plan(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"microbatches must be that of the plan \(got: 8, plan: 2\)"):
        local(tmp_path, {}, microbatches=8)
    with pytest.raises(RunError, match=r"schedule must be that of the plan \(got: 'gpipe', plan: 1f1b\)\ntry: "):
        local(tmp_path, {}, schedule="gpipe")
    assert local(tmp_path, {}, microbatches=2, schedule="1F1B").pipe.plan == runs.the_plan()


def local(directory: Path, given: dict[str, Any], **others: Any) -> Any:
    plan = runs.plan_for(others["model"]) if "model" in others else runs.the_plan()
    return runs.made(PipelineTrainer, directory, given, plan=plan, local=True, **others)


def test_a_plan_that_is_searched_for_leaves_no_trace_in_the_order_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.hf.trainer.make_plan", lambda model, **given: quick_plan(model, **given))
    given = {"microbatches": 2, "schedule": "1f1b", "ranks": 2, "local": True}
    found = runs.trained(runs.made(PipelineTrainer, tmp_path, {"max_steps": 2}, **given))
    assert list(runs.differences(runs.trained(runs.made(hf.Trainer, tmp_path, {"max_steps": 2})), found)) == []


def broken() -> Any:
    made = runs.model()
    with torch.no_grad():
        made.model.norm.weight.fill_(math.inf)
    return made


def test_a_loss_that_is_no_number_stops_the_run_or_is_logged(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is NaN or Inf"):
        local(tmp_path, {}, model=broken()).train()
    going_on = local(tmp_path, {"max_steps": 1}, model=broken(), options=penstock.RunOptions(nonfinite="ignore"))
    logs, _ = runs.trained(going_on)
    assert math.isnan(logs[0]["loss"])


def test_the_mean_of_batches_that_accumulate_is_that_of_a_plain_trainer(tmp_path: Path) -> None:
    # 6 batches an epoch in groups of 4 and 2, of a model that knows no number of tokens.
    given = {"gradient_accumulation_steps": 4, "max_steps": 4, "learning_rate": 0.01}
    expected = runs.trained(runs.made(hf.Trainer, tmp_path, given, model=runs.Plain()))
    found = runs.trained(local(tmp_path, given, model=runs.Plain()))
    assert list(runs.differences(expected, found)) == []


def test_a_model_of_the_users_own_is_saved_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = local(tmp_path, {}, model=runs.Plain())
    trainer.save_model(str(tmp_path / "saved"))
    state = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in runs.Plain().state_dict().items())


def test_the_best_model_is_found_also_where_transformers_has_renamed_tensors(tmp_path: Path) -> None:
    sizes = {"vocab_size": runs.VOCABULARY, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, num_hidden_layers=2))
    trainer = local(tmp_path, {}, model=model)
    trainer.save_model(str(tmp_path / "best"))
    before = trainer.pipe.full_state_dict()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    trainer.state.best_model_checkpoint = str(tmp_path / "best")
    trainer._load_best_model()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.pipe.full_state_dict().items())


def test_an_adapter_of_peft_is_trained_and_saved_as_by_a_plain_trainer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        base = runs.model()
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).double()

    given = {"max_steps": 2}
    model = adapted()
    trainer = runs.made(PipelineTrainer, tmp_path, given, model=model, plan=runs.plan_for(model), local=True)
    found = runs.trained(trainer)
    assert list(runs.differences(runs.trained(runs.made(hf.Trainer, tmp_path, given, model=adapted())), found)) == []
    trainer.save_model(str(tmp_path / "adapter"))
    back, ids = peft.PeftModel.from_pretrained(runs.model(), tmp_path / "adapter"), runs.samples(1)[0]["input_ids"]
    torch.testing.assert_close(back.double().eval()(ids[None]).logits, model.eval()(ids[None]).logits)


def test_the_arguments_of_the_user_are_not_changed(tmp_path: Path) -> None:
    given = runs.settings(tmp_path)
    model = runs.model()
    trainer = PipelineTrainer(model, given, train_dataset=runs.samples(4), plan=runs.the_plan(), local=True)
    assert given.logging_nan_inf_filter
    assert not trainer.args.logging_nan_inf_filter


def test_predictions_are_those_of_the_model(tmp_path: Path) -> None:
    trainer = local(tmp_path, {})
    found = trainer.predict([{"input_ids": sample["input_ids"]} for sample in runs.samples(3)])
    expected = runs.model().eval()(torch.stack([sample["input_ids"] for sample in runs.samples(3)])).logits
    torch.testing.assert_close(torch.tensor(found.predictions), expected.detach())


def test_a_trainer_without_data_plans_for_its_first_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hf.trainer.make_plan", lambda model, **given: quick_plan(model, **given))
    given = {"microbatches": 2, "schedule": "1f1b", "ranks": 2, "local": True, "train_dataset": None}
    trainer = runs.made(PipelineTrainer, tmp_path, {}, **given, eval_dataset=None)
    with pytest.raises(PlanError, match="no data"):
        assert trainer.pipe
    groups = trainer.create_optimizer().param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))
    found = trainer.evaluate(runs.samples(7, seed=2))["eval_loss"]
    assert found == pytest.approx(runs.made(hf.Trainer, tmp_path, {}).evaluate()["eval_loss"], rel=1e-6)
    several = {"eval_dataset": {"one": runs.samples(7, seed=2), "two": runs.samples(3)}}
    metrics = runs.made(PipelineTrainer, tmp_path, {}, **given, **several).evaluate()
    assert metrics["eval_one_loss"] == pytest.approx(found, rel=1e-6)


def test_a_step_by_hand_plans_for_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hf.trainer.make_plan", lambda model, **given: quick_plan(model, **given))
    given = {"microbatches": 2, "schedule": "1f1b", "ranks": 2, "local": True}
    nothing = {"train_dataset": None, "eval_dataset": None}
    batch, losses, parameters = hf.default_data_collator(runs.samples(4)), [], []
    for kind, others in ((PipelineTrainer, given), (hf.Trainer, {})):
        trainer = runs.made(kind, tmp_path, {}, **nothing, **others)
        losses.append(trainer.training_step(trainer.model, dict(batch), torch.tensor(9)))
        losses.append(trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=True)[0])
        parameters.append(trainer.model.model.norm.weight.grad)
    torch.testing.assert_close(torch.stack(losses[:2]), torch.stack(losses[2:]).to(losses[0].dtype))
    torch.testing.assert_close(*parameters)


def test_to_accelerate_a_rank_is_the_only_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = runs.settings(tmp_path)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    model = runs.model()
    trainer = PipelineTrainer(model, given, train_dataset=runs.samples(4), plan=runs.the_plan(), local=True)
    assert (trainer.accelerator.num_processes, PartialState().num_processes) == (1, 1)


def test_workers_that_load_data_are_seeded_alike_on_every_rank(tmp_path: Path) -> None:
    trainer = local(tmp_path, {})
    trainer.args.distributed_state.process_index = 1
    assert trainer.get_train_dataloader().worker_init_fn.keywords["rank"] == 0
    assert trainer.args.process_index == 1


def test_a_trainer_of_another_kind_is_not_taken_for_the_one_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hf.Trainer, "_wrap_model")
    with pytest.raises(RunError, match="_wrap_model"):
        settings.check_installed()


def test_without_transformers_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"penstock\[hf\]"):
        settings.check_installed()


@pytest.mark.parametrize("is_mixed_in", [True, False])
def test_the_save_model_of_a_trainer_class_runs(is_mixed_in: bool, tmp_path: Path) -> None:
    class Noted(hf.Trainer):  # type: ignore[misc]
        def save_model(self, *args: Any, **kwargs: Any) -> None:
            super().save_model(*args, **kwargs)
            (tmp_path / "note").write_text("saved")

    class Mixed(PipelineMixin, Noted):
        pass

    kind = Mixed if is_mixed_in else pipelined(Noted)
    trainer = runs.made(kind, tmp_path, {}, plan=runs.the_plan(), local=True)
    trainer.save_model()
    assert isinstance(trainer, kind)
    assert {"model.safetensors", "note"} <= {path.name for path in tmp_path.iterdir()}


def test_an_overridden_prediction_step_has_the_outputs_of_the_model(tmp_path: Path) -> None:
    class Levelled(hf.Trainer):  # type: ignore[misc]
        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                outputs = model(**self._prepare_inputs(inputs))
            return outputs.loss + outputs.logits.abs().mean(), None, None

    expected = runs.made(Levelled, tmp_path, {}).evaluate()["eval_loss"]
    trainer = runs.made(pipelined(Levelled), tmp_path, {}, plan=runs.the_plan(), local=True)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
