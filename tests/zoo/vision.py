"""Vision: image models and CLIP from transformers configs."""

import torch
import transformers as hf

from tests.zoo.batch import VOCABULARY, WIDTH, Example, noise, padded, ready, scrambled, tokens


def vit() -> Example:
    """ViT with a class per image."""
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=4,
        num_labels=3,
    )
    return _classifier(hf.ViTForImageClassification(config), 16)


def swin() -> Example:
    """Swin: shifted windows, four resolutions, paths dropped at random."""
    torch.manual_seed(0)
    config = hf.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2, 2],
        num_heads=[2, 2, 4],
        window_size=4,
        num_labels=3,
        drop_path_rate=0.2,
    )
    return _classifier(hf.SwinForImageClassification(config), 32)


def convnext() -> Example:
    """ConvNext: depthwise convolutions, permuted layouts, paths dropped at random."""
    torch.manual_seed(0)
    config = hf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_labels=3, drop_path_rate=0.2)
    return _classifier(hf.ConvNextForImageClassification(config), 64)


def segformer() -> Example:
    """SegFormer: the head reads the values of all four stages of the encoder."""
    torch.manual_seed(0)
    config = hf.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 32],
        num_attention_heads=[1, 2, 2, 4],
        sr_ratios=[4, 2, 2, 1],
        decoder_hidden_size=16,
        num_labels=3,
    )
    model = scrambled(hf.SegformerForSemanticSegmentation(config))
    return ready(model, pixel_values=noise(2, 3, 64, 64), labels=tokens(rows=2, length=64 * 64).reshape(2, 64, 64) % 3)


def clip() -> Example:
    """CLIP: two towers that meet in a contrastive loss."""
    torch.manual_seed(0)
    tower = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    config = hf.CLIPConfig(
        text_config={**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**tower, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    model = scrambled(hf.CLIPModel(config))
    ids = tokens(rows=3)
    ids[torch.arange(3), torch.tensor([11, 9, 7])] = 2
    return ready(model, input_ids=ids, attention_mask=padded(3), pixel_values=noise(3, 3, 16, 16), return_loss=True)


def _classifier(model: torch.nn.Module, size: int) -> Example:
    return ready(scrambled(model), pixel_values=noise(2, 3, size, size), labels=torch.tensor([0, 2]))
