"""Builds a Hugging Face model from its configuration alone, and an example batch of the right shapes for it.

Only code of the installed library runs, and nothing is downloaded.
"""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from penstock.cli.options import Example
from penstock.errors import FitError, PenstockError

CONFIG = "config.json"
# Kinds of models in the order of preference, and the labels of each; "" where no labels are made.
HEADS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "SPEECH_SEQ_2_SEQ": "tokens",
    "MASKED_LM": "tokens",
    "CAUSAL_LM": "tokens",
    "IMAGE_CLASSIFICATION": "class",
    "SEQUENCE_CLASSIFICATION": "class",
    "TOKEN_CLASSIFICATION": "class of each token",
    "IMAGE_TEXT_TO_TEXT": "tokens",
    "CTC": "",
}
# Sizes where neither the user nor the configuration gives one: tokens, pixels per side, one second of sound.
_TOKENS, _PIXELS, _SOUND = 512, 224, 16000


def build_hf_model(name: str, example: Example) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Build the model named by a directory, a configuration file, a model type or a name in the local cache.

    It is built on the meta device, however large it is, unless `example.weights` asks for random weights.
    """
    config = _read_config(name)
    from transformers.utils import logging

    logging.set_verbosity_error()  # its warnings on the configuration are of no use here
    model_class, labels = _model_class(config)
    config.use_cache = False  # training uses no cache
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    model = _instantiate(name, model_class, config, "meta")
    if example.weights:
        # The weights must fit in the memory of this machine together with their gradients.
        import psutil

        from penstock.ir import bytes_text

        needed = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if needed > (free := psutil.virtual_memory().available):
            sizes = {"weights_and_gradients": bytes_text(needed), "free": bytes_text(free)}
            hint = "a config.json with fewer layers, or plan without --weights, which needs no memory"
            raise FitError("the weights do not fit in the memory of this machine", config=name, hint=hint, **sizes)
        model = _instantiate(name, model_class, config, "cpu")
    return model, (), _example_batch(model, labels, example)


def _instantiate(name: str, model_class: Any, config: Any, device: str) -> Any:
    """Construct the model with random weights of the configured dtype; `name` is for errors."""
    import torch

    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = model_class(config)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        hint = "a complete config.json of this type"
        raise PenstockError("cannot build a model from the configuration", config=name, error=text, hint=hint) from None
    return model.to(getattr(config, "dtype", None) or torch.float32)


# ------------------------------------------------------------------------------------------------- the configuration


def _read_config(name: str) -> Any:
    """The configuration that a name stands for: a directory, a file, a model type, or a model in the local cache."""
    path = Path(name)
    if not name:
        raise PenstockError("hf: needs a model name", got="hf:", hint="hf:llama, or hf:DIRECTORY with a config.json")
    if path.is_dir():
        if not (path / CONFIG).is_file():
            hint = "a directory written by save_pretrained, or a model type such as hf:llama"
            raise PenstockError(f"no {CONFIG} in the directory", directory=path, hint=hint)
        return _config_from_file(path / CONFIG)
    if path.is_file():
        return _config_from_file(path)
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise PenstockError("no such file or directory", path=name, hint=f"hf:DIRECTORY with a {CONFIG} in it")
    if name.lower() in (known := _known_types()):
        return known[name.lower()]()
    return _config_from_cache(name)


def _config_from_file(path: Path) -> Any:
    """The configuration of a config.json whose model type the installed library knows."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise PenstockError("cannot read the configuration", file=path, error=error) from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not kind:
        hint = 'a config.json with "model_type", as written by save_pretrained'
        raise PenstockError("the configuration has no model_type", file=path, hint=hint)
    if kind not in (known := _known_types()):
        hint = _nearest(kind, known) or "a newer transformers, or a FILE.py:FUNCTION that builds the model"
        if "auto_map" in fields:
            hint = "a FILE.py:FUNCTION that builds the model; code that comes with a configuration is not run"
        raise PenstockError("unknown model type", model_type=repr(kind), file=path, hint=hint)
    try:
        return known[kind].from_dict(fields)
    except Exception as error:  # the library raises anything for values it does not expect
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PenstockError("the configuration does not match its model type", file=path, error=text) from None


