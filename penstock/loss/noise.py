"""Noise in place of the results of a model's blocks, for some parts of a batch."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.batches import Microbatch
from penstock.capture import dtype_named, tensors_in
from penstock.ir import Call, Graph
from penstock.loss.interactions import InputComparison
from penstock.loss.probe import ProbeError
from penstock.loss.samples import SMALL_SCALE, Part


class Noise:
    """Random results of blocks for the parts of a batch, drawn again from the same seeds in every run, not kept."""

    def __init__(
        self,
        graph: Graph,
        microbatches: Sequence[Microbatch],
        recorded_size: int,
        parts: Sequence[Part],
        draw: int,
        device: torch.device,
    ) -> None:
        """`graph` is that of a microbatch of `recorded_size` samples. The noise differs in every `draw`."""
        self._graph, self._draw, self._device = graph, draw, device
        self._sizes, self._recorded_size = [part.length for part in parts], recorded_size
        self._parts = [microbatches[part.microbatch].take(part.start, part.length) for part in parts]
        self._sample_dims: dict[str, tuple[int | None, tuple[int, ...]]] = {}
        """by value the dimension that holds the samples, and how long it is for each part"""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """by value that a block was run to see: its shape for all parts together"""
        self._leaves: dict[tuple[int, str], weakref.ref[Tensor]] = {}
        """the noise of the current run by part, or -1 for noise that all parts share, and value"""
        self.unreplaced: set[str] = set()
        """blocks that run, because noise cannot replace the experts that a router chose, or packed sequences"""
        self.comparison = InputComparison(self._graph, self._sizes, self._recorded_size)

    def batch(self, chosen: Sequence[int]) -> Any:
        """The arguments of the model for some parts together. Called at the start of every run."""
        self._leaves.clear()
        self.comparison.start_run()
        joined = Microbatch.join([self._parts[number] for number in chosen])
        return joined.args, joined.kwargs

    def leaves(self) -> dict[tuple[int, str], Tensor]:
        """The noise of this run that is still in use, by part and value; without noise that no loss depends on."""
        live = {key: leaf() for key, leaf in self._leaves.items() if key[0] >= 0}
        return {key: leaf for key, leaf in live.items() if leaf is not None}

    def shared(self) -> dict[str, Tensor]:
        """The noise of blocks that do not depend on the samples, such as embeddings of positions."""
        live = {name: leaf() for (part, name), leaf in self._leaves.items() if part < 0}
        return {name: leaf for name, leaf in live.items() if leaf is not None}

    def is_ambiguous(self, values: Collection[str], changed: Mapping[int, int], unchanged: Collection[int]) -> bool:
        """Whether the lengths of a value's dimensions do not determine which of them holds the samples.

        Examples: a state of shape (directions, samples, features) with as many directions as samples, and embeddings of
        positions if a sequence is as long as the microbatch has samples. `changed` maps the lengths of dimensions in
        the recorded inputs of the block to the current lengths; the `unchanged` ones are as recorded.
        """
        unknown = [self._graph.spec(value).shape for value in values if value not in self._sample_dims]
        fitting = [[length for length in shape if length in changed] for shape in unknown]
        return any(len(lengths) > 1 or not {*lengths}.isdisjoint(unchanged) for lengths in fitting)

    def set_shapes(self, call: Call, result: Any) -> None:
        """Find the dimensions of samples from the result of a block for all parts together."""
        for name, tensor in zip(call.results.values, tensors_in(result), strict=False):
            if tensor.dim() == len(self._graph.spec(name).shape):
                self._shapes[name] = tuple(tensor.shape)

    def draw(self, value: str, changed: Mapping[int, int], chosen: Sequence[int]) -> Tensor:
        """The noise of a value for some parts together.

        `changed` maps the lengths of dimensions in the recorded inputs of the block to the current lengths.
        """
        shape = self._graph.spec(value).shape
        if value not in self._sample_dims:
            # The first run is for all parts together, more samples than were recorded: their dimension has grown.
            now = self._shapes.get(value) or tuple(changed.get(length, length) for length in shape)
            dim = next((index for index, length in enumerate(shape) if length != now[index]), None)
            total = 0 if dim is None else now[dim]
            if dim is not None and total * self._recorded_size != shape[dim] * sum(self._sizes):
                raise ProbeError("a block returns a tensor without a dimension of samples, as a packed sequence is")
            self._sample_dims[value] = dim, tuple(total // sum(self._sizes) * size for size in self._sizes)
        dim, lengths = self._sample_dims[value]
        if dim is None:
            return self._draw_leaf(value, -1, shape).clone()
        shapes = {number: (*shape[:dim], lengths[number], *shape[dim + 1 :]) for number in chosen}
        # Always a copy: the model may write into it.
        drawn = [self._draw_leaf(value, number, part_shape) for number, part_shape in shapes.items()]
        return torch.cat(drawn, dim).clone()

    def _draw_leaf(self, value: str, part: int, shape: tuple[int, ...]) -> Tensor:
        dtype = dtype_named(self._graph.spec(value).dtype)
        if not dtype.is_floating_point:
            raise ProbeError("a block returns integers")
        # The seed depends on draw, value and part only, so that every run of a draw has the same noise.
        seed = (self._draw * 10_000 + list(self._sample_dims).index(value)) * 100 + part + 1
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scale = SMALL_SCALE if (self._draw + part) % 2 else 1.0
        leaf = (noise * scale).to(self._device, dtype).requires_grad_()
        self._leaves[part, value] = weakref.ref(leaf)
        return leaf
