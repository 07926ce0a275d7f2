"""Loss value: which of the things that a model returns is its loss."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.capture import Recording
from penstock.errors import RunError
from penstock.ir import Container, Ref, Tree, take_apart

_HINT = "loss_fn=..., or give the model its labels so that it returns a loss: a scalar, or first or named `loss`"


def loss_of(output: Any) -> Tensor:
    """The loss among the outputs of a model: the scalar itself, what is named `loss`, or the first of a tuple."""

    def parts_of(thing: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
        parts = take_apart(thing)
        return (parts.keys, parts.items) if parts else None

    found = _found(output, parts_of, lambda thing: isinstance(thing, Tensor) and not thing.dim())
    if found is None:
        raise RunError("the model returned no loss", returned=_shown(output), hint=_HINT)
    return found  # type: ignore[no-any-return]


def loss_name(recording: Recording) -> str:
    """The value of a record that is the loss, by the same rule."""
    graph = recording.graph

    def is_scalar(tree: Tree) -> bool:
        return isinstance(tree, Ref) and not graph.spec(tree.value).shape

    found = _found(recording.record.outputs, lambda tree: _tree_parts(tree), is_scalar)
    if not isinstance(found, Ref):
        returned = _shown_tree(recording, recording.record.outputs)
        raise RunError("the model returned no loss", returned=returned, hint=_HINT)
    return found.value


def _found(thing: Any, parts_of: Callable[[Any], Any], is_scalar: Callable[[Any], bool]) -> Any:
    if is_scalar(thing):
        return thing
    parts = parts_of(thing)
    if parts is None or not parts[1]:
        return None
    keys, items = parts
    named = [item for key, item in zip(keys, items, strict=True) if key == "loss"]
    is_sequence = keys[0] == 0
    candidates = named or (items[:1] if is_sequence else ())
    return next((item for item in candidates if is_scalar(item)), None)


def _tree_parts(tree: Tree) -> tuple[Sequence[Any], Sequence[Any]] | None:
    return (tree.keys, tree.items) if isinstance(tree, Container) else None


def _shown(thing: Any) -> str:
    parts = take_apart(thing)
    if parts is not None:
        return _listed(parts.kind.__name__, parts.keys, [_shown(item) for item in parts.items])
    return f"tensor{list(thing.shape)}" if isinstance(thing, Tensor) else type(thing).__name__


def _shown_tree(recording: Recording, tree: Tree) -> str:
    if isinstance(tree, Container):
        items = [_shown_tree(recording, item) for item in tree.items]
        return _listed(recording.live[tree.kind].__name__, tree.keys, items)
    return f"tensor{list(recording.graph.spec(tree.value).shape)}" if isinstance(tree, Ref) else type(tree).__name__


def _listed(kind: str, keys: Sequence[Any], items: Sequence[str]) -> str:
    shown = [item if isinstance(key, int) else f"{key}={item}" for key, item in zip(keys, items, strict=True)]
    return f"{kind}({', '.join(shown[:4])}{', ...' if len(shown) > 4 else ''})"
