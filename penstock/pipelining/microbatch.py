"""Chunk specs: how the arguments of a step are split into microbatches, and how their outputs are merged."""

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.batches import microbatch_sizes, split_tensor
from penstock.capture import register_containers
from penstock.errors import RunError
from penstock.ir import flatten_one_level, unflatten_one_level

DEFAULT_CHUNK_DIM = 0


class TensorChunkSpec:
    """Split a tensor along a dimension, or merge the tensors of the microbatches along it.

    Args:
        split_dim: the dimension
    """

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> tuple[Any, ...]:
        """Specs of positional arguments from their dimensions: `(0, 0, 1)`."""
        return _specs(chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> dict[str, Any]:
        """Specs of keyword arguments from their dimensions: `{"ids": 0, "mask": 1}`."""
        return _specs(chunk_dims)


class _Replicate:
    """Give the argument whole to every microbatch; the class itself may be given in place of an instance."""


class _CustomReducer:
    """Merge outputs by `reduce_fn(merged, output)`, starting with `init_value`."""

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value, self.reduce_fn = init_value, reduce_fn


class _LossReducer(_CustomReducer):
    """A reducer of losses."""


sum_reducer = _LossReducer(torch.tensor(0.0), operator.add)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split arguments into microbatches. Without specs tensors are split along dimension 0, the rest is replicated."""
    kwargs = kwargs or {}
    register_containers((args, kwargs))
    for name, given, specs in (("args", args, args_chunk_spec), ("kwargs", kwargs, kwargs_chunk_spec)):
        if specs is not None and len(specs) != len(given):
            raise RunError(
                f"{name}_chunk_spec must have one entry for each of the {name}",
                entries=len(specs),
                arguments=len(given),
            )
    args_specs = [None] * len(args) if args_chunk_spec is None else list(args_chunk_spec)
    columns = [
        split_value(value, spec, chunks, f"argument {position}")
        for position, (value, spec) in enumerate(zip(args, args_specs, strict=True))
    ]
    named = {}
    for name, value in kwargs.items():
        if kwargs_chunk_spec is not None and name not in kwargs_chunk_spec:
            raise RunError("kwargs_chunk_spec must have an entry for every keyword argument", missing=repr(name))
        named[name] = split_value(value, None if kwargs_chunk_spec is None else kwargs_chunk_spec[name], chunks, name)
    return (
        [tuple(column[index] for column in columns) for index in range(chunks)],
        [{name: column[index] for name, column in named.items()} for index in range(chunks)],
    )


def split_value(value: Any, spec: Any, chunks: int, name: str) -> list[Any]:
    """Split one argument. `spec` is a chunk spec, or specs in the structure of the argument; None: the default."""
    if isinstance(spec, _Replicate) or spec is _Replicate:
        return [value] * chunks
    if _is_block_mask(value):
        return _split_block_mask(value, spec, chunks, name)
    if isinstance(value, Tensor) and (spec is None or isinstance(spec, TensorChunkSpec)):
        return list(_split_tensor(value, DEFAULT_CHUNK_DIM if spec is None else spec.split_dim, chunks, name))
    parts = flatten_one_level(value)
    if parts is None or isinstance(spec, TensorChunkSpec):
        if spec is None:
            return [value] * chunks
        raise RunError(
            "a chunk spec must fit its argument",
            argument=name,
            spec=repr(spec),
            value=type(value).__name__,
            hint="TensorChunkSpec(dim) for a tensor, _Replicate for anything else, or a structure of them",
        )
    inner = None if spec is None else flatten_one_level(spec)
    if inner is not None and tuple(inner.keys) != tuple(parts.keys):
        raise RunError("a chunk spec must have the structure of its argument", argument=name, keys=list(parts.keys))
    specs = [None] * len(parts.items) if inner is None else inner.items
    columns = [
        split_value(item, item_spec, chunks, f"{name}.{key}")
        for key, item, item_spec in zip(parts.keys, parts.items, specs, strict=True)
    ]
    return [
        unflatten_one_level(parts.kind, parts.keys, [column[index] for column in columns]) for index in range(chunks)
    ]


def _split_tensor(tensor: Tensor, dim: int, chunks: int, name: str) -> Sequence[Tensor]:
    """Split a tensor into parts equal to within one row; `name` is that of the argument, for errors."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise RunError(
            "a tensor must have the dimension that it is split along",
            argument=name,
            shape=tuple(tensor.shape),
            dim=dim,
            hint="_Replicate in its chunk spec gives it whole to every microbatch",
        )
    if tensor.shape[dim] < chunks:
        raise RunError(
            "a tensor must have at least one sample for each microbatch",
            argument=name,
            samples=tensor.shape[dim],
            microbatches=chunks,
            hint=f"n_microbatches={tensor.shape[dim]}, or _Replicate in the chunk spec of the argument",
        )
    return split_tensor(tensor, microbatch_sizes(tensor.shape[dim], chunks), dim)


