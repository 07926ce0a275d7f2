"""Runs: the same training by a plain Trainer in one process, and by a PipelineTrainer on several ranks."""

import contextlib
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from penstock.hf import PipelineMixin, PipelineTrainer
from penstock.ir import Plan
from tests.plans import quick_plan

VOCABULARY, LENGTH = 32, 6
Numbers = tuple[list[dict[str, Any]], dict[str, Tensor]]
NEEDS_5 = pytest.mark.skipif(hf.__version__ < "5", reason="transformers 4 does not have it")
# Loaded before the pools are started, the classes need not be loaded by every process of theirs.
hf.LlamaForCausalLM  # noqa: B018


def config(**changes: Any) -> Any:
    """Of a small Llama whose first and last layer are one parameter, which lies on two ranks."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    given = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    return hf.LlamaConfig(attn_implementation="eager", **{**given, **sizes, **changes})


def model(**changes: Any) -> nn.Module:
    """The same in every process, in float64 so that differences are those of meaning."""
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config(**changes)).double()


def samples(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Texts whose labels are left out for a part that differs from text to text."""
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    left_out = torch.arange(LENGTH) < torch.arange(count).remainder(LENGTH - 1)[:, None]
    labels = tokens.masked_fill(left_out, -100)
    texts = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return [{name: column[row] for name, column in texts.items()} for row in range(count)]


def settings(directory: Path | str, **changes: Any) -> Any:
    """Six steps, each of which is logged."""
    given = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 0.05, "logging_steps": 1}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 7}
    return hf.TrainingArguments(output_dir=str(directory), **{**given, **quiet, **changes})


def plan_for(made: nn.Module, ranks: int = 2) -> Plan:
    """For a batch of the sizes above."""
    batch = hf.default_data_collator(samples(4))
    items = {} if isinstance(made, Plain) else {"num_items_in_batch": torch.tensor(9)}
    return quick_plan(made, (), {**batch, **items}, ranks=ranks, microbatches=2, schedule="1f1b")


@cache
def the_plan() -> Plan:
    """For the small Llama."""
    return plan_for(model())


def accuracy(prediction: Any) -> dict[str, float]:
    """How many of the next tokens are right, and how large outputs are."""
    logits, labels = prediction.predictions, prediction.label_ids
    right = (np.argmax(logits, -1)[:, :-1] == labels[:, 1:])[labels[:, 1:] != -100]
    return {"accuracy": float(right.mean()), "level": float(np.abs(logits).mean())}


def made(kind: type, directory: Path | str, given: dict[str, Any], **others: Any) -> Any:
    """A trainer; 22 samples make a last batch that is not full."""
    data = {"train_dataset": samples(22), "eval_dataset": samples(7, seed=2)}
    trainer_of = {"model": model(), "data_collator": hf.default_data_collator, **data, **others}
    return kind(args=settings(directory, **given), **trainer_of)


def trained(trainer: Any) -> Numbers:
    """What a run has logged, and the parameters that it ends with."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    state = trainer.pipe.full_state_dict() if isinstance(trainer, PipelineMixin) else trainer.model.state_dict()
    return trainer.state.log_history, {name: tensor.clone() for name, tensor in state.items()}


def alone(directory: Path, given: dict[str, Any], **others: Any) -> Numbers:
    """By one process."""
    return trained(made(hf.Trainer, directory, given, compute_metrics=accuracy, **others))


def piped(plan: Plan, directory: str, given: dict[str, Any]) -> Numbers:
    """By this rank of a pipeline."""
    return trained(made(PipelineTrainer, directory, given, compute_metrics=accuracy, plan=plan))


def differences(one: Numbers, other: Numbers) -> Iterator[str]:
    """Where two runs are not the same; losses are float32 in transformers, whatever the model."""
    watched = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_level", "epoch", "step")
    (logs, state), (other_logs, other_state) = one, other
    if [set(entry) for entry in logs] != [set(entry) for entry in other_logs]:
        yield f"{len(logs)} logs are not of the same kind as {len(other_logs)}"
    for entry, second in zip(logs, other_logs, strict=False):
        for name in (name for name in watched if name in entry):
            tolerance = 3e-7 if "loss" in name or "eval" in name else 1e-9
            if abs(entry[name] - second[name]) > tolerance * abs(entry[name]):
                yield f"{name} of step {entry['step']}: {entry[name]} and {second[name]}"
    for name, tensor in state.items():
        if not torch.allclose(tensor, other_state[name], rtol=1e-7, atol=1e-9):
            yield f"{name}: {(tensor - other_state[name]).abs().max()}"


class Plain(nn.Module):
    """A model that transformers did not make; its loss is the mean of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)))
        self.head = nn.Linear(8, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.table(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}
