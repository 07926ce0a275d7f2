"""Made-up batches: what a Hugging Face model is called with, of the right shapes and with numbers in range."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from penstock.cli.options import Example
from penstock.errors import PenstockError

SEQUENCE, IMAGE, SAMPLES = 512, 224, 16000
"""tokens, pixels a side, and one second of sound, where neither the user nor the configuration says"""


def made_up(model: Any, labels: str, example: Example) -> dict[str, Any]:
    """The arguments of the model by name, labels among them so that it returns its loss."""
    makers: dict[str, Callable[[Any, Example], dict[str, Any]]] = {
        "input_ids": _tokens,
        "pixel_values": _images,
        "input_features": _spectra,
        "input_values": _sound,
    }
    main = model.main_input_name
    if main not in makers:
        hint = "a FILE.py:FUNCTION that makes the model and its batch"
        raise PenstockError("no batch can be made up for this model", needs=main, hint=hint)
    config, device = model.config, str(model.device)
    shapes = makers[main](config, example)
    if labels and "labels" in signature(model.forward).parameters:
        shapes["labels"] = _labels(labels, config, example)
    return {name: _tensor(shape, limit, device) for name, (shape, limit) in shapes.items()}


def length_of(config: Any, example: Example) -> int:
    """The tokens of a sample: those asked for, as far as the model has positions."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if example.sequence is None:
        return min(SEQUENCE, most or SEQUENCE)
    if most and example.sequence > most:
        hint = f"--sequence {most}"
        raise PenstockError("the model has fewer positions", sequence=example.sequence, positions=most, hint=hint)
    return example.sequence


def _tokens(config: Any, example: Example) -> dict[str, Any]:
    return {"input_ids": ((example.batch, length_of(config, example)), config.get_text_config().vocab_size)}


def _images(config: Any, example: Example) -> dict[str, Any]:
    size = getattr(config, "image_size", None) or IMAGE
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": ((example.batch, getattr(config, "num_channels", 3), *sides), None)}


def _spectra(config: Any, example: Example) -> dict[str, Any]:
    frames = 2 * getattr(config, "max_source_positions", SEQUENCE)
    return {"input_features": ((example.batch, getattr(config, "num_mel_bins", 80), frames), None)}


def _sound(config: Any, example: Example) -> dict[str, Any]:
    return {"input_values": ((example.batch, SAMPLES), None)}


def _labels(kind: str, config: Any, example: Example) -> tuple[tuple[int, ...], int]:
    if kind == "class":
        return (example.batch,), config.num_labels
    positions = getattr(config, "max_target_positions", None)
    length = min(length_of(config, example), positions or SEQUENCE) if positions else length_of(config, example)
    limit = config.get_text_config().vocab_size if kind == "tokens" else config.num_labels
    return (example.batch, length), limit


def _tensor(shape: tuple[int, ...], limit: int | None, device: str) -> Any:
    """Whole numbers below the limit, or any numbers if there is none."""
    import torch

    if device == "meta":
        return torch.empty(shape, dtype=torch.float32 if limit is None else torch.int64, device=device)
    generator = torch.Generator().manual_seed(0)
    if limit is None:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, limit, shape, generator=generator)