def _config_from_cache(name: str) -> Any:
    """The configuration of a model of the hub that was downloaded before."""
    from transformers.utils import cached_file

    try:
        path = cached_file(name, CONFIG, local_files_only=True)
    except (OSError, ValueError):
        path = None
    if path:
        return _config_from_file(Path(path))
    if "/" in name:
        hint = f"hf download {name} {CONFIG}, then this again; or hf:DIRECTORY with a {CONFIG} in it"
        raise PenstockError("not in the local cache, and penstock downloads nothing", name=repr(name), hint=hint)
    hint = _nearest(name, _known_types()) or "a type such as llama, or a directory with a config.json"
    raise PenstockError("unknown model type", name=repr(name), hint=hint)


def _known_types() -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        hint = 'pip install "penstock[hf]"'
        raise PenstockError("hf: models need transformers, which is not installed", hint=hint) from None
    return CONFIG_MAPPING


def _nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


def _model_class(config: Any) -> tuple[Any, str]:
    """The class named by the configuration, else the first kind in HEADS that exists for its type; and its labels."""
    import transformers
    from transformers.models.auto import modeling_auto

    tables = {kind: vars(modeling_auto)[f"MODEL_FOR_{kind}_MAPPING"] for kind in HEADS}
    named = (getattr(config, "architectures", None) or [""])[0]
    if named:
        model_class = vars(transformers).get(named) or getattr(transformers, named, None)
        if not isinstance(model_class, type):
            hint = "a newer transformers; code that comes with a model is not run"
            raise PenstockError("unknown architecture", architecture=repr(named), hint=hint)
        kinds = [kind for kind, table in tables.items() if table.get(type(config), None) is model_class]
        return model_class, HEADS[kinds[0]] if kinds else ""
    for kind, table in tables.items():
        if type(config) in table and not (kind == "MASKED_LM" and getattr(config, "is_decoder", False)):
            classes = table[type(config)]
            return (classes[0] if isinstance(classes, tuple) else classes), HEADS[kind]
    raise PenstockError(
        "no causal, masked or sequence-to-sequence language model and no classifier has this type",
        model_type=config.model_type,
        hint="a FILE.py:FUNCTION that builds the model and its batch",
    )


# ------------------------------------------------------------------------------------------------- the example batch


def _example_batch(model: Any, labels: str, example: Example) -> dict[str, Any]:
    """The arguments of the model by name, with labels so that it returns its loss."""
    config, batch = model.config, example.batch
    # The shape of each argument, and the limit of its integers; None for floating-point numbers.
    shapes: dict[str, tuple[tuple[int, ...], int | None]]
    main = model.main_input_name
    if main == "input_ids":
        shapes = {main: ((batch, _num_tokens(config, example)), config.get_text_config().vocab_size)}
    elif main == "pixel_values":
        size = getattr(config, "image_size", None) or _PIXELS
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        shapes = {main: ((batch, getattr(config, "num_channels", 3), *sides), None)}
    elif main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", _TOKENS)
        shapes = {main: ((batch, getattr(config, "num_mel_bins", 80), frames), None)}
    elif main == "input_values":
        shapes = {main: ((batch, _SOUND), None)}
    else:
        hint = "a FILE.py:FUNCTION that builds the model and its batch"
        raise PenstockError("no example batch is known for the inputs of this model", needs=main, hint=hint)
    if labels and "labels" in signature(model.forward).parameters:
        shapes["labels"] = _label_shape(labels, config, example)
    return {name: _random_tensor(shape, limit, str(model.device)) for name, (shape, limit) in shapes.items()}


def _num_tokens(config: Any, example: Example) -> int:
    """Tokens of a sample: as asked for, or the default, within the positions of the model."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if example.sequence is None:
        return min(_TOKENS, positions or _TOKENS)
    if positions and example.sequence > positions:
        hint = f"--sequence {positions}"
        problem = "--sequence must not exceed the model's positions"
        raise PenstockError(problem, got=example.sequence, positions=positions, hint=hint)
    return example.sequence


def _label_shape(kind: str, config: Any, example: Example) -> tuple[tuple[int, ...], int]:
    """The shape of labels of a kind in HEADS, and the number of classes or tokens that they are below."""
    if kind == "class":
        return (example.batch,), config.num_labels
    positions = getattr(config, "max_target_positions", None)
    length = _num_tokens(config, example)
    if positions:
        length = min(length, positions)
    limit = config.get_text_config().vocab_size if kind == "tokens" else config.num_labels
    return (example.batch, length), limit


def _random_tensor(shape: tuple[int, ...], limit: int | None, device: str) -> Any:
    """Random integers below the limit, or normally distributed numbers if there is none."""
    import torch

    if device == "meta":
        return torch.empty(shape, dtype=torch.float32 if limit is None else torch.int64, device=device)
    generator = torch.Generator().manual_seed(0)
    if limit is None:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, limit, shape, generator=generator)
