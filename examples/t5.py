"""A small T5 as a pipeline: the encoder's output skips to every stage of the decoder, and embeddings are shared.

Run it with `python examples/t5.py`. All 4 ranks are in this process; losses are compared with plain PyTorch.
"""

import copy

import torch
from transformers import T5Config, T5ForConditionalGeneration

import penstock

RANKS, STEPS, SAMPLES, LENGTH, WORDS = 4, 5, 8, 12, 60


def make_model() -> T5ForConditionalGeneration:
    """Build the model from a configuration, without a download."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 3}
    config = T5Config(vocab_size=WORDS, **sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return T5ForConditionalGeneration(config)


def main() -> None:
    """Plan, train both on reversing a sentence, and compare."""
    model = make_model()
    plain = copy.deepcopy(model)
    sentences = torch.randint(1, WORDS, (STEPS, SAMPLES, LENGTH))
    first = {"input_ids": sentences[0], "labels": sentences[0].flip(1)}
    plan = penstock.plan(model, kwargs=first, ranks=RANKS, microbatches=4, schedule="1f1b", partitioner="linear")
    print(plan, end="\n\n")
    skips = [edge for edge in plan.cuts.edges if edge[1] > edge[0] + 1]
    print("values that skip stages go from and to:", *skips)
    assert skips
    pipe = penstock.Pipeline(model, plan, local=True)  # given labels, the model returns its loss
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=5e-3) for each in (pipe, plain))
    for step, ids in enumerate(sentences):
        loss = pipe.step(input_ids=ids, labels=ids.flip(1)).loss
        expected = plain(input_ids=ids, labels=ids.flip(1)).loss
        expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: pipeline {loss:.6f}, plain {expected:.6f}")
        assert abs(loss - expected) < 1e-3


if __name__ == "__main__":
    main()
