"""Writes the model of a checkpoint as a directory for from_pretrained."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.checkpoint import CONFIG, DTYPES, LOSS_STATE, CheckpointReader, ModelNames, match_names
from penstock.errors import CheckpointError

_CONFIG_HINT = "a config.json for from_pretrained, or its directory: --config PATH"


def export(checkpoint: CheckpointReader, out: Path, config: Path | None = None) -> dict[str, Any]:
    """Verify the checkpoint and write weights and configuration; returns the model class and number of tensors."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError("the output directory must be empty", path=out)
    values = _read_config(checkpoint, config)
    checkpoint.verify()
    model = _meta_model(values)
    model_names = ModelNames(frozenset(model.state_dict()), checkpoint.manifest.tied, ignored=(LOSS_STATE,))
    sources = match_names(checkpoint.tensors.names, model_names)
    records = {name: checkpoint.manifest.tensors[names[0]] for name, names in sources.items()}
    # `read` compares the files with these, in which the dtypes are those of the checkpoint, not of the new model.
    wanted = {
        name: torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta") for name, record in records.items()
    }
    state, _ = checkpoint.tensors.read(sources, wanted)
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    return {"model": type(model).__name__, "tensors": len(checkpoint.manifest.tensors)}


def _read_config(checkpoint: CheckpointReader, config: Path | None) -> dict[str, Any]:
    """The fields of a config.json: of the given one, or of that in the checkpoint."""
    if config is None and CONFIG not in checkpoint.manifest.files:
        raise CheckpointError("the checkpoint has no configuration of a transformers model", hint=_CONFIG_HINT)
    file = None if config is None else config / CONFIG if config.is_dir() else config
    try:
        values = json.loads(checkpoint.content(CONFIG) if file is None else file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("cannot read the configuration", file=file, reason=error, hint=_CONFIG_HINT) from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise CheckpointError("not the configuration of a transformers model", file=file, hint=_CONFIG_HINT)
    return values


def _meta_model(values: dict[str, Any]) -> Any:
    """The model on the meta device."""
    name = next(iter(values.get("architectures") or ()), "")
    kind = getattr(transformers, name, None) if name.isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            "the configuration names no transformers model",
            architectures=values.get("architectures"),
            hint='"architectures": ["LlamaForCausalLM"] in config.json',
        )
    try:
        config = transformers.AutoConfig.for_model(**values)
        with torch.device("meta"):
            return kind(config)
    except Exception as error:
        raise CheckpointError("cannot build the model of this configuration", model=name, reason=error) from None
