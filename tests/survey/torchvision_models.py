"""Models of torchvision: classification, segmentation, and the backbones of detectors."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.survey.cases import Case, cross_entropy, squares
from tests.zoo.batch import noise, scrambled

PACKAGES = ("torchvision",)
_CLASSES = 5


def _models() -> Any:
    import torchvision.models as models

    return models


def _classify(model: nn.Module, size: int = 32) -> Case:
    labels = torch.tensor([0, 1, 2, 3])
    return Case(model.train(), (noise(4, 3, size, size),), loss_fn=cross_entropy, target=labels)


def _named(name: str, size: int = 32, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        torch.manual_seed(0)
        return _classify(getattr(_models(), name)(num_classes=_CLASSES, **options), size)

    return build


def _resnet(**options: Any) -> nn.Module:
    models = _models()
    torch.manual_seed(0)
    return models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=_CLASSES, width_per_group=4, **options)


def _segment(head: str) -> Case:
    from torchvision.models import segmentation
    from torchvision.models._utils import IntermediateLayerGetter

    torch.manual_seed(0)
    features = _models().mobilenet_v2(width_mult=0.25).features
    body = IntermediateLayerGetter(features, return_layers={"17": "out", "13": "aux"})
    auxiliary = segmentation.fcn.FCNHead(24, _CLASSES)
    if head == "fcn":
        model = segmentation.FCN(body, segmentation.fcn.FCNHead(80, _CLASSES), auxiliary)
    else:
        model = segmentation.DeepLabV3(body, segmentation.deeplabv3.DeepLabHead(80, _CLASSES, (2, 4, 6)), auxiliary)
    labels = torch.arange(4 * 64 * 64).view(4, 64, 64) % _CLASSES
    return Case(model.train(), (noise(4, 3, 64, 64),), loss_fn=cross_entropy, target=labels)


def _backbone(trained_layers: int) -> Case:
    """A ResNet whose first layers are frozen, under a feature pyramid, as in Faster R-CNN and RetinaNet."""
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops import misc

    torch.manual_seed(0)
    body = _resnet(norm_layer=misc.FrozenBatchNorm2d)
    kept = [f"layer{number}" for number in range(5 - trained_layers, 5)]
    for name, parameter in body.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(kept)))
    layers = {f"layer{number}": str(number - 1) for number in range(1, 5)}
    channels = [256, 512, 1024, 2048]
    model = BackboneWithFPN(body, layers, channels, 16)
    return Case(model.train(), (noise(4, 3, 64, 64),), loss_fn=squares)


def _pyramid() -> Case:
    from torchvision.ops import FeaturePyramidNetwork

    torch.manual_seed(0)
    features = OrderedDict((str(level), noise(4, 8 * 2**level, 16 // 2**level, 16 // 2**level)) for level in range(3))
    return Case(FeaturePyramidNetwork([8, 16, 32], 8).train(), (features,), loss_fn=squares)


def _retina_head() -> Case:
    from torchvision.models.detection.retinanet import RetinaNetClassificationHead, RetinaNetRegressionHead

    class Heads(nn.Module):
        """Both heads on two levels of features."""

        def __init__(self) -> None:
            super().__init__()
            self.classes = RetinaNetClassificationHead(8, 3, _CLASSES)
            self.boxes = RetinaNetRegressionHead(8, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Logits and offsets of all anchors."""
            features = [x, nn.functional.max_pool2d(x, 2)]
            return self.classes(features), self.boxes(features)

    torch.manual_seed(0)
    return Case(Heads().train(), (noise(4, 8, 8, 8),), loss_fn=squares)


def _rpn_head() -> Case:
    from torchvision.models.detection.rpn import RPNHead

    torch.manual_seed(0)
    model = scrambled(RPNHead(8, 3, conv_depth=3)).train()
    return Case(model, ([noise(4, 8, 8, 8), noise(4, 8, 4, 4)],), loss_fn=squares)


def _swin(version: int) -> Case:
    swin = _models().swin_transformer
    torch.manual_seed(0)
    v2 = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if version == 2 else {}
    make = partial(swin.SwinTransformer, [2, 2], 8, [1, 2], [2, 4], [4, 4], num_classes=_CLASSES)
    return _classify(make(stochastic_depth_prob=0.0, **v2))


def _vit() -> Case:
    torch.manual_seed(0)
    model = _models().VisionTransformer(
        image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=_CLASSES
    )
    nn.init.normal_(model.heads.head.weight)  # its weights are zero at first, and so would be all other gradients
    return _classify(model)


def _convnext() -> Case:
    convnext = _models().convnext
    torch.manual_seed(0)
    setting = [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 1)]
    return _classify(convnext.ConvNeXt(setting, stochastic_depth_prob=0.1, num_classes=_CLASSES))


def _densenet() -> Case:
    torch.manual_seed(0)
    return _classify(_models().DenseNet(4, (2, 2, 2), 8, num_classes=_CLASSES))


def _densenet_checkpointed() -> Case:
    torch.manual_seed(0)
    return _classify(_models().DenseNet(4, (2, 2, 2), 8, num_classes=_CLASSES, memory_efficient=True))


MODELS: dict[str, Callable[[], Case]] = {
    "resnet": lambda: _classify(_resnet()),
    "resnet_group_norm": lambda: _classify(_resnet(norm_layer=lambda channels: nn.GroupNorm(4, channels))),
    "squeezenet": _named("squeezenet1_1"),
    "shufflenet_v2": _named("shufflenet_v2_x0_5"),
    "mobilenet_v2": _named("mobilenet_v2", width_mult=0.25),
    "mnasnet": _named("mnasnet0_5"),
    "densenet": _densenet,
    "densenet_checkpointed": _densenet_checkpointed,
    "convnext": _convnext,
    "vit": _vit,
    "swin": lambda: _swin(1),
    "swin_v2": lambda: _swin(2),
    "fcn": lambda: _segment("fcn"),
    "deeplab_v3": lambda: _segment("deeplab"),
    "backbone_with_fpn": lambda: _backbone(4),
    "backbone_with_fpn_frozen": lambda: _backbone(2),
    "feature_pyramid": _pyramid,
    "retinanet_heads": _retina_head,
    "rpn_head": _rpn_head,
}