def _is_block_mask(value: Any) -> bool:
    # A mask exists only after its module was imported, which is slow.
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def _split_block_mask(mask: Any, spec: Any, chunks: int, name: str) -> list[Any]:
    """Split a mask of flex attention by samples; a mask for all samples, with a batch dimension of 1, is replicated."""
    if spec is not None and not (isinstance(spec, TensorChunkSpec) and spec.split_dim == 0):
        hint = "TensorChunkSpec(0), or _Replicate for a mask for all samples"
        raise RunError("a BlockMask must be split along dimension 0", argument=name, spec=repr(spec), hint=hint)
    if len(mask.kv_num_blocks) == 1:
        return [mask] * chunks
    if getattr(mask, "dq_write_order", None) is not None or getattr(mask, "dq_kv_order", None) is not None:
        hint = "a mask without dq_write_order"
        raise RunError("a BlockMask with an order of writes cannot be split by samples", argument=name, hint=hint)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    columns = [
        [None] * chunks if tensor is None else _split_tensor(tensor, 0, chunks, name)
        for tensor in (getattr(mask, each) for each in names)
    ]
    parts, first = [], 0
    for tensors in zip(*columns, strict=True):
        # The function of the mask is called with numbers of samples in the microbatch, and takes those in the batch.
        mask_mod = partial(_with_offset, mask.mask_mod, first)
        part = type(mask).from_kv_blocks(
            *tensors,
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=mask.seq_lengths,
            compute_q_blocks=mask.q_indices is not None,
        )
        parts.append(part)
        first += len(tensors[0])
    return parts


def _with_offset(mask_mod: Callable[..., Any], first: int, sample: Any, head: Any, query: Any, key: Any) -> Any:
    return mask_mod(sample + first, head, query, key)


def num_samples(value: Any, spec: Any) -> int | None:
    """The number of samples, read from the first tensor that is split; None if no tensor is split."""
    if isinstance(spec, _Replicate) or spec is _Replicate:
        return None
    if _is_block_mask(value):
        return len(value.kv_num_blocks) if len(value.kv_num_blocks) > 1 else None
    if isinstance(value, Tensor):
        return value.shape[DEFAULT_CHUNK_DIM if spec is None else spec.split_dim]
    parts, inner = flatten_one_level(value), None if spec is None else flatten_one_level(spec)
    if parts is None:
        return None
    specs = [None] * len(parts.items) if inner is None else inner.items
    found = (num_samples(item, item_spec) for item, item_spec in zip(parts.items, specs, strict=True))
    return next((number for number in found if number is not None), None)


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any) -> Any:
    """Merge the outputs of the microbatches. Without a spec tensors are concatenated along dimension 0."""
    register_containers(tuple(chunks))
    return _merge(chunks, chunk_spec, "output")


def _merge(chunks: Sequence[Any], spec: Any, name: str) -> Any:
    """Merge one output, or the entries of a container by their own specs."""
    first = chunks[0]
    if isinstance(spec, _CustomReducer):
        merged = spec.init_value
        for chunk in chunks:
            merged = spec.reduce_fn(merged, chunk)
        return merged
    if isinstance(first, Tensor) and (spec is None or isinstance(spec, TensorChunkSpec)):
        dim = DEFAULT_CHUNK_DIM if spec is None else spec.split_dim
        if not -first.dim() <= dim < first.dim():
            raise RunError(
                "an output must have the dimension that it is merged along",
                output=name,
                shape=tuple(first.shape),
                dim=dim,
                hint="output_merge_spec with a _CustomReducer for a number, or return_outputs=False",
            )
        return torch.cat(list(chunks), dim)
    parts = flatten_one_level(first)
    if parts is None or isinstance(spec, _Replicate) or spec is _Replicate:
        if not all(_is_equal(chunk, first) for chunk in chunks):
            hint = "output_merge_spec with a TensorChunkSpec or a _CustomReducer, or return_outputs=False"
            raise RunError("an output that is not merged must be equal for all microbatches", output=name, hint=hint)
        return first
    inner = None if spec is None else flatten_one_level(spec)
    if spec is not None and (inner is None or len(inner.items) != len(parts.items)):
        raise RunError("output_merge_spec must have the structure of the output", output=name, spec=repr(spec))
    specs = [None] * len(parts.items) if inner is None else inner.items
    rows = [flatten_one_level(chunk) for chunk in chunks]
    if any(row is None or len(row.items) != len(parts.items) for row in rows):
        raise RunError("the outputs of all microbatches must have the same structure", output=name)
    columns = zip(*(row.items for row in rows if row is not None), strict=True)
    items = [
        _merge(column, item_spec, f"{name}.{key}")
        for key, column, item_spec in zip(parts.keys, columns, specs, strict=True)
    ]
    return unflatten_one_level(parts.kind, parts.keys, items)


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return bool(value == other)


def _specs(dims: Any) -> Any:
    if isinstance(dims, Mapping):
        return {name: _specs(dim) for name, dim in dims.items()}
    return tuple(map(_specs, dims)) if isinstance(dims, list | tuple) else TensorChunkSpec(dims)
