"""Sequence models of x-transformers and mambapy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.survey.cases import Case, cross_entropy, squares
from tests.zoo.batch import VOCABULARY, noise, tokens

PACKAGES = ("x-transformers", "mambapy")
_LENGTH = 12


def token_cross_entropy(output: Any, target: Tensor) -> Tensor:
    """The loss of a language model that returns its logits, alone or first."""
    logits = output[0] if isinstance(output, tuple) else output
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _language_model(model: nn.Module) -> Case:
    return Case(model.train(), (tokens(4),), loss_fn=token_cross_entropy, target=tokens(4, seed=1))


def _x(layers: str = "Decoder", wrapper: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    import x_transformers

    torch.manual_seed(0)
    stack = getattr(x_transformers, layers)(dim=32, depth=4, heads=4, attn_dim_head=8, **options)
    return x_transformers.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=_LENGTH, attn_layers=stack, **(wrapper or {})
    )


def _autoregressive() -> Case:
    import x_transformers

    return Case(x_transformers.AutoregressiveWrapper(_x(rotary_pos_emb=True)).train(), (tokens(4, _LENGTH + 1),))


def _encoder_decoder() -> Case:
    import x_transformers

    torch.manual_seed(0)
    sides = {
        f"{side}_{name}": value
        for side in ("enc", "dec")
        for name, value in {"num_tokens": VOCABULARY, "depth": 3, "heads": 4, "max_seq_len": _LENGTH}.items()
    }
    model = x_transformers.XTransformer(dim=32, **sides, tie_token_emb=True)
    return Case(model.train(), (tokens(4), tokens(4, seed=1)))


def _vision() -> Case:
    import x_transformers

    torch.manual_seed(0)
    stack = x_transformers.Encoder(dim=32, depth=4, heads=4, attn_dim_head=8)
    model = x_transformers.ViTransformerWrapper(image_size=16, patch_size=4, num_classes=5, attn_layers=stack)
    return Case(model.train(), (noise(4, 3, 16, 16),), loss_fn=cross_entropy, target=torch.tensor([0, 1, 2, 3]))


def _continuous() -> Case:
    import x_transformers

    torch.manual_seed(0)
    stack = x_transformers.Encoder(dim=32, depth=4, heads=4, attn_dim_head=8, rel_pos_bias=True)
    model = x_transformers.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=_LENGTH, attn_layers=stack)
    mask = torch.arange(_LENGTH) < torch.tensor([12, 9, 7, 10])[:, None]
    return Case(model.train(), (noise(4, _LENGTH, 8),), {"mask": mask}, squares)


def _mamba(pscan: bool) -> Case:
    from mambapy.mamba import Mamba, MambaConfig

    torch.manual_seed(0)
    mamba = Mamba(MambaConfig(d_model=32, n_layers=4, d_state=4, pscan=pscan))
    return _language_model(nn.Sequential(nn.Embedding(VOCABULARY, 32), mamba, nn.Linear(32, VOCABULARY)))


def _jamba(experts: int) -> Case:
    from mambapy.jamba import JambaLM, JambaLMConfig

    torch.manual_seed(0)
    config = JambaLMConfig(
        d_model=32, n_layers=4, mlp_size=32, d_state=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, num_experts=experts, num_experts_per_tok=min(2, experts), attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
    )  # fmt: skip
    return _language_model(JambaLM(config))


MODELS: dict[str, Callable[[], Case]] = {
    "x_decoder": lambda: _language_model(_x()),
    "x_decoder_rotary": lambda: _language_model(_x(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True)),
    "x_decoder_alibi": lambda: _language_model(_x(alibi_pos_bias=True)),
    "x_decoder_relative": lambda: _language_model(_x(rel_pos_bias=True)),
    "x_decoder_flash": lambda: _language_model(_x(attn_flash=True, attn_kv_heads=2)),
    "x_decoder_dropout": lambda: _language_model(_x(attn_dropout=0.1, ff_dropout=0.1)),
    "x_decoder_layer_dropout": lambda: _language_model(_x(layer_dropout=0.2)),
    "x_decoder_sandwich": lambda: _language_model(_x(sandwich_norm=True, gate_residual=True)),
    "x_decoder_hyper_connections": lambda: _language_model(_x(num_residual_streams=2)),
    "x_decoder_value_residual": lambda: _language_model(_x(add_value_residual=True)),
    "x_decoder_memory": lambda: _language_model(_x(wrapper={"num_memory_tokens": 3}, shift_tokens=1)),
    "x_decoder_tied": lambda: _language_model(_x(wrapper={"tie_embedding": True}, attn_qk_norm=True)),
    "x_encoder": lambda: _language_model(_x("Encoder")),
    "x_autoregressive": _autoregressive,
    "x_encoder_decoder": _encoder_decoder,
    "x_vision": _vision,
    "x_continuous": _continuous,
    "mambapy": lambda: _mamba(pscan=True),
    "mambapy_sequential": lambda: _mamba(pscan=False),
    "mambapy_jamba": lambda: _jamba(1),
    "mambapy_jamba_experts": lambda: _jamba(4),
}
