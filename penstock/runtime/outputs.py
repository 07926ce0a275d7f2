"""The outputs of the last stage, merged over the microbatches and sent to every rank.

Which dimension of an output is the batch does not follow from its shape: a sequence may be as long as a microbatch has
samples. It follows from a recording of two microbatches together: there a dimension of samples is as long as in both
microbatches together, and a dimension of positions or classes is as long as in each.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batches import Microbatch, additive_dim
from penstock.capture import LruCache, Recording, is_inexact
from penstock.errors import CaptureError, PenstockWarning, RunError
from penstock.ir import Container, Parts, Ref, Tree, flatten_one_level, leaves, named_leaves, unflatten_one_level
from penstock.loss import weighted_sum
from penstock.runtime.broadcast import broadcast_structure, check_structure
from penstock.runtime.loss_head import LossHead
from penstock.runtime.model_part import ModelPart
from penstock.runtime.step import Step
from penstock.runtime.sync import RankSync, SyncRequest

OutputDims = int | Mapping[str, int | str | None] | None
"""the batch dimension of every output, or a rule by the name of an output or of a part of it; see `merge`"""
OUTPUT_HINT = '{"logits": 1}, {"table": None}, {"scores": "mean"}, {"count": "sum"} or {"boxes": "list"}'
_WORDS = ("mean", "sum", "list")


def _plain(structure: Any) -> Any:
    """The same structure of lists, tuples and dicts; leaves that are neither tensors nor plain values become None."""
    parts = flatten_one_level(structure)
    if parts is None:
        is_known = isinstance(structure, Tensor) or structure is None or type(structure) in (bool, int, float, str)
        return structure if len(leaves(structure)) == 1 and is_known else None
    items = [_plain(item) for item in parts.items]
    if parts.kind in (list, tuple):
        return unflatten_one_level(parts.kind, parts.keys, items)
    return {str(key): item for key, item in zip(parts.keys, items, strict=True)}


def check_output_dims(output_dims: object) -> None:
    """Refuse anything but a dimension or a dict of rules."""
    if output_dims is None or type(output_dims) is int:
        return
    if not isinstance(output_dims, Mapping):
        raise RunError("output_dims must be a dimension or a dict by the names of outputs", got=repr(output_dims))
    for name, rule in output_dims.items():
        if not isinstance(name, str) or not (rule is None or type(rule) is int or rule in _WORDS):
            hint = OUTPUT_HINT
            raise RunError("a value of output_dims must be a rule", name=repr(name), got=repr(rule), hint=hint)


class OutputMerger:
    """Merges the outputs of the microbatches of a step into those of the batch."""

    def __init__(self, model_part: ModelPart, loss_head: LossHead, sync: RankSync, last_rank: int) -> None:
        self._model_part, self._captured, self._loss_head = model_part, model_part.captured, loss_head
        self._sync, self._last_rank = sync, last_rank
        self._joined: LruCache[tuple[Recording, ...], Any] = LruCache()
        """the shapes of the outputs of two microbatches together, by their recordings"""
        self._warned: set[str] = set()

    def merge(self, step: Step) -> Any:
        """Merge the outputs on the rank of the last stage, and return the result on every rank.

        On other ranks, containers of types that only the model defines become dicts. If outputs cannot be merged, all
        ranks of all pipelines raise the error.
        """
        groups, source = self._model_part.groups, self._last_rank
        if groups.is_local:
            return self._merge_local(step)
        request, output, sent = SyncRequest("the outputs of a step", step.number), None, None
        with self._sync.errors_on_all_ranks(request):
            if groups.rank == source:
                output = self._merge_local(step)
                sent = _plain(output)
                check_structure(sent)
        self._sync.exchange(request)
        received = broadcast_structure(groups, sent, source, self._model_part.device)
        return output if groups.rank == source else received

    def _merge_local(self, step: Step) -> Any:
        """Merge the outputs of a step in this process; warns about scalars that are averaged without a rule."""
        microbatches, recordings = step.microbatches, step.recordings
        outputs = [step.outputs[index] for index in range(len(microbatches))]
        weights, weights_by_value = self._loss_head.output_weights(step)

        def joined() -> Any:
            return self._joined.get_or_make(recordings[:2], lambda: self._record_joined(microbatches))

        sizes = [microbatch.size for microbatch in microbatches]
        names = self._captured.output_names(recordings[0])
        tensors = [name for name, leaf in named_leaves(outputs[0], "") if isinstance(leaf, Tensor)]
        pairs = zip(tensors, names, strict=False)
        losses = {name: weights_by_value[value] for name, value in pairs if value in weights_by_value}
        result = merge(outputs, sizes, weights, joined, step.output_dims, losses)
        if self._model_part.groups.pipeline == 0 and (averaged := result.averaged - self._warned):
            self._warned |= averaged
            text = ", ".join(sorted(averaged))
            message = (
                f"outputs that are one number for each microbatch are averaged with the weights of the loss: {text}; "
                'output_dims={"name": "mean", "sum" or "list"} chooses another way'
            )
            # Points at the user's call of step or eval.
            warnings.warn(message, PenstockWarning, stacklevel=6)
        return result.output

    def _record_joined(self, microbatches: Sequence[Microbatch]) -> Any:
        both = Microbatch.join(microbatches[:2])
        try:
            recording = self._captured.recording(both.args, both.kwargs)
        except CaptureError as error:
            raise RunError(
                "the batch dimensions of the outputs are unknown: two microbatches together cannot be recorded",
                reason=error.problem,
                hint=f"output_dims={OUTPUT_HINT}",
            ) from error

        def shapes(tree: Tree) -> Any:
            if isinstance(tree, Container):
                return Parts(recording.live[tree.kind], tree.keys, tuple(map(shapes, tree.items)))
            return recording.graph.spec(tree.value).shape if isinstance(tree, Ref) else None

        return shapes(recording.record.outputs)


class Merged(NamedTuple):
    """The output of a batch, and the names of the numbers in it that were averaged without a rule."""

    output: Any
    averaged: frozenset[str]


def merge(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    joined: Callable[[], Any] | None = None,
    output_dims: OutputDims = None,
    losses: Mapping[str, Sequence[float]] | None = None,
) -> Merged:
    """Merge the outputs of microbatches with these numbers of samples into the output of the batch.

    `joined` returns the structure of the output of the first two microbatches together, with Parts for containers and
    shapes for tensors. Tensors are concatenated along the one dimension whose lengths add up there, and so are
    lists whose lengths add up. Whatever has no such dimension must be equal in all microbatches.
    Real and complex scalars are summed with the weights (default: the shares of the samples), those in `losses` with
    their own. Without `joined` tensors are concatenated along their first dimension, and values that cannot be or are
    not equal become a list.

    `output_dims` overrides this for every output, or by name: a dimension; None for a value that is the same for all
    samples; "mean" (weighted by samples) or "sum" for numbers; "list" for a list with one value per microbatch.

    Raises a RunError that names an output which cannot be merged.
    """
    shares = [size / sum(sizes) for size in sizes]
    merging = _Merging(shares, weights or shares, joined, output_dims, losses or {})
    return Merged(merging.merged(list(outputs), "", ()), frozenset(merging.averaged))


_NO_RULE: Any = object()


@dataclass
class _Merging:
    """The options of one call of `merge`, and the names of the numbers that it averaged."""

    shares: Sequence[float]
    """of the samples of each microbatch"""
    weights: Sequence[float]
    joined: Callable[[], Any] | None
    dims: OutputDims
    losses: Mapping[str, Sequence[float]]
    averaged: set[str] = field(default_factory=set)

    def merged(self, values: list[Any], name: str, keys: tuple[Any, ...]) -> Any:
        """The merged value of this name; `keys` lead to it in the joined structure."""
        rule = self._rule(name)
        if len(values) == 1:
            return values[0]
        if rule == "list":
            return values
        taken = [flatten_one_level(value) for value in values]
        parts = [part for part in taken if part is not None]
        if len(parts) == len(values):
            return self._container(values, parts, name, keys, rule)
        if all(isinstance(value, Tensor) for value in values):
            return self._tensor(values, name, keys, rule)
        return self._equal(values, name)

    def _rule(self, name: str) -> Any:
        if self.dims is None or type(self.dims) is int:
            return _NO_RULE if self.dims is None else self.dims
        words = name.split(".")
        prefixes = (".".join(words[:end]) for end in range(len(words), 0, -1))
        return next((self.dims[prefix] for prefix in prefixes if prefix in self.dims), _NO_RULE)

    def _shape_of(self, keys: Sequence[Any]) -> Any:
        """The shape or container at some keys of the joined structure, or None."""
        structure = self.joined() if self.joined is not None else None
        for key in keys:
            if not isinstance(structure, Parts) or key not in structure.keys:
                return None
            structure = structure.items[structure.keys.index(key)]
        return structure

    def _container(self, values: list[Any], parts: list[Parts], name: str, keys: tuple[Any, ...], rule: Any) -> Any:
        first = parts[0]
        is_list = issubclass(first.kind, list | tuple) and not hasattr(first.kind, "_fields")
        # A rule for one of its items makes it a structure.
        has_rule = isinstance(self.dims, Mapping) and any(f".{key}".startswith(f".{name}") for key in self.dims)
        if is_list and rule is _NO_RULE and not has_rule and self.joined is not None:
            both = self._shape_of(keys)
            lengths = [len(part.items) for part in parts]
            if isinstance(both, Parts) and len(both.items) == lengths[0] + lengths[1] != 0:
                # One entry per sample.
                entries = [entry for part in parts for entry in part.items]
                return unflatten_one_level(first.kind, range(len(entries)), entries)
        if any(part.kind is not first.kind or part.keys != first.keys for part in parts) or first.kind is slice:
            return self._equal(values, name)
        columns = zip(first.keys, zip(*(part.items for part in parts), strict=True), strict=True)
        items = [self.merged(list(column), f"{name}.{key}".lstrip("."), (*keys, key)) for key, column in columns]
        return unflatten_one_level(first.kind, first.keys, items)

    def _tensor(self, tensors: list[Tensor], name: str, keys: tuple[Any, ...], rule: Any) -> Any:
        if rule in ("mean", "sum"):
            return weighted_sum(tensors, self.shares if rule == "mean" else [1.0] * len(tensors))
        if rule is None:
            return self._equal(tensors, name)
        if not any(tensor.dim() for tensor in tensors):
            return self._number(tensors, name)
        if _share_memory(tensors):
            # Passed whole to every microbatch.
            return tensors[0]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if type(rule) is int:
            dim: int | None = rule
        elif self.joined is None:
            # Concatenated even if the first dimension is not that of the samples: for another size of the batch its
            # length might equal theirs, and the type of the result must not depend on that.
            if len({shape[1:] for shape in shapes}) > 1:
                return tensors
            dim = 0
        else:
            whole = self._shape_of(keys)
            dim = additive_dim(whole, shapes[:2]) if isinstance(whole, tuple) else None
            if dim is None and (whole is None or any(shape != whole for shape in shapes[:2])):
                problem = "an output has no dimension along which microbatches can be concatenated"
                raise _merge_error(problem, name, tensors, of_both=whole)
        if dim is None:
            return self._equal(tensors, name)
        try:
            return torch.cat(tensors, dim)
        except (RuntimeError, IndexError):
            raise _merge_error("the outputs of microbatches cannot be concatenated", name, tensors, dim=dim) from None

    def _number(self, tensors: list[Tensor], name: str) -> Any:
        if not is_inexact(tensors[0]):
            return self._equal(tensors, name)
        if name not in self.losses and self.joined is not None and not _are_equal(tensors):
            self.averaged.add(name)
        return weighted_sum(tensors, self.losses.get(name, self.weights))

    def _equal(self, values: list[Any], name: str) -> Any:
        """The value that is the same in all microbatches."""
        if _are_equal(values):
            return values[0]
        if self.joined is None:
            return values
        raise _merge_error("an output without a batch dimension differs between microbatches", name, values)


def _merge_error(problem: str, name: str, outputs: Sequence[Any], **details: object) -> RunError:
    shown = [tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__ for output in outputs[:2]]
    rules = f"{{{name!r}: ...}}" if name else "..."
    return RunError(
        problem,
        output=name or "the output",
        of_microbatches=shown,
        **details,
        hint=f'output_dims={rules} with a dimension, "mean", "sum", or "list" for one value per microbatch',
    )


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(
        other.data_ptr() == first.data_ptr() and other.stride() == first.stride() and other.shape == first.shape
        for other in tensors
    )


def _are_equal(values: Sequence[Any]) -> bool:
    return all(_is_equal(value, values[0]) for value in values)


def _is_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            return torch.equal(first, second)
        return type(first) is type(second) and bool(first == second)
    except (ValueError, TypeError, RuntimeError):
        # The comparison of arrays is an array, which has no truth value.
        return False
