"""Models: small decoders of Hugging Face, their batches, and how one process trains them."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

# Loaded before the pools are started, the classes need not be loaded by every process of theirs.
hf.LlamaForCausalLM  # noqa: B018

VOCABULARY = 40
SAMPLES, LENGTH = 4, 7
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def decoder(kind: str = "Llama", layers: int = 4, **changes: Any) -> nn.Module:
    """The same numbers in every process, in float64."""
    torch.manual_seed(0)
    made = getattr(hf, f"{kind}Config")(**{**_SIZES, "num_hidden_layers": layers, **changes})
    return hf.AutoModelForCausalLM.from_config(made, attn_implementation="eager").double()


def batches(count: int, length: int = LENGTH, samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    """Tokens, and the tokens that follow them; some are left out."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (count, samples, length + 1), generator=generator)
    labels = tokens[..., 1:].clone()
    labels[:, :, :2] = -100
    return list(zip(tokens[..., :-1], labels, strict=True))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of the quickstart."""
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-100)


def alone(model: nn.Module, given: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of one process."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    for ids, labels in given:
        optimizer.zero_grad()
        loss = mean_loss(model(ids).logits, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def piped(ap: Any, given: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of a pipeline, whose steps leave sums over the microbatches."""
    optimizer, found = torch.optim.SGD(ap.parameters(), lr=0.3, momentum=0.9), []
    losses: list[Tensor] = []
    for ids, labels in given:
        optimizer.zero_grad()
        ap.step(ids, target=labels, losses=losses)
        ap.scale_grads_by_divisor(len(losses))
        ap.clip_grad_norm(max_norm=1.0)
        optimizer.step()
        found.append(sum(loss.item() for loss in losses) / len(losses))
    return found
