"""A Hugging Face Llama, unchanged, as a pipeline: padded batches, a searched plan, and saving under the original names.

Run it with `python examples/hf_llama.py`. All ranks are in this process; for separate processes see `mlp.py`,
and `auto_pipeline.py` for a configuration in the style of AutoModel.
"""

import copy

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

RANKS, STEPS, SAMPLES, LENGTH, WORDS = 3, 5, 10, 16, 80


def make_model() -> LlamaForCausalLM:
    """Build the model from a configuration, without a download."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, num_key_value_heads=2, tie_word_embeddings=True))


def batch(step: int) -> dict[str, Tensor]:
    """Return sentences of different lengths. Padding has no label, so microbatches are weighted by their tokens."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def main() -> None:
    """Plan, train both, and compare."""
    model = make_model()
    plain = copy.deepcopy(model)
    plan = penstock.plan(model, kwargs=batch(0), ranks=RANKS, microbatches=4, schedule="zb_h1", budget_seconds=1)
    print(plan, end="\n\n")
    pipe = penstock.Pipeline(model, plan, local=True)  # given labels, the model returns its loss
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pipe, plain))
    for step in range(STEPS):
        loss, expected = pipe.step(**batch(step)).loss, plain(**batch(step)).loss
        expected.backward()
        norm = pipe.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: pipeline {loss:.6f}, plain {expected:.6f}, gradient norm {norm:.4f}")
        assert abs(loss - expected) < 1e-3
    assert pipe.full_state_dict().keys() == plain.state_dict().keys()  # the original names, for save_pretrained


if __name__ == "__main__":
    main()
