"""Models of timm: image classifiers of every family, with few channels and layers."""

from collections.abc import Callable
from typing import Any

import torch

from tests.survey.cases import Case, cross_entropy
from tests.zoo.batch import noise

PACKAGES = ("timm", "torchvision")


def _case(architecture: str, size: int, options: dict[str, Any]) -> Case:
    """A classifier; those that do not take the size of their images take any."""
    import timm

    torch.manual_seed(0)
    try:
        model = timm.create_model(architecture, num_classes=5, img_size=size, **options)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        model = timm.create_model(architecture, num_classes=5, **options)
    labels = torch.tensor([0, 1, 2, 3])
    return Case(model.train(), (noise(4, 3, size, size),), loss_fn=cross_entropy, target=labels)


def _mixer(kind: str) -> Case:
    from timm.layers import GatedMlp
    from timm.models import mlp_mixer

    torch.manual_seed(0)
    blocks = {
        "mixer": {},
        "resmlp": {"block_layer": mlp_mixer.ResBlock, "mlp_ratio": 4},
        "gmlp": {"block_layer": mlp_mixer.SpatialGatingBlock, "mlp_ratio": 4, "mlp_layer": GatedMlp},
    }
    model = mlp_mixer.MlpMixer(num_classes=5, img_size=32, patch_size=8, num_blocks=4, embed_dim=32, **blocks[kind])
    return Case(model.train(), (noise(4, 3, 32, 32),), loss_fn=cross_entropy, target=torch.tensor([0, 1, 2, 3]))


