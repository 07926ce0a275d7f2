"""SFTTrainer and DPOTrainer of TRL on a pipeline have the numbers of one process; skipped without trl."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from penstock.hf import pipelined
from tests.hf import runs
from tests.plans import quick_plan

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

WORDS = [f"w{index}" for index in range(29)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{word: index + 3 for index, word in enumerate(WORDS)}}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def model() -> Any:
    return runs.model(bos_token_id=1, eos_token_id=1).float()


def texts(*names: str) -> Any:
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 6)))

    return datasets.Dataset.from_list([{name: text() for name in names} for _ in range(10)])


TRAINERS = {
    "SFT": ("SFTTrainer", "SFTConfig", ("text",), {}),
    "DPO": ("DPOTrainer", "DPOConfig", ("prompt", "chosen", "rejected"), {}),
    "DPO, precomputed": (
        "DPOTrainer",
        "DPOConfig",
        ("prompt", "chosen", "rejected"),
        {"precompute_ref_log_probs": True},
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_of_trl_has_the_numbers_of_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")  # no telemetry
    monkeypatch.setattr("penstock.hf.trainer.make_plan", lambda made, **given: quick_plan(made, **given))
    kind, settings, columns, changes = TRAINERS[name]
    given = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.05, "logging_steps": 1, "seed": 7}
    given |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    given |= {"eval_strategy": "steps", "eval_steps": 3, "max_length": 16, **changes}
    numbers = []
    for trainer_of, pipeline in (
        (getattr(trl, kind), {}),
        (pipelined(getattr(trl, kind)), {"local": True, "ranks": 2, "microbatches": 2, "schedule": "1f1b"}),
    ):
        args = getattr(trl, settings)(output_dir=str(tmp_path), **given)
        data = texts(*columns)
        others = {"train_dataset": data, "eval_dataset": data.select(range(3)), "processing_class": tokenizer()}
        others |= {"ref_model": model()} if kind == "DPOTrainer" else {}
        numbers.append(runs.trained(trainer_of(model=model(), args=args, **others, **pipeline)))
    (logs, state), (piped_logs, piped_state) = numbers
    watched = [
        {key: value for key, value in entry.items() if "time" not in key and "second" not in key} for entry in logs
    ]
    assert len(watched[0]) > 6  # the metrics that these trainers keep, besides loss, norm and learning rate
    for entry, piped in zip(watched, piped_logs, strict=True):
        assert {key: piped[key] for key in entry} == pytest.approx(entry, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(piped_state, state, rtol=1e-4, atol=1e-5)
