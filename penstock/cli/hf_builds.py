"""Builds of Hugging Face: a model made from its configuration alone, and the batch that is made up for it."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from penstock.cli.hf_batches import made_up
from penstock.cli.options import Example
from penstock.errors import FitError, PenstockError

CONFIG = "config.json"
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
"""by the kind of model, in the order of preference, what its labels are; empty where none are made up"""


def hf_build(name: str, example: Example) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model that a directory, a configuration file, a model type or a name in the local cache stands for.

    It has no weights unless they are asked for: it is made on the meta device, however large it is. No code comes from
    anywhere but the installed library, and nothing is downloaded.
    """
    config = _config(name)
    _hush()
    model_class, labels = _head(config)
    config.use_cache = False  # nothing is cached in training
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    model = _made(name, model_class, config, "meta")
    if example.weights:
        _check_memory(name, model)
        model = _made(name, model_class, config, "cpu")
    return model, (), made_up(model, labels, example)


def _hush() -> None:
    """Its remarks on configurations are of no use to whoever made none."""
    from transformers.utils import logging

    logging.set_verbosity_error()


def _made(name: str, model_class: Any, config: Any, device: str) -> Any:
    import torch

    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = model_class(config)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        hint = "a complete config.json of this type"
        raise PenstockError("no model can be made from the configuration", config=name, error=what, hint=hint) from None
    return model.to(getattr(config, "dtype", None) or torch.float32)


def _check_memory(name: str, model: Any) -> None:
    """Refuse weights that this machine cannot hold, each with its gradient."""
    import psutil

    from penstock.ir import bytes_text

    needed = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if needed > (free := psutil.virtual_memory().available):
        sizes = {"weights_and_gradients": bytes_text(needed), "free": bytes_text(free)}
        hint = "a config.json with fewer layers, or plan without --weights, which needs no memory"
        raise FitError("the weights do not fit in the memory of this machine", config=name, hint=hint, **sizes)


def _config(name: str) -> Any:
    path = Path(name)
    if not name:
        raise PenstockError("no model is named", given="hf:", hint="hf:llama, or hf:DIRECTORY with a config.json in it")
    if path.is_dir():
        if not (path / CONFIG).is_file():
            hint = "a directory that save_pretrained wrote, or a model type such as hf:llama"
            raise PenstockError(f"no {CONFIG} in the directory", directory=path, hint=hint)
        return _read(path / CONFIG)
    if path.is_file():
        return _read(path)
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise PenstockError("no such file or directory", given=name, hint=f"hf:DIRECTORY with a {CONFIG} in it")
    if name.lower() in (known := _known_types()):
        return known[name.lower()]()
    return _cached(name)


def _read(path: Path) -> Any:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise PenstockError("the configuration cannot be read", file=path, error=error) from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not kind:
        hint = 'a config.json with "model_type", as save_pretrained writes it'
        raise PenstockError("the configuration names no model type", file=path, hint=hint)
    if kind not in (known := _known_types()):
        hint = _nearest(kind, known) or "a newer transformers, or a FILE.py:FUNCTION that makes the model"
        if "auto_map" in fields:
            hint = "a FILE.py:FUNCTION that makes the model; code that comes with a configuration is not run"
        raise PenstockError("unknown model type", model_type=repr(kind), file=path, hint=hint)
    try:
        return known[kind].from_dict(fields)
    except Exception as error:  # whatever the library thinks of values that it did not expect
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PenstockError("the configuration does not fit its model type", file=path, error=what) from None


def _cached(name: str) -> Any:
    """The configuration of a model of the hub, if it was downloaded before."""
    from transformers.utils import cached_file

    try:
        found = cached_file(name, CONFIG, local_files_only=True)
    except (OSError, ValueError):
        found = None
    if found:
        return _read(Path(found))
    if "/" in name:
        hint = f"hf download {name} {CONFIG}, then this again; or hf:DIRECTORY with a {CONFIG} in it"
        raise PenstockError("not in the local cache, and nothing is downloaded here", name=repr(name), hint=hint)
    hint = _nearest(name, _known_types()) or "a type such as llama, or a directory with a config.json in it"
    raise PenstockError("unknown model type", name=repr(name), hint=hint)


def _known_types() -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        hint = 'pip install "penstock[hf]"'
        raise PenstockError("hf: models need transformers, which is not installed", hint=hint) from None
    return CONFIG_MAPPING


def _nearest(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.7)
    return f"did you mean {found[0]}?" if found else ""


def _head(config: Any) -> tuple[Any, str]:
    """The class that the configuration names, else the first kind of model that there is of its type; its labels."""
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
            found = table[type(config)]
            return (found[0] if isinstance(found, tuple) else found), HEADS[kind]
    kinds_text = "a causal, masked or sequence-to-sequence language model, or a classifier"
    hint = "a FILE.py:FUNCTION that makes the model and its batch"
    raise PenstockError(f"of this type there is no {kinds_text}", model_type=config.model_type, hint=hint)
