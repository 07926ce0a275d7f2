"""Exporting: the model of a checkpoint as a directory that from_pretrained loads."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.checkpoint import CONFIG, ModelNames, Stored, match
from penstock.errors import CheckpointError

_MOST = "config.json as from_pretrained reads it, or the directory that has it: --config PATH"


def export(stored: Stored, out: Path, config: Path | None = None) -> dict[str, Any]:
    """Write weights and configuration; the checkpoint is verified first. What was written, in figures."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError("there is something already where the model is to be written", path=out)
    values = _values(stored, config)
    stored.verify()
    model = _bare(values)
    names = ModelNames(frozenset(model.state_dict()), stored.manifest.tied)
    places = match(stored.reader.names, names)
    with torch.device("meta"):
        state, _ = stored.reader.read(places, _forms(stored, places))
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    return {"model": type(model).__name__, "tensors": len(stored.manifest.tensors)}


def _values(stored: Stored, config: Path | None) -> dict[str, Any]:
    if config is None and not stored.has(CONFIG):
        raise CheckpointError("the checkpoint has no configuration of a model of transformers", hint=_MOST)
    file = None if config is None else config / CONFIG if config.is_dir() else config
    try:
        found = json.loads(stored.text(CONFIG) if file is None else file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("the configuration cannot be read", file=file, reason=error, hint=_MOST) from None
    if not isinstance(found, dict) or "model_type" not in found:
        raise CheckpointError("this is no configuration of a model of transformers", file=file, hint=_MOST)
    return found


def _bare(values: dict[str, Any]) -> Any:
    """The model without numbers."""
    name = next(iter(values.get("architectures") or ()), "")
    kind = getattr(transformers, name, None) if name.isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            "the configuration names no model of transformers",
            architectures=values.get("architectures"),
            hint='"architectures": ["LlamaForCausalLM"] in config.json',
        )
    try:
        config = transformers.AutoConfig.for_model(**values)
        with torch.device("meta"):
            return kind(config)
    except Exception as error:
        raise CheckpointError("the model of this configuration cannot be made", model=name, reason=error) from None


def _forms(stored: Stored, places: dict[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """A tensor without numbers of the form that each has in the checkpoint."""
    from penstock.checkpoint import DTYPES

    forms = {name: (kind, shape) for name, (_, kind, shape) in stored.manifest.tensors.items()}
    return {name: torch.empty(forms[found[0]][1], dtype=DTYPES[forms[found[0]][0]]) for name, found in places.items()}