# Architecture, size of the images, options. Those named test_ are made by timm for tests.
_CLASSIFIERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resnet": ("test_resnet", 32, {}),
    "byobnet": ("test_byobnet", 32, {}),
    "convnext": ("test_convnext", 32, {}),
    "convnext_conv_mlp": ("test_convnext3", 32, {}),
    "efficientnet": ("test_efficientnet", 32, {}),
    "efficientnet_evos": ("test_efficientnet_evos", 32, {}),
    "efficientnet_group_norm": ("test_efficientnet_gn", 32, {}),
    "efficientnet_layer_norm": ("test_efficientnet_ln", 32, {}),
    "mambaout": ("test_mambaout", 32, {}),
    "nfnet": ("test_nfnet", 32, {}),
    "vit": ("test_vit", 32, {}),
    "vit_pooled": ("test_vit2", 32, {}),
    "vit_average": ("test_vit3", 32, {}),
    "beit": ("beit_base_patch16_224", 32, {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}),
    "dinov3": ("vit_small_patch16_dinov3", 32, {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}),
    "naflexvit": ("naflexvit_base_patch16_gap", 32, {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}),
    "eva02": ("eva02_tiny_patch14_224", 28, {"patch_size": 7, "embed_dim": 24, "depth": 4, "num_heads": 2}),
    "deit_distilled": (
        "deit_tiny_distilled_patch16_224", 32, {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4},
    ),
    "cait": ("cait_xxs24_224", 32, {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}),
    "xcit": ("xcit_nano_12_p16_224", 32, {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}),
    "tnt": (
        "tnt_s_legacy_patch16_224", 32,
        {"patch_size": 8, "embed_dim": 32, "inner_dim": 8, "depth": 3, "num_heads_outer": 2, "num_heads_inner": 2},
    ),
    "convit": (
        "convit_tiny", 32, {"patch_size": 8, "embed_dim": 16, "depth": 4, "local_up_to_layer": 2, "num_heads": 2},
    ),
    "sam_vit": (
        "samvit_base_patch16", 32,
        {"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "global_attn_indexes": (1,), "window_size": 2},
    ),
    "pit": (
        "pit_ti_224", 32,
        {"patch_size": 4, "stride": 4, "base_dims": (8, 8, 8), "depth": (1, 2, 1), "heads": (2, 2, 4)},
    ),
    "levit": ("levit_128s", 64, {"embed_dim": (16, 24, 32), "key_dim": 8, "num_heads": (2, 2, 2), "depth": (1, 2, 1)}),
    "twins_svt": (
        "twins_svt_small", 64, {"embed_dims": (8, 16, 32, 32), "num_heads": (2, 2, 4, 4), "depths": (1, 1, 2, 1)},
    ),
    "twins_pcpvt": (
        "twins_pcpvt_small", 32, {"embed_dims": (8, 16, 32, 32), "num_heads": (1, 2, 4, 4), "depths": (1, 1, 2, 1)},
    ),
    "pvt_v2": ("pvt_v2_b0", 32, {"embed_dims": (8, 16, 32, 32), "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 4)}),
    "coatnet": ("coatnet_0_224", 64, {"embed_dim": (8, 16, 32, 32), "depths": (1, 1, 2, 1), "stem_width": 8}),
    "davit": (
        "davit_tiny", 32,
        {"embed_dims": (8, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 4, 4), "window_size": 2},
    ),
    "swin": (
        "swin_tiny_patch4_window7_224", 32,
        {"patch_size": 2, "embed_dim": 8, "depths": (2, 2, 1), "num_heads": (2, 2, 4), "window_size": 4},
    ),
    "swin_v2": (
        "swinv2_tiny_window8_256", 32,
        {"patch_size": 2, "embed_dim": 8, "depths": (2, 2, 1), "num_heads": (2, 2, 4), "window_size": 4},
    ),
    "swin_v2_cr": (
        "swinv2_cr_tiny_224", 32,
        {"patch_size": 2, "embed_dim": 8, "depths": (2, 2, 1), "num_heads": (2, 2, 4), "window_size": 4},
    ),
    "efficientformer_v2": ("efficientformerv2_s0", 64, {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 2, 2)}),
    "edgenext": ("edgenext_xx_small", 32, {"dims": (8, 16, 32, 32), "depths": (1, 1, 2, 1)}),
    "mobilevit": ("mobilevit_xxs", 32, {}),
    "mobilenet_v2": ("mobilenetv2_035", 32, {}),
    "mobilenet_v3": ("tf_mobilenetv3_small_minimal_100", 32, {}),
    "mobilenet_v4": ("mobilenetv4_conv_small_035", 32, {}),
    "ghostnet": ("ghostnet_050", 32, {}),
    "densenet": ("densenet121", 32, {"growth_rate": 4, "block_config": (2, 2, 2, 2)}),
    "dla": ("dla46_c", 32, {}),
    "seresnet": ("seresnet18", 32, {"channels": (8, 8, 16, 16)}),
    "tresnet": ("tresnet_m", 64, {"layers": (1, 1, 1, 1), "width_factor": 0.2}),
    "rexnet": ("rexnetr_100", 32, {"width_mult": 0.2}),
    "hiera": ("hiera_tiny_224", 64, {"embed_dim": 16, "stages": (1, 1, 2, 1)}),
    "visformer": ("visformer_tiny", 64, {"init_channels": 8, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2}),
    "sequencer": (
        "sequencer2d_s", 32, {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16), "hidden_sizes": (4, 8, 8, 8)},
    ),
    "tiny_vit": (
        "tiny_vit_5m_224", 64, {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)},
    ),
    "repvit": ("repvit_m0_9", 32, {"embed_dim": (8, 16, 24, 32), "depth": (1, 1, 2, 1)}),
    "starnet": ("starnet_s050", 32, {}),
    "fasternet": ("fasternet_t0", 32, {"embed_dim": 8}),
    "inception_next": ("inception_next_atto", 32, {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 1)}),
    "shvit": (
        "shvit_s1", 64, {"embed_dim": (16, 32, 32), "depth": (1, 2, 1), "partial_dim": (8, 8, 8), "qk_dim": (4, 4, 4)},
    ),
    "swiftformer": ("swiftformer_xs", 64, {"layers": (1, 1, 2, 1), "embed_dims": (8, 16, 24, 32)}),
}  # fmt: skip

MODELS: dict[str, Callable[[], Case]] = {
    **{name: (lambda given=given: _case(*given)) for name, given in _CLASSIFIERS.items()},
    **{name: (lambda name=name: _mixer(name)) for name in ("mixer", "resmlp", "gmlp")},
}
