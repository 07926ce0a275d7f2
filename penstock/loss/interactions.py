"""Finds samples that interact inside a model: then the results for a sample depend on those beside it."""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.capture import ROUNDING, Recording
from penstock.ir import Graph, Ref, Tree, listed


def interaction_warnings(model: nn.Module, recording: Recording, mixed_inputs: Sequence[str]) -> tuple[str, ...]:
    """Warnings about samples that interact: inside blocks, and before the blocks that `mixed_inputs` names.

    Those inside blocks are found by the types of modules, because probes do not run blocks.
    """
    blocks = tuple(f"{node.module}." for node in recording.graph.nodes if node.is_block)

    def modules_in_blocks(matches: Callable[[nn.Module], bool]) -> str:
        parts = model.named_modules()
        return listed([name for name, part in parts if matches(part) and f"{name}.".startswith(blocks)])

    norms = modules_in_blocks(
        lambda part: isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    )
    embeddings = modules_in_blocks(
        lambda part: isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.scale_grad_by_freq
    )
    warnings = []
    if norms:
        warnings.append(f"batch norm takes its statistics from each microbatch instead of the whole batch: {norms}")
    if embeddings:
        problem = "scale_grad_by_freq counts the words of each microbatch instead of the whole batch"
        warnings.append(f"{problem}: {embeddings}")
    if mixed_inputs:
        problem = "a value depends on all samples of a batch, of which a microbatch has only some"
        warnings.append(f"{problem}: {listed(mixed_inputs)}")
    return tuple(warnings)


class InputComparison:
    """Compares the inputs of blocks for all parts of a batch together with those for each part alone."""

    def __init__(self, graph: Graph, sizes: Sequence[int], recorded_size: int) -> None:
        """`sizes` are the numbers of samples of the parts, `recorded_size` is that of the recorded microbatch."""
        self._graph, self._sizes, self._recorded_size = graph, sizes, recorded_size
        self._num_calls: Counter[str] = Counter()
        """the calls of every block so far in the current run"""
        self._norms: dict[tuple[str, int, int], tuple[int | None, Tensor]] = {}
        """by block, call and argument: the dimension of samples and the norm of each sample, for all parts together"""
        self.mixed_inputs: dict[str, None] = {}
        """the blocks whose inputs depend on other samples too"""

    def start_run(self) -> None:
        """Begin a run of the model, the first one with all parts together."""
        self._num_calls.clear()

    def compare(self, name: str, values: Sequence[tuple[Tree, object]], chosen: Sequence[int]) -> None:
        """Add a block to `mixed_inputs` if its input activations for one part differ from those for all parts together.

        `values` pairs its recorded inputs with the current ones.
        """
        call = self._num_calls[name]
        self._num_calls[name] += 1
        for index, (tree, leaf) in enumerate(values):
            if not isinstance(tree, Ref) or not isinstance(leaf, Tensor) or not leaf.requires_grad:
                continue
            key, shape = (name, call, index), self._graph.spec(tree.value).shape
            if len(chosen) > 1:
                # The run for all parts together: keep the norm of each sample, not the activations.
                lengths = enumerate(zip(shape, leaf.shape, strict=False))
                dim = next((dim for dim, (recorded, now) in lengths if recorded != now), None)
                if dim is None or leaf.shape[dim] * self._recorded_size == shape[dim] * sum(self._sizes):
                    self._norms[key] = dim, _norms(leaf, dim)
            elif key in self._norms:
                dim, whole = self._norms[key]
                # Rows for each sample: several after `flatten(0, 1)`.
                rows = len(whole) // sum(self._sizes)
                start = rows * sum(self._sizes[: chosen[0]])
                expected = whole if dim is None else whole[start : start + rows * self._sizes[chosen[0]]]
                norms = _norms(leaf, dim)
                limit = ROUNDING[leaf.dtype] * float(whole.max())
                if expected.shape != norms.shape or float((expected - norms).abs().max()) > limit:
                    self.mixed_inputs[name] = None


def _norms(leaf: Tensor, dim: int | None) -> Tensor:
    """The norm of each row along a dimension, in float64; of the whole tensor if `dim` is None."""
    content = leaf.detach().abs().double()
    rows = content.reshape(1, -1) if dim is None else content.movedim(dim, 0).reshape(content.shape[dim], -1)
    return rows.square().sum(1).sqrt().cpu()
