"""Replaces the output layer of a model by one that is split along the vocabulary (`sharded_logits.py`).

`shard_vocabulary` returns the model with the split layer, `find_head` finds the layer. The parameters of the shards are
rows of the original ones and share their memory; `row_slices` maps the names.
"""

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from penstock.capture.granularity import Granularity
from penstock.capture.sharded_logits import CombineShards, ShardedLogits, VocabularyHead, VocabularyShard
from penstock.errors import CaptureError
from penstock.ir import Graph, leaves, map_leaves

_SHARDS = "shards"
"""the attribute of a VocabularyHead that has the shards"""


def shard_vocabulary(
    model: nn.Module, head: str, num_shards: int, loss_fn: Callable[[Any, Any], Any] | None = None
) -> nn.Module:
    """A model that shares all modules with this one, with its output layer `head` split into shards.

    With a `loss_fn` it is a model `with_loss`; else outputs that are logits become None.
    """
    layer = model.get_submodule(head)
    is_changed = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    if type(layer) is not nn.Linear or is_changed:
        raise CaptureError(
            "the output layer must be a plain nn.Linear without hooks to be split",
            module=head,
            got=type(layer).__name__,
            hint="vocabulary_shards=None",
        )
    if not 2 <= num_shards <= layer.out_features:
        raise CaptureError(
            "vocabulary_shards must be at least 2 and at most the size of the vocabulary",
            got=num_shards,
            vocabulary=layer.out_features,
        )
    named = list(model.named_parameters(remove_duplicate=False))
    own = f"{head}."
    names: dict[str, tuple[str, ...]] = {}
    for attribute in ("weight", "bias"):
        whole = getattr(layer, attribute)
        all_names = [name for name, parameter in named if parameter is whole]
        # Another name comes first: under it the parameter is still part of the split model.
        names[attribute] = tuple(sorted(all_names, key=lambda name: name.startswith(own)))
    split = parent = _shared_copy(model)
    *around, last = head.split(".")
    for word in around:
        parent._modules[word] = _shared_copy(parent._modules[word])
        parent = parent._modules[word]
    if "forward" in {*vars(split), *vars(parent)}:
        raise CaptureError(
            "an output layer can be split only if the forward of the model is that of its class",
            model=type(model).__name__,
            hint="vocabulary_shards=None, or a subclass with another forward",
        )
    parent._modules[last] = VocabularyHead(layer, num_shards, names)
    if loss_fn is not None:
        return with_loss(split, loss_fn)
    forward = split.forward

    def without_logits(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in leaves(output)):
            raise CaptureError(
                "a split output layer has no whole logits: the model must return a loss of them",
                module=head,
                hint="labels in the batch, loss_fn= and target= of penstock.plan, or vocabulary_shards=None",
            )
        return map_leaves(output, lambda leaf: None if isinstance(leaf, ShardedLogits) else leaf)

    without_logits.__signature__ = inspect.signature(forward)
    vars(split)["forward"] = without_logits
    return split


def with_loss(model: nn.Module, loss_fn: Callable[[Any, Any], Any]) -> nn.Module:
    """A model that shares all modules with this one, takes the `target` as well, and returns the loss."""
    copied = _shared_copy(model)
    forward, signature = copied.forward, inspect.signature(copied.forward)

    def loss(*args: Any, target: Any, **kwargs: Any) -> Any:
        return loss_fn(forward(*args, **kwargs), target)

    *others, last = [*signature.parameters.values(), inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY)]
    # **kwargs must be the last parameter.
    position = len(others) - any(each.kind is each.VAR_KEYWORD for each in others)
    loss.__signature__ = signature.replace(parameters=[*others[:position], last, *others[position:]])
    vars(copied)["forward"] = loss
    return copied


