"""Finds the losses in the result of a model or loss function: a single loss, or losses by name, which are added up."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from penstock.capture import Recording
from penstock.errors import NoLossError
from penstock.ir import Container, Parts, Ref, Tree, flatten_one_level

SINGLE = ""
"""the name of a single loss, which has none of its own"""
_LOSS = "loss"
Spec = tuple[tuple[int, ...], bool]
"""the shape of a tensor, and whether it is floating-point"""


def losses_of(output: Any) -> dict[str, Tensor]:
    """The losses among the outputs of a model by name; raises a NoLossError if no output is a loss.

    A single loss is the scalar itself, the item named `loss`, the only floating-point scalar of a tuple or its first
    item. In each place there may also be a dict of floating-point scalars: the losses by name.
    """

    def spec_of(value: object) -> Spec | None:
        return (tuple(value.shape), value.is_floating_point()) if isinstance(value, Tensor) else None

    return _find_losses(output, flatten_one_level, spec_of)


def loss_values(recording: Recording) -> dict[str, str]:
    """The values of a recording that are losses, by the names of the losses; by the same rule as `losses_of`."""

    def parts_of(tree: Tree) -> Parts | None:
        return Parts(recording.live[tree.kind], tree.keys, tree.items) if isinstance(tree, Container) else None

    def spec_of(tree: Tree) -> Spec | None:
        spec = recording.graph.spec(tree.value) if isinstance(tree, Ref) else None
        return spec and (spec.shape, spec.is_floating_point)

    return {name: tree.value for name, tree in _find_losses(recording.record.outputs, parts_of, spec_of).items()}


def losses_of_function(result: Any) -> dict[str, Any]:
    """The losses in the result of a loss function by name. `checked_loss` of the runtime checks their types."""
    if not isinstance(result, Mapping) or not result or not all(isinstance(key, str) for key in result):
        return {SINGLE: result}
    return {SINGLE: result[_LOSS]} if _LOSS in result else dict(result)


def _find_losses(
    output: Any, parts_of: Callable[[Any], Parts | None], spec_of: Callable[[Any], Spec | None]
) -> dict[str, Any]:
    """The rule of `losses_of`, for a result or for the recorded structure of one.

    `parts_of` returns the items of a container, or None for a leaf, and `spec_of` the spec of a tensor, or None.
    """

    def is_number(value: Any) -> bool:
        return spec_of(value) == ((), True)

    def losses_in(value: Any) -> dict[str, Any]:
        """The scalar itself, or the items of a dict of floating-point scalars; else empty."""
        spec, parts = spec_of(value), parts_of(value)
        if spec is not None and spec[0] == ():
            return {SINGLE: value}
        if parts is None or not all(isinstance(key, str) for key in parts.keys) or not all(map(is_number, parts.items)):
            return {}
        return dict(zip(parts.keys, parts.items, strict=True))

    parts, possible = parts_of(output), [output]
    if parts is not None:
        named = [item for key, item in zip(parts.keys, parts.items, strict=True) if key == _LOSS]
        if named:
            possible = named
        elif parts.keys[:1] == (0,):
            # In a tuple the loss has no name. Items of a dict have one: a scalar among other items may be a part of the
            # loss, such as the router loss of a model that was given no labels.
            others = [item for item in parts.items if is_number(item) or (parts_of(item) and losses_in(item))]
            possible = [*(others if len(others) == 1 else ()), *parts.items[:1]]
    for value in possible:
        if losses := losses_in(value):
            return losses

    def shown(value: Any) -> str:
        parts, spec = parts_of(value), spec_of(value)
        if parts is None:
            return type(value).__name__ if spec is None else f"tensor{list(spec[0])}"
        pairs = zip(parts.keys[:4], map(shown, parts.items[:4]), strict=True)
        items = [text if isinstance(key, int) else f"{key}={text}" for key, text in pairs]
        return f"{parts.kind.__name__}({', '.join(items)}{', ...' if len(parts.items) > 4 else ''})"

    raise NoLossError(
        "the model returned no loss",
        returned=shown(output),
        hint="loss_fn=..., or give the model its labels so that it returns a loss: a scalar, the item named `loss`, "
        "the first or only scalar of a tuple, or a dict of scalars",
    )
