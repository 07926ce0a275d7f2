"""Unsaved buffers: those that no checkpoint holds, computed by the model's own code and by nothing else.

The code is run twice over different content. A buffer that it leaves alone, or fills at random, comes out different,
and is refused: a number that nobody knows is never made up.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from penstock.errors import RunError

Make = Callable[[nn.Module], object]
_SEEDS = (1, 2)


def unsaved_names(model: nn.Module) -> frozenset[str]:
    """The buffers of a model that do not belong into a checkpoint."""
    return frozenset(
        f"{path}.{name}" if path else name for path, module in model.named_modules() for name in _unsaved(module)
    )


def made_anew(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The numbers of all buffers of a bare model that are not saved, by name."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if names := _lost(module):
            made = _made(model, module, path, device)
            found |= {f"{path}.{name}" if path else name: made[name] for name in names}
    return found


def _unsaved(module: nn.Module) -> list[str]:
    names = module._non_persistent_buffers_set
    return [name for name, buffer in module._buffers.items() if name in names and buffer is not None]


def _lost(module: nn.Module) -> list[str]:
    """Those without numbers."""
    return [name for name in _unsaved(module) if module._buffers[name].is_meta]  # type: ignore[union-attr]


def _made(model: nn.Module, module: nn.Module, path: str, device: torch.device) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for make in _makers(model, module, path):
        first, second = (_run(make, module, device, seed) for seed in _SEEDS)
        for name in _lost(module):
            one, other = first.get(name), second.get(name)
            if name not in found and one is not None and _is_known(one, other, module._buffers[name]):
                found[name] = one
    unsure = [name for name in _lost(module) if name not in found]
    if unsure:
        raise _unknown(path, unsure)
    return found


def _makers(model: nn.Module, module: nn.Module, path: str) -> Iterator[Make]:
    """How a module is initialised: by the model around it, as in transformers, or by itself, as in torch."""
    words = path.split(".")
    around = (model.get_submodule(".".join(words[:end])) for end in range(len(words), -1, -1))
    owner = next((one for one in around if callable(getattr(one, "_init_weights", None))), None)
    if owner is not None:
        yield owner._init_weights  # type: ignore[misc]
    if callable(getattr(module, "reset_parameters", None)):
        yield lambda double: double.reset_parameters()  # type: ignore[operator]


def _run(make: Make, module: nn.Module, device: torch.device, seed: int) -> dict[str, Tensor | None]:
    """The buffers that a maker leaves behind; none if it cannot be run."""
    double = _double(module, device, seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            make(double)
        except Exception:
            return {}
    return double._buffers


def _double(module: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """The same module with memory of its own, filled with numbers that mean nothing."""
    double = object.__new__(type(module))
    vars(double).update(vars(module))
    parameters = {name: _filled(old, device, seed) for name, old in module._parameters.items()}
    double._parameters = {name: new if new is None else nn.Parameter(new, False) for name, new in parameters.items()}
    double._buffers = {name: _filled(old, device, seed) for name, old in module._buffers.items()}
    return double


def _filled(old: Tensor | None, device: torch.device, seed: int) -> Tensor | None:
    return None if old is None else torch.full_like(old, seed % 2, device=device)


def _is_known(one: Tensor, other: Tensor | None, old: Tensor | None) -> bool:
    """Whether both runs made the same tensor, of the form that the model had for it."""
    if other is None or old is None or one.is_meta or other.is_meta:
        return False
    return one.shape == old.shape and one.dtype is old.dtype and torch.equal(one, other)


def _unknown(path: str, names: list[str]) -> RunError:
    return RunError(
        "buffers that no checkpoint holds cannot be computed by the model's own initialisation",
        module=path or "the model",
        buffers=", ".join(names),
        hint="give the module a reset_parameters method that sets them, register them as persistent, "
        "or give the Pipeline a model that is not on the meta device",
    )
