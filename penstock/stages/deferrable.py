"""Deferrable: the functions of torch whose weight gradients can be put off."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.stages.deferral import PutOff
from penstock.stages.deferred_convolutions import Plain, Transposed, convolution
from penstock.stages.deferred_embedding import embedding
from penstock.stages.deferred_groups import grouped_mm
from penstock.stages.deferred_products import addmm, linear, matmul

DEFERRABLE: dict[Any, PutOff] = {
    functional.linear: linear,
    functional.embedding: embedding,
    **dict.fromkeys((torch.addmm, Tensor.addmm), addmm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), matmul),
    **{call: convolution(call, Plain) for call in (torch.conv1d, torch.conv2d, torch.conv3d)},
    **{
        call: convolution(call, Transposed)
        for call in (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    },
    # What torch's public function of this name calls, where there is one: only told by it, never called.
    **({torch._grouped_mm: grouped_mm} if hasattr(torch, "_grouped_mm") else {}),
}
