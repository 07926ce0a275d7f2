"""Compares the batches of ranks that must be given the same one: those of a pipeline, and tensor-parallel ranks.

Ranks exchange checksums, of all tensors every `check_inputs_every` steps and of samples of them in between.
"""

import json
from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.batches import TARGET, Batch
from penstock.errors import RunError
from penstock.ir import named_leaves, signature_of
from penstock.runtime.agreement import BATCH_INTERVAL, checksum, describe_batch, different_batches
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.sync import RankSync, SyncRequest, SyncVote


class BatchComparison:
    """The checksums of the batches of one Engine."""

    def __init__(self, forward: Callable[..., Any], every: int) -> None:
        """`every`: `check_inputs_every` of `RunOptions`."""
        self._parameter_names, self._every = list(signature_of(forward).parameters), every

    def checksum(self, batch: Batch, request: SyncRequest) -> tuple[int, dict[str, Any]]:
        """A checksum of the batch, or of a sample of it, and its tensors and plain values by name.

        Returns 0 and an empty dict in steps in which batches are not compared: comparing every second step finds ranks
        whose data differ at half the cost. By name, as an argument may be passed by position on some ranks only.
        """
        every, step = self._every, request.step
        if not every or (step % BATCH_INTERVAL and step % every and request.name == "step"):
            return 0, {}
        args, kwargs, target = batch
        names = self._parameter_names if len(args) <= len(self._parameter_names) else map(str, range(len(args)))
        leaves: dict[str, Any] = {}
        for name, value in (*zip(names, args, strict=False), *kwargs.items(), (TARGET, target)):
            if isinstance(value, Tensor):
                leaves[name] = value
            else:
                leaves.update(named_leaves(value, name))
        return checksum(leaves, step if step % every else None), leaves

    def target_checksum(self, batch: Batch, request: SyncRequest) -> int:
        """A checksum of the target, or of some of its entries; 0 without a target, or if batches are not compared."""
        if batch.target is None or not self._every:
            return 0
        sampled_step = request.step if request.step % self._every else None
        return checksum(dict(named_leaves(batch.target, TARGET)), sampled_step)

    def compare_tensor_ranks(self, batch: Batch, request: SyncRequest, sync: RankSync, groups: ProcessGroups) -> None:
        """Raise an error, on every rank, if the tensor-parallel pipelines of a replica were given different batches.

        Called before the model is recorded: its blocks communicate, so all of these pipelines must record together.
        """
        comparison = SyncRequest(f"the batch of {request.name}", request.step)
        with sync.errors_on_all_ranks(comparison):
            batch_checksum, leaves = self.checksum(batch, request)
            if not batch_checksum:
                # Shapes are compared in any case: blocks of these ranks exchange tensors.
                leaves = {
                    name: f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, Tensor) else leaf
                    for name, leaf in named_leaves(tuple(batch), "batch")
                }
                batch_checksum = checksum(leaves)
        result = sync.exchange(comparison, SyncVote(sums=(float(batch_checksum),)))
        for index, own_sums in enumerate(result.sums_by_pipeline):
            first = index - index % groups.num_tensor_ranks
            if own_sums != result.sums_by_pipeline[first]:
                text = json.dumps(describe_batch(leaves))
                texts = [groups.broadcast_text_to_peers(text, pipeline) for pipeline in (first, index)]
                difference = different_batches([json.loads(found) for found in texts])
                raise RunError(
                    "tensor-parallel ranks were given different batches",
                    replica=index // groups.num_tensor_ranks,
                    tensor_ranks=(0, index - first),
                    **({"input": difference.values["input"]} if "input" in difference.values else {}),
                    hint='the same batch on all ranks along the axis "tp": split data by the "dp" axis only',
                ).on_all_ranks()
