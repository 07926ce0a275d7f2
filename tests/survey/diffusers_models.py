"""Models of diffusers: U-Nets, diffusion transformers for images and videos, and autoencoders, with few layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.survey.cases import Case, mean_squared_error, squares
from tests.zoo.batch import noise, scrambled

PACKAGES = ("diffusers",)

TIMES = torch.tensor([7, 30, 500, 900])
TEXT = {"encoder_hidden_states": noise(4, 6, 16, seed=2)}
_GROUPS = {"norm_num_groups": 4}
_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1}
_DOWN_2D = ("DownBlock2D", "CrossAttnDownBlock2D")
_UP_2D = ("CrossAttnUpBlock2D", "UpBlock2D")
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


def _case(name: str, options: dict[str, Any], *args: Any, **kwargs: Any) -> Case:
    """A model that is compared with noise of the shape of its first input, or else gets a stand-in for the loss."""
    import diffusers

    torch.manual_seed(0)
    model = scrambled(getattr(diffusers, name)(**options)).train()  # the last layers are zero at first
    with torch.no_grad():
        output = model(*args, **kwargs, return_dict=False)[0]
    sample: Tensor = args[0] if args else kwargs["hidden_states"]
    if isinstance(output, Tensor) and output.shape == sample.shape:
        return Case(model, args, kwargs, mean_squared_error, noise(*sample.shape, seed=1))
    return Case(model, args, kwargs, squares)


def _image(channels: int = 4, size: int = 8) -> Tensor:
    return noise(4, channels, size, size)


def _unet(**options: Any) -> Case:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    given = {"in_channels": 4, "out_channels": 4, "attention_head_dim": 4}
    return _case("UNet2DModel", {**_GROUPS, **_BLOCKS, **blocks, **given, **options}, _image(), TIMES)


def _unet_condition(**options: Any) -> Case:
    blocks = {"down_block_types": _DOWN_2D, "up_block_types": _UP_2D, "cross_attention_dim": 16}
    options = {**_GROUPS, **_BLOCKS, **blocks, "attention_head_dim": 2, **options}
    return _case("UNet2DConditionModel", options, _image(), TIMES, **TEXT)


def _control_net() -> Case:
    options = {"down_block_types": _DOWN_2D, "cross_attention_dim": 16, "attention_head_dim": 2}
    return _case(
        "ControlNetModel", {**_GROUPS, **_BLOCKS, **options, "conditioning_embedding_out_channels": (8, 16)},
        _image(), TIMES, TEXT["encoder_hidden_states"], noise(4, 3, 16, 16, seed=3),
    )  # fmt: skip


def _unet_3d() -> Case:
    down, up = ("CrossAttnDownBlock3D", "DownBlock3D"), ("UpBlock3D", "CrossAttnUpBlock3D")
    blocks = {"down_block_types": down, "up_block_types": up}
    options = {**_GROUPS, **_BLOCKS, **blocks, "cross_attention_dim": 16, "attention_head_dim": 2}
    return _case("UNet3DConditionModel", options, noise(4, 4, 2, 8, 8), TIMES, **TEXT)


def _unet_1d() -> Case:
    down, up = ("DownBlock1DNoSkip", "AttnDownBlock1D"), ("AttnUpBlock1D", "UpBlock1DNoSkip")
    blocks = {"down_block_types": down, "up_block_types": up}
    options = {"in_channels": 2, "extra_in_channels": 64, "block_out_channels": (32, 32), "sample_size": 32}
    return _case("UNet1DModel", options | blocks, noise(4, 2, 32), TIMES)


def _dit() -> Case:
    options = {**_HEADS, "num_layers": 4, "sample_size": 8, "norm_num_groups": 4, "num_embeds_ada_norm": 10}
    return _case("DiTTransformer2DModel", options, _image(), TIMES, class_labels=torch.tensor([0, 1, 2, 3]))


def _pixart() -> Case:
    options = {**_HEADS, "num_layers": 4, "sample_size": 8, "norm_num_groups": 4, "cross_attention_dim": 16}
    return _case("PixArtTransformer2DModel", {**options, "caption_channels": 16}, _image(), timestep=TIMES, **TEXT)


def _packed() -> dict[str, Any]:
    """A packed image of 16 patches, a text of 6 tokens, and the positions of both."""
    return {
        "hidden_states": noise(4, 16, 8),
        "encoder_hidden_states": noise(4, 6, 16, seed=2),
        "timestep": TIMES / 1000,
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(6, 3),
    }


def _flux(**options: Any) -> Case:
    given = {**_HEADS, "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 16}
    given |= {"pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4)}
    guidance = {"guidance": torch.full((4,), 3.5)} if options.get("guidance_embeds") else {}
    return _case(
        "FluxTransformer2DModel", given | options, **_packed(), pooled_projections=noise(4, 16, seed=3), **guidance
    )


def _chroma() -> Case:
    options = {**_HEADS, "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 16}
    options |= {"axes_dims_rope": (2, 2, 4), "approximator_num_channels": 8, "approximator_hidden_dim": 16}
    return _case("ChromaTransformer2DModel", {**options, "approximator_layers": 1}, **_packed())


def _sd3(**options: Any) -> Case:
    given = {**_HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 4}
    given |= {"joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 16}
    inputs = {"timestep": TIMES, "pooled_projections": noise(4, 16, seed=3), **TEXT}
    return _case("SD3Transformer2DModel", given | {"pos_embed_max_size": 8} | options, _image(), **inputs)


def _aura_flow() -> Case:
    options = {**_HEADS, "sample_size": 8, "num_mmdit_layers": 2, "num_single_dit_layers": 2, "pos_embed_max_size": 64}
    options |= {"joint_attention_dim": 16, "caption_projection_dim": 16}
    return _case("AuraFlowTransformer2DModel", options, _image(), timestep=TIMES / 1000, **TEXT)


def _sana() -> Case:
    options = {**_HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 3, "num_cross_attention_heads": 2}
    options |= {"cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16, "sample_size": 8}
    return _case("SanaTransformer2DModel", options, _image(), timestep=TIMES, **TEXT)


def _lumina2() -> Case:
    options = {"sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1}
    options |= {"num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2)}
    options |= {"axes_lens": (32, 16, 16), "cap_feat_dim": 16}
    mask = torch.ones(4, 6, dtype=torch.bool)
    return _case("Lumina2Transformer2DModel", options, _image(), TIMES / 1000, encoder_attention_mask=mask, **TEXT)


def _cog_video_x() -> Case:
    options = {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16}
    options |= {"num_layers": 3, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 6}
    return _case("CogVideoXTransformer3DModel", options, noise(4, 2, 4, 8, 8), timestep=TIMES, **TEXT)


def _wan() -> Case:
    options = {**_HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16}
    options |= {"ffn_dim": 32, "num_layers": 3, "rope_max_seq_len": 32}
    return _case("WanTransformer3DModel", options, noise(4, 4, 2, 8, 8), TIMES, **TEXT)


def _ltx_video() -> Case:
    options = {**_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "num_layers": 3}
    inputs = {"timestep": TIMES, "encoder_attention_mask": torch.ones(4, 6, dtype=torch.bool), **TEXT}
    sizes = {"num_frames": 2, "height": 4, "width": 4}
    return _case("LTXVideoTransformer3DModel", options | {"caption_channels": 16}, noise(4, 32, 4), **inputs, **sizes)


def _qwen_image() -> Case:
    options = {**_HEADS, "in_channels": 8, "out_channels": 2, "num_layers": 3, "joint_attention_dim": 16}
    options |= {"axes_dims_rope": (2, 2, 4)}
    inputs = {"timestep": TIMES / 1000, "encoder_hidden_states_mask": torch.ones(4, 6, dtype=torch.long), **TEXT}
    sizes = [[(1, 4, 4)] for _ in range(4)]
    return _case("QwenImageTransformer2DModel", options, noise(4, 16, 8), img_shapes=sizes, **inputs)


def _prior() -> Case:
    options = {**_HEADS, "num_layers": 3, "embedding_dim": 16, "num_embeddings": 6, "additional_embeddings": 4}
    return _case("PriorTransformer", options, noise(4, 16), TIMES, noise(4, 16, seed=3), **TEXT)


def _autoencoder(name: str = "AutoencoderKL", **options: Any) -> Case:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return _case(name, {**_GROUPS, **blocks, "block_out_channels": (8, 16), **options}, _image(3, 16))


def _autoencoder_tiny() -> Case:
    options = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    blocks = {"num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)}
    return _case("AutoencoderTiny", options | blocks, _image(3, 16))


MODELS: dict[str, Callable[[], Case]] = {
    "unet": _unet,
    "unet_scale_shift": lambda: _unet(resnet_time_scale_shift="scale_shift", downsample_type="resnet"),
    "unet_condition": _unet_condition,
    "unet_condition_linear": lambda: _unet_condition(use_linear_projection=True, transformer_layers_per_block=2),
    "unet_3d": _unet_3d,
    "unet_1d": _unet_1d,
    "control_net": _control_net,
    "dit": _dit,
    "pixart": _pixart,
    "flux": _flux,
    "flux_guidance": lambda: _flux(guidance_embeds=True),
    "chroma": _chroma,
    "sd3": _sd3,
    "sd3.5": lambda: _sd3(qk_norm="rms_norm", dual_attention_layers=(0, 1)),
    "aura_flow": _aura_flow,
    "sana": _sana,
    "lumina2": _lumina2,
    "cog_video_x": _cog_video_x,
    "wan": _wan,
    "ltx_video": _ltx_video,
    "qwen_image": _qwen_image,
    "prior": _prior,
    "autoencoder_kl": _autoencoder,
    "autoencoder_vq": lambda: _autoencoder("VQModel", num_vq_embeddings=12),
    "autoencoder_tiny": _autoencoder_tiny,
}
