"""Situations: what people do to ordinary models before they train them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.zoo.batch import WIDTH, Example, noise, padded, ready, tokens
from tests.zoo.decoders import causal, common, gpt2, llama
from tests.zoo.encoders import bert_sequence_classification
from tests.zoo.plain import Branches


def frozen() -> Example:
    """Embedding and first blocks are frozen: their gradients stay None."""
    model, args, kwargs = llama()
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    return model, args, kwargs


def frozen_in_the_middle() -> Example:
    """A block between trained ones is frozen: gradients pass through it."""
    model, args, kwargs = gpt2()
    model.transformer.h[2].requires_grad_(False)
    return model, args, kwargs


def lora() -> Example:
    """LoRA adapters by peft; all else is frozen."""
    model, _, kwargs = llama()
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
    return ready(get_peft_model(model, config), **kwargs)


def checkpointed() -> Example:
    """Blocks recomputed in backward by hooks on saved tensors."""
    return _checkpointed(use_reentrant=False)


def checkpointed_reentrant() -> Example:
    """Blocks recomputed in backward by an autograd function."""
    return _checkpointed(use_reentrant=True)


def _checkpointed(use_reentrant: bool) -> Example:
    model, args, kwargs = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model, args, kwargs


def hooked() -> Example:
    """Forward hooks and pre-hooks that change what blocks get and return."""
    model, args, kwargs = llama()
    model.model.layers[1].register_forward_hook(lambda module, given, result: _scaled(result, 0.5))
    model.model.layers[3].register_forward_pre_hook(lambda module, given: (given[0] * 2, *given[1:]))
    model.lm_head.register_forward_hook(lambda module, given, result: result + 1)
    return model, args, kwargs


def _scaled(result: Any, factor: float) -> Any:
    return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor


class Autocasting(nn.Module):
    """A model whose forward runs under autocast, with a part that does not."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.last = body, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """bfloat16 in the body, float32 in the last layer."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x, middle = self.body(x)
            with torch.autocast("cpu", enabled=False):
                x = self.last(x.float())
        return x + middle.unsqueeze(-1)


def autocast_inside() -> Example:
    """Autocast entered and left within forward."""
    torch.manual_seed(0)
    return ready(Autocasting(Branches()), noise(4, WIDTH))


def autocast_around() -> Example:
    """A model to be run under autocast."""
    return llama()


@contextmanager
def ambient_autocast() -> Iterator[None]:
    """Autocast as a training loop enters it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def bf16() -> Example:
    """All parameters in bfloat16."""
    model, args, kwargs = llama()
    return model.to(torch.bfloat16), args, kwargs


def hidden_states() -> Example:
    """All hidden states and attentions are outputs."""
    return causal(hf.LlamaConfig(**common()), output_hidden_states=True, output_attentions=True)


def mask_of_ones() -> Example:
    """A mask without padding, which models may drop."""
    model, args, kwargs = llama()
    return model, args, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


def padded_mask() -> Example:
    """A mask with padding on the right."""
    model, args, kwargs = llama()
    return model, args, {**kwargs, "attention_mask": padded()}


def no_mask() -> Example:
    """An encoder without a mask."""
    model, args, kwargs = bert_sequence_classification()
    return model, args, {**kwargs, "attention_mask": None}


def tuple_output() -> Example:
    """return_dict=False: a tuple in place of a ModelOutput."""
    model, args, kwargs = gpt2()
    return model, args, {**kwargs, "return_dict": False}


def positional() -> Example:
    """Tokens given by position."""
    model, _, kwargs = llama()
    return model, (kwargs["input_ids"],), {"labels": tokens()}
