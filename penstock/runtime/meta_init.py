"""Meta-device models: allocates the parameters of one rank, and placeholders for those of other ranks.

A placeholder has the shape of a parameter and the memory of one element, which is NaN: the model can be recorded with
it, and a computation that uses it by mistake is noticed at once.

Non-persistent buffers are in no checkpoint, so the model's own initialisation code computes them. It runs twice over
different memory: a buffer that the code does not set, or sets at random, comes out different and is refused.
"""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from penstock.capture import is_inexact
from penstock.errors import RunError

Initialize = Callable[[nn.Module], object]


def is_meta(model: nn.Module) -> bool:
    """Whether the parameters are on the meta device; refused if only some parameters, or only buffers, are."""
    on_meta = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    elsewhere = [name for name, tensor in model.named_parameters() if not tensor.is_meta]
    if on_meta and elsewhere:
        raise RunError(
            "either all of the model or none of it must be on the meta device",
            on_meta=on_meta[0],
            elsewhere=elsewhere[0],
            hint='create the whole model under torch.device("meta"), or none of it',
        )
    return bool(on_meta)


def materialize(model: nn.Module, owned: Collection[str], device: torch.device) -> None:
    """Allocate the `owned` parameters and all buffers of a meta-device model; other parameters get placeholders.

    Weights and persistent buffers are zero until they are loaded; non-persistent buffers have their values.
    """
    _check_attributes(model)
    unsaved: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if missing := [name for name in _unsaved(module) if module._buffers[name].is_meta]:
            buffers = _compute_buffers(model, module, path, missing, device)
            unsaved |= {_join(path, name): buffer for name, buffer in buffers.items()}
    allocated: dict[int, Tensor] = {}  # by the id of the old tensor, so that tied parameters stay tied
    names = set(owned)
    owned_ids = {id(tensor) for name, tensor in named_tensors(model) if name in names}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in allocated:
                if id(parameter) in owned_ids:
                    tensor = _allocate(parameter, device)
                else:
                    fill = float("nan") if is_inexact(parameter) else 0
                    one = torch.full((1,) * max(parameter.dim(), 1), fill, dtype=parameter.dtype, device=device)
                    tensor = one.expand(parameter.shape)
                new = nn.Parameter(tensor, parameter.requires_grad)
                vars(new).update(vars(parameter))  # attributes that the user set on the parameter
                allocated[id(parameter)] = new
            module._parameters[name] = allocated[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in allocated:
                allocated[id(buffer)] = _allocate(buffer, device)
            module._buffers[name] = unsaved.get(_join(path, name), allocated[id(buffer)])


def unsaved_buffer_names(model: nn.Module) -> frozenset[str]:
    """Names of the non-persistent buffers."""
    return frozenset(_join(path, name) for path, module in model.named_modules() for name in _unsaved(module))


def _allocate(old: Tensor, device: torch.device) -> Tensor:
    return torch.zeros_like(old, device=device) if old.is_meta else old.to(device)


def _check_attributes(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise RunError(
                    "a tensor on the meta device must be a parameter or a buffer, or its values are unknown",
                    module=path or "the model",
                    name=name,
                    hint="register_buffer, or a model that is not on the meta device",
                )


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, tied ones under each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ------------------------------------------------------------------------------------------ non-persistent buffers


def _unsaved(module: nn.Module) -> list[str]:
    names = module._non_persistent_buffers_set
    return [name for name, buffer in module._buffers.items() if name in names and buffer is not None]


def _compute_buffers(
    model: nn.Module, module: nn.Module, path: str, names: list[str], device: torch.device
) -> dict[str, Tensor]:
    """The values of non-persistent buffers of one module, by the model's own initialisation."""
    buffers: dict[str, Tensor] = {}
    for initialize in _initializers(model, module, path):
        first, second = (_initialize_copy(initialize, module, device, seed) for seed in (1, 2))
        for name in names:
            buffer, other, expected = first.get(name), second.get(name), module._buffers[name]
            if name in buffers or buffer is None or other is None or buffer.is_meta or other.is_meta:
                continue
            has_same_spec = buffer.shape == expected.shape and buffer.dtype is expected.dtype
            if has_same_spec and torch.equal(buffer, other):
                buffers[name] = buffer
    unknown = [name for name in names if name not in buffers]
    if unknown:
        raise RunError(
            "the model's initialisation must set its non-persistent buffers, which no checkpoint has",
            module=path or "the model",
            buffers=", ".join(unknown),
            hint="give the module a reset_parameters method that sets them, register them as persistent, "
            "or give the Pipeline a model that is not on the meta device",
        )
    return buffers


def _initializers(model: nn.Module, module: nn.Module, path: str) -> Iterator[Initialize]:
    """Ways to initialise a module: `_init_weights` of a model around it (transformers), or `reset_parameters`."""
    words = path.split(".")
    ancestors = (model.get_submodule(".".join(words[:end])) for end in range(len(words), -1, -1))
    owner = next((outer for outer in ancestors if callable(getattr(outer, "_init_weights", None))), None)
    if owner is not None:
        yield owner._init_weights
    if callable(getattr(module, "reset_parameters", None)):
        yield lambda copy: copy.reset_parameters()


def _initialize_copy(
    initialize: Initialize, module: nn.Module, device: torch.device, seed: int
) -> dict[str, Tensor | None]:
    """The buffers after initialising a copy of the module whose memory is filled with `seed % 2`; {} on an error."""

    def fill(old: Tensor | None) -> Tensor | None:
        return None if old is None else torch.full_like(old, seed % 2, device=device)

    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    parameters = {name: fill(old) for name, old in module._parameters.items()}
    copy._parameters = {name: new if new is None else nn.Parameter(new, False) for name, new in parameters.items()}
    copy._buffers = {name: fill(old) for name, old in module._buffers.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            initialize(copy)
        except Exception:
            return {}
    return copy._buffers
