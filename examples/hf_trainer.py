"""A small Llama trained by PipelineTrainer on 2 local processes, compared with Trainer; then each rank loads its part.

Run it with `python examples/hf_trainer.py`.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import penstock
from penstock.hf import PipelineTrainer

RANKS = 2
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model() -> LlamaForCausalLM:
    """Build the model from a configuration, without a download; the weights are the same on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Return tokens, of which the first are ignored by the loss."""
    tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for index in range(count):
        labels[index, : index % 5] = -100
    return [{"input_ids": row, "labels": own} for row, own in zip(tokens, labels, strict=True)]


def settings(directory: str) -> TrainingArguments:
    """Return arguments as for Trainer; batch sizes are those of the whole pipeline."""
    sizes = {"max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 1}
    return TrainingArguments(directory, use_cpu=True, save_strategy="no", disable_tqdm=True, **sizes)


def make_plan() -> penstock.Plan:
    """Make a plan; without one, PipelineTrainer searches."""
    batch = {name: torch.stack([sample[name] for sample in samples(4)]) for name in ("input_ids", "labels")}
    cuts = {"schedule": "1f1b", "partitioner": "uniform", "budget_seconds": 1.0}
    return penstock.plan(make_model(), kwargs=batch, ranks=RANKS, microbatches=2, **cuts)


def train(directory: str, plan: penstock.Plan) -> list[dict[str, float]]:
    """Train on one rank, with the same calls as with Trainer."""
    trainer = PipelineTrainer(make_model(), settings(directory), train_dataset=samples(30), plan=plan)
    trainer.train()
    trainer.save_model(directory)  # rank 0 writes files that from_pretrained reads
    return trainer.state.log_history


def load(directory: str, plan: penstock.Plan) -> int:
    """Load a model on the meta device, each rank only its own stages; return the bytes read."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    return penstock.Pipeline(model, plan).load(directory).bytes_read


def main() -> None:
    """Train on processes and in one, compare, and load the saved model."""
    plan = make_plan()
    with tempfile.TemporaryDirectory() as directory:
        logs, _ = penstock.launch(train, RANKS, directory, plan)
        plain = Trainer(make_model(), settings(directory), train_dataset=samples(30))
        plain.train()
        for ours, theirs in zip(logs[:-1], plain.state.log_history[:-1], strict=True):
            print(f"step {ours['step']}: pipeline {ours['loss']:.6f}, one process {theirs['loss']:.6f}")
        LlamaForCausalLM.from_pretrained(directory)
        print("bytes read by each rank:", penstock.launch(load, RANKS, directory, plan))


if __name__ == "__main__":
    main()
