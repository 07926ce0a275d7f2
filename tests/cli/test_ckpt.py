"""ckpt: checkpoints listed, verified, shown and exported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from tests.checkpoint.trainings import saved
from tests.plans import quick_plan


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    saved(root, 1, 2)
    return root


def damaged(checkpoints: Path, target: Path) -> Path:
    """A copy whose newest checkpoint lacks the end of a file."""
    shutil.copytree(checkpoints, target)
    path = target / "step-000002" / "stage-001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (target / ".tmp-step-000003-00000000").mkdir()
    return target


def test_ls_lists_the_newest_first(checkpoints: Path, call: Any, tmp_path: Path) -> None:
    rows = json.loads(call("ckpt", "ls", checkpoints, "--json").output)
    assert [(row["name"], row["state"], row["ranks"]) for row in rows] == [
        ("step-000002", "complete", 2),
        ("step-000001", "complete", 2),
    ]
    shown = call("ckpt", "ls", damaged(checkpoints, tmp_path / "bad")).output
    assert "size of a file has changed" in shown
    assert ".tmp-step-000003-00000000 | " in shown
    assert "incomplete" in shown


def test_verify_ends_with_6_if_one_is_damaged_and_names_the_one_that_counts(
    checkpoints: Path, call: Any, tmp_path: Path
) -> None:
    assert call("ckpt", "verify", checkpoints).exit_code == 0
    result = call("ckpt", "verify", damaged(checkpoints, tmp_path / "bad"))
    assert result.exit_code == 6
    assert "step-000002: the size of a file has changed" in result.output
    assert "step-000001: good" in result.output
    assert "1 of 2 checkpoints is damaged" in result.output
    assert "resumes from step-000001" in result.output
    document = json.loads(call("ckpt", "verify", checkpoints, "--json").output)
    assert document["newest_good"] == "step-000002"


def test_show_lists_the_contents_of_a_checkpoint(checkpoints: Path, call: Any) -> None:
    document = json.loads(call("ckpt", "show", checkpoints / "step-000001", "--json").output)
    assert (document["step"], document["optimizer"], document["tied"]) == (1, "Adam", [["embed.weight", "head.weight"]])
    assert {"name": "mix", "file": "stage-000.safetensors", "type": "F64", "shape": "[4, 4]"} in document["tensors"]
    assert "optimizer: Adam" in call("ckpt", "show", checkpoints).output


@pytest.mark.parametrize("verb", ["ls", "verify", "show"])
def test_a_missing_directory_exits_with_6(verb: str, call: Any, tmp_path: Path) -> None:
    result = call("ckpt", verb, tmp_path / "nowhere")
    assert result.exit_code == 6
    assert "no such directory" in result.output


def saved_llama(root: Path) -> Any:
    """A tiny model of transformers, saved after a step."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = hf.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    model = hf.LlamaForCausalLM(config)
    batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}
    plan = quick_plan(model, (), batch, ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, local=True)
    pipe.step(**batch)
    torch.optim.SGD(pipe.parameters(), lr=0.5).step()
    pipe.save(root)
    return model.eval()


def test_an_exported_model_is_loaded_by_from_pretrained_with_equal_outputs(call: Any, tmp_path: Path) -> None:
    model = saved_llama(tmp_path / "run")
    result = call("ckpt", "export", tmp_path / "run", "--hf", tmp_path / "out")
    assert result.exit_code == 0, result.output
    again = type(model).from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(6).view(1, 6)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert "must be empty" in call("ckpt", "export", tmp_path / "run", "--hf", tmp_path / "out").output
    given = call("ckpt", "export", tmp_path / "run", "--hf", tmp_path / "two", "--config", tmp_path / "out", "--json")
    assert json.loads(given.stdout)["model"] == "LlamaForCausalLM"


def test_a_damaged_checkpoint_is_not_exported(call: Any, tmp_path: Path) -> None:
    saved_llama(tmp_path / "run")
    (weights,) = (tmp_path / "run").rglob("stage-001.safetensors")
    content = weights.read_bytes()
    for damage, problem in ((content[:-1], "size of a file"), (content[:-1] + b"\0", "changed")):
        weights.write_bytes(damage)
        result = call("ckpt", "export", tmp_path / "run", "--hf", tmp_path / "out")
        assert result.exit_code == 6
        assert problem in result.output
        assert "stage-001.safetensors" in result.output
        assert not (tmp_path / "out").exists()


def test_without_a_configuration_nothing_is_exported(checkpoints: Path, call: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = call("ckpt", "export", checkpoints, "--hf", tmp_path / "out")
    assert result.exit_code == 6
    assert "--config PATH" in result.output
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    result = call("ckpt", "export", checkpoints, "--hf", tmp_path / "out", "--config", tmp_path)
    assert "not the configuration" in result.output
    assert not (tmp_path / "out").exists()


def test_every_verb_of_ckpt_has_help(call: Any) -> None:
    for verb in ("ls", "verify", "show", "export"):
        result = call("ckpt", verb, "--help")
        assert result.exit_code == 0
        assert "--json" in result.output
    assert "export" in call("ckpt").output
