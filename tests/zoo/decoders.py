"""Decoders: causal language models from their transformers configs."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf

from tests.zoo.batch import LAYERS, VOCABULARY, WIDTH, Example, ready, scrambled, tokens

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def causal(config: hf.PreTrainedConfig, length: int = 12, **more: Any) -> Example:
    """A language model with a batch whose labels are its tokens; some labels are left out."""
    torch.manual_seed(0)
    model = scrambled(hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    ids = tokens(length=length)
    labels = ids.clone()
    labels[:, :2] = -100
    return ready(model, input_ids=ids, labels=labels, **more)


def common(**changes: Any) -> Mapping[str, Any]:
    """The sizes that most configs share, with changes."""
    return {**_COMMON, **changes}


def llama() -> Example:
    """Llama with grouped keys."""
    return causal(hf.LlamaConfig(**common()))


def llama_sdpa() -> Example:
    """Llama with torch's own attention, which takes another path for the mask."""
    torch.manual_seed(0)
    model = scrambled(hf.LlamaForCausalLM._from_config(hf.LlamaConfig(**common()), attn_implementation="sdpa"))
    return ready(model, input_ids=tokens(), labels=tokens())


def qwen2() -> Example:
    """Qwen2: biases in attention."""
    return causal(hf.Qwen2Config(**common(tie_word_embeddings=True)))


def qwen3() -> Example:
    """Qwen3: normalised queries and keys."""
    return causal(hf.Qwen3Config(**common(head_dim=16)))


def mistral() -> Example:
    """Mistral with a sequence of three windows."""
    return causal(hf.MistralConfig(**common(sliding_window=6)), length=18)


def phi3() -> Example:
    """Phi3 with a sequence of three windows; queries, keys and values are one matrix."""
    return causal(hf.Phi3Config(**common(sliding_window=6, resid_pdrop=0.1)), length=18)


def mixtral() -> Example:
    """Mixtral with the loss of its routers."""
    config = hf.MixtralConfig(**common(num_local_experts=4, output_router_logits=True, sliding_window=6))
    return causal(config, length=18)


def qwen2_moe() -> Example:
    """Qwen2-MoE with the loss of its routers, a shared expert, and layers with and without experts."""
    config = hf.Qwen2MoeConfig(
        **common(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=WIDTH,
            shared_expert_intermediate_size=WIDTH,
            output_router_logits=True,
            mlp_only_layers=[1],
        )
    )
    return causal(config)


def olmoe() -> Example:
    """OLMoE with the loss of its routers."""
    return causal(hf.OlmoeConfig(**common(num_experts=4, num_experts_per_tok=2, output_router_logits=True)))


def gemma2() -> Example:
    """Gemma2: alternating windows, soft caps, tied head."""
    config = hf.Gemma2Config(**common(head_dim=8, sliding_window=6, query_pre_attn_scalar=8))
    return causal(config, length=18)


def gemma3() -> Example:
    """Gemma3: two rotary tables, local and global layers."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**common(head_dim=8, sliding_window=6, query_pre_attn_scalar=8, layer_types=kinds))
    return causal(config, length=18)


def cohere() -> Example:
    """Cohere: attention and feed-forward side by side, scaled logits."""
    return causal(hf.CohereConfig(**common(logit_scale=0.25, use_qk_norm=True)))


def granite() -> Example:
    """Granite: multipliers for embedding, residual, attention and logits."""
    config = hf.GraniteConfig(
        **common(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=2.0)
    )
    return causal(config)


def gpt2() -> Example:
    """GPT-2: head tied to the embedding, dropout on."""
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=4)
    return causal(config)


def gpt_neox() -> Example:
    """GPT-NeoX: parallel residuals, rotary over a part of the head."""
    return causal(hf.GPTNeoXConfig(**common(max_position_embeddings=32, hidden_dropout=0.1, attention_dropout=0.1)))


def opt() -> Example:
    """OPT: learned positions from the mask, a projection around the blocks."""
    config = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    )
    return causal(config)


def bloom() -> Example:
    """Bloom: positions as slopes added to attention (ALiBi)."""
    config = hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=4, hidden_dropout=0.1, attention_dropout=0.1
    )
    return causal(config)


def falcon() -> Example:
    """Falcon: one key for all heads, parallel attention."""
    config = hf.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        alibi=False,
    )
    return causal(config)


def deepseek_v3() -> Example:
    """DeepSeek-V3: low-rank queries and keys, a dense layer before those with experts."""
    config = hf.DeepseekV3Config(
        **common(
            num_key_value_heads=4,
            moe_intermediate_size=WIDTH,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    )
    return causal(config)


def mamba2() -> Example:
    """Mamba2: state space blocks in chunks, no attention."""
    config = hf.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=4,
        pad_token_id=0,
    )
    return causal(config)


def gpt_oss() -> Example:
    """GPT-OSS: sinks in attention, alternating windows, the loss of its routers."""
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    config = hf.GptOssConfig(
        **common(
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=6,
            layer_types=kinds,
            output_router_logits=True,
        )
    )
    return causal(config, length=18)
