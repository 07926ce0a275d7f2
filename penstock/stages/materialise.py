"""Materialise: gives a stage of a model without weights its own memory and numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.stages.stage import Stage


def materialise(stage: Stage, state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> Stage:
    """Put a stage that is on the meta device onto a real one, with the numbers of `state` by their original names.

    Of tied parameters any name will do. Buffers that are not saved are made anew by the model's own initialisation.
    """
    found = {name: _number(stage, name, state) for name in stage.state_dict()}
    lost = [path for path, module in stage.named_modules() if _has_lost_buffers(module)]
    for path in lost:
        # Before anything is changed: a refusal leaves the stage as it was.
        _check_maker(stage, path)
    stage.to_empty(device=device)
    for path in lost:
        _make_anew(stage, path, device)
    stage.load_state_dict(found)
    return stage


def _number(stage: Stage, name: str, state: Mapping[str, Tensor]) -> Tensor:
    names = next((group for group in stage.tied_names if name in group), (name,))
    known = [state[other] for other in (name, *names) if other in state]
    if not known:
        raise PartitionError("numbers are missing for a stage", stage=stage.stage_index, name=name, tied_to=names)
    return known[0]


def _has_lost_buffers(module: nn.Module) -> bool:
    kept_out = module._non_persistent_buffers_set
    return any(name in kept_out and buffer is not None and buffer.is_meta for name, buffer in module._buffers.items())


def _check_maker(stage: Stage, path: str) -> None:
    owner = stage.whole_model.get_submodule(path)
    makers = (getattr(owner, "reset_parameters", None), getattr(stage.whole_model, "_init_weights", None))
    if not any(map(callable, makers)):
        raise PartitionError(
            "buffers that are not saved cannot be made anew",
            module=path,
            buffers=sorted(owner._non_persistent_buffers_set),
            hint="give the module a reset_parameters method, or register the buffers as persistent",
        )


def _make_anew(stage: Stage, path: str, device: torch.device | str) -> None:
    """Let the model initialise one of its modules, and take over its buffers."""
    owner = stage.whole_model.get_submodule(path)
    owner.to_empty(device=device, recurse=False)
    if callable(reset := getattr(owner, "reset_parameters", None)):
        reset()
    else:
        stage.whole_model._init_weights(owner)  # type: ignore[operator]
    for name, buffer in owner._buffers.items():
        if name in stage.get_submodule(path)._buffers:
            stage.get_submodule(path)._buffers[name] = buffer
