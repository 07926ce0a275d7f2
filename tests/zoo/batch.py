"""Batch: small inputs with a fixed seed, and which arguments of a model are its labels."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 96
WIDTH = 32
LAYERS = 5

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Builder = Callable[[], Example]

_LABELS = frozenset({"labels", "start_positions", "end_positions", "return_loss"})


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of its own, so that a batch does not depend on what was built before it."""
    return torch.Generator().manual_seed(seed)


def tokens(rows: int = 2, length: int = 12, seed: int = 0, below: int = VOCABULARY) -> Tensor:
    """Token ids; 0 to 3 are left out, as models take them for padding and other marks."""
    return torch.randint(4, below, (rows, length), generator=seeded(seed))


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=seeded(seed))


def padded(rows: int = 2, length: int = 12) -> Tensor:
    """A mask whose rows end earlier and earlier."""
    ends = length - 2 * torch.arange(rows).unsqueeze(1)
    return (torch.arange(length).unsqueeze(0) < ends).long()


def without_labels(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a plain forward; a decoder that makes its tokens from the labels is given them itself."""
    plain = {name: value for name, value in kwargs.items() if name not in _LABELS}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        plain["decoder_input_ids"] = kwargs["labels"]
    return plain


def has_labels(kwargs: Mapping[str, Any]) -> bool:
    """Whether the first output of the model is a loss."""
    return any(name in _LABELS for name in kwargs)


def ready(model: nn.Module, *args: Any, **kwargs: Any) -> Example:
    """An example in training mode."""
    return model.train(), args, kwargs


def scrambled(model: nn.Module, seed: int = 7) -> nn.Module:
    """The model with every parameter moved a little, so that none has a gradient of zero by its initial value."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.05)
    return model
