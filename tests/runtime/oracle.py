"""Oracle: what plain PyTorch makes of the same batches, and how close a pipeline comes to it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import microbatch_sizes

Numbers = dict[str, Tensor | None]
Batch = tuple[Tensor, Tensor]
LossFn = Callable[[Any, Tensor], Tensor]
Train = Callable[[Tensor, Tensor], Tensor]

TOLERANCE = 1e-12
_FLOOR = 1e-3


def trained(train: Train, parameters: Iterable[nn.Parameter], batches: Sequence[Batch]) -> list[Tensor]:
    """The losses of some optimizer steps; the gradients of the last one are left in place."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        losses.append(train(x, target))
        optimizer.step()
    return losses


def whole(model: nn.Module, loss_fn: LossFn) -> Train:
    """A step of plain PyTorch on the whole batch."""

    def train(x: Tensor, target: Tensor) -> Tensor:
        loss = loss_fn(model(x), target)
        loss.backward()
        return loss.detach()

    return train


def loop(model: nn.Module, loss_fn: LossFn, microbatches: int) -> Train:
    """A step of plain PyTorch over microbatches in order, each weighted by its samples."""

    def train(x: Tensor, target: Tensor) -> Tensor:
        sizes = microbatch_sizes(len(x), microbatches)
        total = torch.zeros((), dtype=torch.float64)
        for part, wanted in zip(x.split(sizes), target.split(sizes), strict=True):
            loss = loss_fn(model(part), wanted)
            loss.backward(loss.new_tensor(len(part) / len(x)))
            total += loss.detach() * (len(part) / len(x))
        return total

    return train


def numbers(model: Any, losses: Sequence[Tensor] = ()) -> Numbers:
    """All numbers of a model, or of what a pipeline holds, by name."""
    found: Numbers = {f"loss {step}": loss for step, loss in enumerate(losses)}
    for name, parameter in model.named_parameters():
        found[f"gradient {name}"] = parameter.grad
    return found | {f"state {name}": value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float = TOLERANCE
) -> None:
    """The same names, None where None is expected, and each tensor equal up to rounding, that of float64."""
    scale = max((float(value.abs().max()) for value in expected.values() if value is not None), default=0.0)
    wrong = {name: how for name, value in expected.items() if (how := _apart(found.get(name), value, tolerance, scale))}
    assert found.keys() == expected.keys()
    assert not wrong


def assert_parts_equal(parts: Sequence[Numbers], model: nn.Module, tolerance: float = TOLERANCE) -> None:
    """What the ranks hold is together all that the model holds; of a tied parameter each has one name or another."""
    expected = numbers(model) | {
        f"gradient {name}": parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    found = {name: value for part in parts for name, value in part.items()}
    assert found.keys() >= numbers(model).keys()
    for part in parts:
        assert_equal(part, {name: expected[name] for name in part}, tolerance)


def _apart(found: Tensor | None, expected: Tensor | None, tolerance: float, scale: float) -> str:
    if found is None or expected is None:
        return "" if found is expected else f"{found} instead of {expected}"
    if found.shape != expected.shape:
        return f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
    apart = float((found - expected).abs().max()) if found.numel() else 0.0
    return "" if apart <= tolerance * max(float(expected.abs().max()), _FLOOR * scale) else f"{apart} apart"


def assert_identical(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    """The same names and every bit the same."""
    wrong = [name for name, value in expected.items() if not _is_same(found.get(name), value)]
    assert found.keys() == expected.keys()
    assert not wrong


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
