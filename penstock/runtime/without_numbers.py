"""Without numbers: a model on the meta device gets memory, for one rank's part of it; the rest is stood in for.

A stand-in has the form of a parameter of another rank and the memory of one number, which is NaN: the model can be
recorded with it, and whoever computes with it sees at once that nothing is there.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.runtime.unsaved_buffers import made_anew

Make = Callable[[Tensor], Tensor]


def is_bare(model: nn.Module) -> bool:
    """Whether the parameters of a model have no numbers; refused if only some have, or if only buffers lack them."""
    on_meta = [name for name, tensor in _named(model) if tensor.is_meta]
    elsewhere = [name for name, tensor in model.named_parameters() if not tensor.is_meta]
    if on_meta and elsewhere:
        raise RunError(
            "some of the model is on the meta device, and some is not",
            on_meta=on_meta[0],
            elsewhere=elsewhere[0],
            hint='all of it made under torch.device("meta"), or none',
        )
    return bool(on_meta)


def furnish(model: nn.Module, own: Collection[str], device: torch.device) -> None:
    """Give a bare model memory: that of the names in `own` is to be filled, buffers that are not saved are right."""
    _check_plain_tensors(model)
    unsaved = made_anew(model, device)
    made: dict[int, Tensor] = {}
    names = set(own)
    mine = {id(tensor) for name, tensor in _named(model) if name in names}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                make = _memory if id(parameter) in mine else _stand_in
                module._parameters[name] = _once(parameter, made, lambda old, make=make: _parameter(old, make, device))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full = f"{path}.{name}" if path else name
                module._buffers[name] = unsaved.get(full, _once(buffer, made, lambda old: _memory(old, device)))


def _once(old: Tensor, made: dict[int, Tensor], make: Make) -> Tensor:
    """What is tied stays tied."""
    if id(old) not in made:
        made[id(old)] = make(old)
    return made[id(old)]


def _parameter(old: Tensor, make: Callable[[Tensor, torch.device], Tensor], device: torch.device) -> nn.Parameter:
    new = nn.Parameter(make(old, device), old.requires_grad)
    # What was noted on the parameter stays on it.
    vars(new).update(vars(old))
    return new


def _memory(old: Tensor, device: torch.device) -> Tensor:
    """Zeros until there are numbers; a buffer that has some keeps them."""
    return torch.zeros_like(old, device=device) if old.is_meta else old.to(device)


def _stand_in(old: Tensor, device: torch.device) -> Tensor:
    filler = float("nan") if old.is_floating_point() or old.is_complex() else 0
    return torch.full((1,) * max(old.dim(), 1), filler, dtype=old.dtype, device=device).expand(old.shape)


def _check_plain_tensors(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, thing in vars(module).items():
            if isinstance(thing, Tensor) and thing.is_meta:
                raise RunError(
                    "a tensor on the meta device is neither parameter nor buffer, so that nothing says its numbers",
                    module=path or "the model",
                    name=name,
                    hint="register_buffer, or a model that is not on the meta device",
                )


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