def _shared_copy(module: nn.Module) -> nn.Module:
    """A module with the state and children of another, of which single children can be replaced.

    Its mode is that of the other module, whichever of the two is set.
    """

    def get_mode(_: nn.Module) -> bool:
        return module.training

    def set_mode(_: nn.Module, mode: bool) -> None:
        module.training = mode

    kind = type(module)
    body = {"training": property(get_mode, set_mode), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    copied = object.__new__(types.new_class(kind.__name__, (kind,), exec_body=lambda names: names.update(body)))
    vars(copied).update(vars(module))
    copied._modules = dict(module._modules)
    return copied


@dataclass(frozen=True)
class RowSlice:
    """The rows of a parameter that a shard has."""

    whole: str
    """the name of the parameter in the unsplit model; of a tied one the name that other modules use"""
    start: int
    stop: int
    size: int
    """rows of the whole parameter"""
    names: tuple[str, ...]
    """all names that the parameter has in the unsplit model"""

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, whole: Tensor) -> Tensor:
        """These rows of the whole tensor, as a view."""
        return whole[self.start : self.stop]


def row_slices(model: nn.Module) -> dict[str, RowSlice]:
    """The parameters of a model that are rows of parameters of the unsplit model, by name."""
    slices: dict[str, RowSlice] = {}
    for path, head in model.named_modules():
        if not isinstance(head, VocabularyHead):
            continue
        for number, shard in enumerate(head.shards):
            for name, _ in shard.named_parameters():
                names = head.names[name]
                full = f"{path}.{_SHARDS}.{number}.{name}"
                slices[full] = RowSlice(names[0], shard.start, shard.stop, head.size, names)
    return slices


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the unsplit model whose rows the shards have, by the names that `row_slices` has for them."""
    heads = [module for module in model.modules() if isinstance(module, VocabularyHead)]
    pairs = ((head.names[name], whole) for head in heads for name, whole in head.whole[0].items())
    return {names[0]: whole for names, whole in pairs if whole is not None}


def sharded_granularity(model: nn.Module, granularity: Granularity) -> Granularity:
    """The granularity for a model whose output layer is split: shards are blocks, losses of their logits are not."""
    kinds = (VocabularyHead, nn.CrossEntropyLoss)
    opened = {name for name, module in model.named_modules() if isinstance(module, kinds)}
    blocks = (*granularity.basic_blocks, VocabularyShard, CombineShards)
    return replace(granularity, basic_blocks=blocks, opened=granularity.opened | opened)


def sharded_head(graph: Graph) -> tuple[str, int] | None:
    """The output layer that is split in a graph and the number of its shards; None if none is."""
    shards = [node.module for node in graph.nodes if node.is_block and node.kind == VocabularyShard.__name__]
    if not shards:
        return None
    head, num_shards = shards[0].rpartition(f".{_SHARDS}.")[0], len({*shards})
    if len(shards) != num_shards:
        # Calls of one shard may be on several ranks, which would all have its rows.
        raise CaptureError(
            "an output layer can be split only if one cross entropy is computed of its logits",
            module=head,
            found=len(shards) // num_shards,
            hint="vocabulary_shards=None, or one F.cross_entropy of all rows",
        )
    return head, num_shards


def unsharded_granularity(graph: Graph) -> Granularity:
    """The granularity with which the unsplit model of a graph is recorded."""
    found, granularity = sharded_head(graph), Granularity.of(graph)
    if found is None:
        return granularity
    head = found[0]
    blocks = [block for block in granularity.basic_blocks if not str(block).startswith(f"{head}.")]
    return replace(granularity, basic_blocks=blocks, opened=granularity.opened - {head})


def find_head(graph: Graph, roots: Sequence[str]) -> str:
    """The block that makes the logits: the one with weights between whose result and the roots there are no others.

    Roots are the loss, or the outputs that a loss function takes. The block is the output layer, or contains it and
    must be opened. Raises a CaptureError if there are several.
    """
    found = dict[str, None]()
    values, seen = list(roots), set[str]()
    while values:
        node = graph.makers.get(values.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        if node.is_block and node.parameters:
            found[node.module] = None
        else:
            values += node.reads
    if len(found) != 1:
        raise CaptureError(
            "an output layer can be split only if the loss is computed from its result alone",
            layers=", ".join(found) or "none",
            hint="vocabulary_shards=None",
        )
    return next(iter(found))
