"""Example: one microbatch with which a model is recorded before any data has come."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.auto.config import AutoPipelineConfig
from penstock.capture import Microbatch, split_batch
from penstock.errors import PlanError

_HINT = "build(model, loss_fn=..., args=(batch,)), with a batch like those of the training"


def example_of(
    config: AutoPipelineConfig, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], has_loss_fn: bool
) -> Microbatch:
    """The first microbatch of the batch that the user gives; else one of the tokens that the model has for trials.

    Steps may bring batches of other lengths and with other arguments: only the order of the layers is taken from it.
    """
    if not isinstance(args, list | tuple):
        raise PlanError("args is a tuple of what the model is called with", given=type(args).__name__, hint=_HINT)
    if not args and not kwargs:
        args, kwargs = (), _tokens(config, model, has_loss_fn)
    return split_batch(model.forward, args, kwargs, None, config.num_microbatches)[0]


def _tokens(config: AutoPipelineConfig, model: nn.Module, has_loss_fn: bool) -> dict[str, Tensor]:
    trial = getattr(model, "dummy_inputs", None)
    if not isinstance(trial, Mapping):
        raise PlanError("a model that is not of Hugging Face needs an example", model=type(model).__name__, hint=_HINT)
    device = next((parameter.device for parameter in model.parameters()), None)
    rows = config.pp_batch_size
    found = {name: value[:1].repeat(rows, *[1] * (value.dim() - 1)).to(device) for name, value in trial.items()}
    ids = found.get("input_ids")
    if not has_loss_fn and ids is not None and "labels" in inspect.signature(model.forward).parameters:
        found["labels"] = ids
    return found
