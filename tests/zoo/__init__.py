"""The zoo: small models of every architecture and situation that must come through a split unchanged."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tests.zoo import by_hand, decoders, encoder_decoders, encoders, plain, situations, special, vision
from tests.zoo.batch import Builder, Example, has_labels, without_labels

ZOO: dict[str, Builder] = {
    "llama": decoders.llama,
    "llama_sdpa": decoders.llama_sdpa,
    "qwen2": decoders.qwen2,
    "qwen3": decoders.qwen3,
    "mistral": decoders.mistral,
    "phi3": decoders.phi3,
    "mixtral": decoders.mixtral,
    "qwen2_moe": decoders.qwen2_moe,
    "olmoe": decoders.olmoe,
    "gemma2": decoders.gemma2,
    "gemma3": decoders.gemma3,
    "cohere": decoders.cohere,
    "granite": decoders.granite,
    "gpt2": decoders.gpt2,
    "gpt_neox": decoders.gpt_neox,
    "opt": decoders.opt,
    "bloom": decoders.bloom,
    "falcon": decoders.falcon,
    "deepseek_v3": decoders.deepseek_v3,
    "mamba2": decoders.mamba2,
    "gpt_oss": decoders.gpt_oss,
    "bert_sequence_classification": encoders.bert_sequence_classification,
    "bert_masked_lm": encoders.bert_masked_lm,
    "bert_question_answering": encoders.bert_question_answering,
    "bert_token_classification": encoders.bert_token_classification,
    "roberta": encoders.roberta,
    "distilbert": encoders.distilbert,
    "modernbert": encoders.modernbert,
    "deberta_v2": encoders.deberta_v2,
    "t5": encoder_decoders.t5,
    "bart": encoder_decoders.bart,
    "whisper": encoder_decoders.whisper,
    "vit": vision.vit,
    "swin": vision.swin,
    "convnext": vision.convnext,
    "segformer": vision.segformer,
    "clip": vision.clip,
    "resnet50": plain.resnet50,
    "unet": plain.unet,
    "transformer": plain.transformer,
    "lstm": plain.lstm,
    "branches": plain.branches,
    "tied": plain.tied,
    "weight_used_twice": plain.weight_used_twice,
    "batch_norm": plain.batch_norm,
    "dropout": plain.dropout,
    **by_hand.MODELS,
    "control_flow": special.control_flow,
    "custom_function": special.custom_function,
    "in_place": special.in_place,
    "non_contiguous": special.non_contiguous,
    "channels_last": special.channels_last,
    "dict_between": special.dict_between,
    "dataclass_between": special.dataclass_between,
    "model_output_between": special.model_output_between,
    "nested_between": special.nested_between,
    "long_skips": special.long_skips,
    "frozen": situations.frozen,
    "frozen_in_the_middle": situations.frozen_in_the_middle,
    "lora": situations.lora,
    "checkpointed": situations.checkpointed,
    "checkpointed_reentrant": situations.checkpointed_reentrant,
    "hooked": situations.hooked,
    "autocast_inside": situations.autocast_inside,
    "autocast_around": situations.autocast_around,
    "bf16": situations.bf16,
    "hidden_states": situations.hidden_states,
    "mask_of_ones": situations.mask_of_ones,
    "padded_mask": situations.padded_mask,
    "no_mask": situations.no_mask,
    "tuple_output": situations.tuple_output,
    "positional": situations.positional,
}

ALIKE = frozenset(
    {
        *("llama_sdpa", "qwen2", "qwen3", "mistral", "phi3", "granite", "qwen2_moe", "olmoe", "gpt_neox", "opt"),
        *("falcon", "bert_sequence_classification", "bert_token_classification", "roberta", "distilbert", "bart"),
        *("mask_of_ones", "no_mask", "positional", "frozen_in_the_middle"),
    }
)
"""what has the same kinds of blocks and values as another model of the zoo: most tests run them with `--whole` only"""

UNSCORED = frozenset({"batch_norm", "autocast_inside"})
"""what does not return its loss; the others are given labels"""

_AMBIENT: dict[str, Callable[[], AbstractContextManager[None]]] = {"autocast_around": situations.ambient_autocast}


def ambient(name: str) -> AbstractContextManager[None]:
    """The context in which an example is captured and run."""
    return _AMBIENT.get(name, nullcontext)()


__all__ = ["ALIKE", "UNSCORED", "ZOO", "Builder", "Example", "ambient", "has_labels", "without_labels"]
