"""hf: models: build_model from a configuration without weights, with a batch that fits them."""

import json
from pathlib import Path

import pytest
import torch

from penstock.cli.models import build_model
from penstock.cli.options import Example

TEXT = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "llama": {**TEXT, "intermediate_size": 16},
    "gpt2": {"vocab_size": 30, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "bert": {**TEXT, "intermediate_size": 16, "max_position_embeddings": 16},
    "t5": {"vocab_size": 30, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2},
    "vit": {**TEXT, "intermediate_size": 16, "image_size": 16, "patch_size": 8},
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}


def directory(path: Path, kind: str, **more: object) -> str:
    (path / kind).mkdir()
    (path / kind / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind], **more}))
    return f"hf:{path / kind}"


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_of_every_kind_is_built_and_captured_without_weights(kind: str, call, tmp_path: Path) -> None:
    target = directory(tmp_path, kind)
    with build_model(target, Example(batch=2)) as (model, args, kwargs):
        assert type(model).__name__ == CLASSES[kind]
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert not args
        assert {tensor.shape[0] for tensor in kwargs.values()} == {2}
        assert "labels" in kwargs
    result = call("capture", target, "--batch", "2", "--stages", "2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["crossings"]


def test_the_architecture_of_the_configuration_is_taken(tmp_path: Path) -> None:
    target = directory(tmp_path, "bert", architectures=["BertForTokenClassification"], num_labels=3)
    with build_model(target, Example(batch=2, sequence=5)) as (model, _, kwargs):
        assert type(model).__name__ == "BertForTokenClassification"
        assert kwargs["labels"].shape == (2, 5)


def test_with_weights_numbers_are_in_range_and_the_model_runs(tmp_path: Path) -> None:
    with build_model(directory(tmp_path, "llama"), Example(batch=3, sequence=6, weights=True)) as (model, _, kwargs):
        assert kwargs["input_ids"].shape == (3, 6)
        assert kwargs["input_ids"].max() < 30
        assert torch.isfinite(model(**kwargs).loss)


def test_a_configuration_may_be_named_by_its_file(tmp_path: Path) -> None:
    target = directory(tmp_path, "gpt2", dtype="bfloat16")
    with build_model(f"{target}/config.json", Example(batch=1)) as (model, _, kwargs):
        assert model.dtype is torch.bfloat16
        assert kwargs["input_ids"].shape == (1, 16)


def test_a_model_type_stands_for_its_usual_size(tmp_path: Path) -> None:
    with build_model("hf:gpt2", Example(batch=1)) as (model, _, kwargs):
        assert model.config.n_layer == 12
        assert kwargs["input_ids"].shape == (1, 512)


def test_a_plan_for_a_named_device_needs_neither_weights_nor_the_device(call, tmp_path: Path) -> None:
    target = directory(tmp_path, "llama")
    machine = ("--flops", "3e14", "--memory-speed", "2e12", "--bandwidth", "5e10", "--latency", "1e-5")
    sizes = ("--ranks", "2", "--microbatches", "2", "--batch", "4", "--sequence", "8", "--budget", "0.1")
    planned = call("plan", target, *machine, *sizes, "--schedule", "1f1b", "--out", "plan.json")
    assert planned.exit_code == 0, planned.output
    checked = call("check", "plan.json", "--model", target, "--batch", "4", "--sequence", "8")
    assert "the pipeline matches the unsplit model" in checked.stdout
    assert checked.exit_code == 0


def test_a_configuration_that_contradicts_itself_is_refused(call, tmp_path: Path) -> None:
    result = call("capture", directory(tmp_path, "llama", num_attention_heads="many"))
    assert result.exit_code == 2
    assert "configuration" in result.output
    assert "Traceback" not in result.output
