"""Sends the batch of a step from rank 0 to the other ranks, with `Pipeline(..., inputs="first")`."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.batches import TARGET, Batch
from penstock.capture import LruCache, Recording
from penstock.errors import CaptureError, NoLossError, RunError
from penstock.ir import Plan, leaves, named_inputs, named_leaves
from penstock.runtime.broadcast import check_structure, flatten_structure, read_structure
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.host_memory import goes_through_host, host_buffer, to_device, to_host
from penstock.runtime.model_part import ModelPart
from penstock.runtime.step import Step
from penstock.stages import Ownership

INPUTS = ("all", "first")
"""which ranks are given the batch"""
FillStep = Callable[[Batch, Step, tuple[Recording, ...] | None], None]
"""splits a batch into a step: sets its microbatches, inputs and recordings; recordings are found unless given"""


@dataclass(eq=False)
class BatchSignature:
    """Structure and recordings of a batch; batches with equal signatures are sent in the same way."""

    recordings: tuple[Recording, ...]
    input_names: tuple[str, ...]
    """name of every tensor of the batch in order; "" for those of the target"""
    structure: str
    split_indices: frozenset[int]
    """the indices of the tensors that every rank reads to split the batch"""
    lists: tuple[str, ...]
    """the names of the lists with an entry per sample, whose tensors have other names in a microbatch"""
    needed: dict[int, set[int]] = field(default_factory=dict)
    """by rank, the indices of the tensors that it needs, once that is known"""
    agreed: set[bool] = field(default_factory=set)
    """the kinds of step (True: training, False: evaluation) with this signature on which all ranks have agreed"""


class OutgoingBatch(NamedTuple):
    """A batch that rank 0 is about to send."""

    signature_index: int
    structure: str
    tensors: list[Tensor]
    batch: Batch


class BatchSender:
    """Sends batches from rank 0 to the ranks that need parts of them.

    A batch of a new signature is sent whole, and every rank records the model. All ranks number signatures alike: for a
    known one the other ranks look up their recordings by its index, and are sent only the tensors that their stages
    read. All ranks use signatures in the same order, so they also drop the same least recently used ones.
    """

    def __init__(self, model_part: ModelPart, plan: Plan, split: FillStep) -> None:
        self._model_part, self._plan, self._split = model_part, plan, split
        self._forward_signature = inspect.signature(model_part.captured.model.forward)
        parameters = [name for name in self._forward_signature.parameters if name != TARGET]
        # A vote holds floats, which are exact up to 2**53. Further parameters are not compared.
        self._argument_bits = {name: 1 << bit for bit, name in enumerate((TARGET, *parameters[:50]))}
        self._signatures: LruCache[int, BatchSignature] = LruCache()
        """by index"""
        self._indices: dict[tuple[str, tuple[Recording, ...]], int] = {}
        """of the signatures, by structure and recordings"""
        self.num_signatures = 0
        """how many signatures all ranks have agreed on, including those that were dropped"""
        self._new: BatchSignature | None = None
        """of the last batch, until all ranks have agreed on its step"""

    def is_agreed(self, index: int, is_training: bool) -> bool:
        """Whether all ranks have agreed on a step with the signature of this index."""
        # Not marked as used: only rank 0 calls this, and all ranks must drop the same signatures.
        return index in self._signatures and is_training in self._signatures[index].agreed

    def prepare(self, batch: Batch, step: Step) -> OutgoingBatch:
        """On rank 0: prepare a batch, and fill the step with its microbatches; nothing is sent yet."""
        check_structure(tuple(batch), hint='inputs="all", and the same batch on every rank')
        structure, tensors = flatten_structure(tuple(batch))
        # Rebuilt from the sent structure, so that rank 0 trains on the same structure as the other ranks.
        build, _ = read_structure(structure, torch.device("meta"))
        rebuilt = _as_batch(build(tensors))
        self._split(rebuilt, step, None)
        index = self._indices.get((structure, step.recordings), self.num_signatures)
        return OutgoingBatch(index, structure, tensors, rebuilt)

    def send(self, outgoing: OutgoingBatch, step: Step) -> None:
        """On rank 0: send each rank the tensors that it needs."""
        index = outgoing.signature_index
        if self._signatures.find(index) is None:
            self._model_part.groups.broadcast_text(outgoing.structure, 0)
        send_tensors(self._model_part.groups, outgoing.tensors, lambda rank: self._needed_by(index, rank, step))
        self._keep_signature(index, outgoing.structure, step, outgoing.batch)

    def receive(self, index: int, step: Step, own_target: Any = None) -> None:
        """On the other ranks: receive a batch, and fill the step with its microbatches.

        The tensors that this rank does not need are uninitialised memory. `own_target` is used if the batch has no
        target.
        """
        groups, known = self._model_part.groups, self._signatures.find(index)
        structure = groups.broadcast_text("", 0) if known is None else known.structure
        build, buffers = read_structure(structure, self._model_part.device)
        batch = _as_batch(build(receive_tensors(groups, buffers, self._needed_by(index, groups.rank, step))))
        self._split(batch, step, None if known is None else known.recordings)
        # Without the target of this rank: rank 0, which does not have it, must find the same signature.
        self._keep_signature(index, structure, step, batch)
        if own_target is None or batch.target is not None:
            return
        self._split(batch._replace(target=own_target), step, step.recordings)
        for name, axis in step.microbatches[0].axes.items():
            if name.startswith(TARGET) and axis.sizes and not axis.sizes.startswith(TARGET):
                raise RunError(
                    "a target whose lengths are an argument of the model must be passed on rank 0",
                    lengths=axis.sizes,
                    hint="step(x, target=y) on rank 0",
                )

    def commit(self, index: int, is_training: bool) -> None:
        """Keep the signature of the last batch; call this once all ranks agree on its step."""
        if self._new is not None:
            self._indices[self._new.structure, self._new.recordings] = index
            for old in self._signatures.put(index, self._new):
                del self._indices[old.structure, old.recordings]
            self.num_signatures += 1
            self._new = None
        self._signatures[index].agreed.add(is_training)

    def _keep_signature(self, index: int, structure: str, step: Step, batch: Batch) -> None:
        """Keep the signature of a batch for `commit`, if it is new."""
        self._new = None
        if index not in self._signatures:
            named = named_inputs(self._model_part.captured.model.forward, batch.args, batch.kwargs)
            names = {id(leaf): name for name, leaf in named.items()}
            tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
            axes = step.microbatches[0].axes
            length_names = {axis.sizes for axis in axes.values()}
            all_named = (*named.items(), *named_leaves(batch.target, TARGET))
            read_to_split = {id(leaf) for name, leaf in all_named if name in length_names}
            self._new = BatchSignature(
                step.recordings,
                tuple(names.get(id(leaf), "") for leaf in tensors),
                structure,
                frozenset(index for index, leaf in enumerate(tensors) if id(leaf) in read_to_split),
                tuple(name for name, axis in axes.items() if axis.dim is None),
            )

    def _needed_by(self, index: int, rank: int, step: Step) -> set[int] | None:
        """The indices of the tensors that a rank needs; None for all: a new signature, or a token budget."""
        signature, placement = self._signatures.find(index), self._plan.schedule.placement
        # With a token budget every rank reads the lengths of the samples.
        if signature is None or step.budget_tokens is not None:
            return None
        if rank not in signature.needed:
            is_last = placement[self._plan.num_stages - 1] == rank
            read: set[str] = set()
            for recording in signature.recordings:
                graph = recording.graph
                runs = Ownership(self._plan.graph, self._plan.partition).fit(graph).runs(graph)
                nodes = [node for stage in placement.stages[rank] for node in runs[stage]]
                if is_last:
                    # The last rank also counts labels and returns outputs, which may be inputs.
                    nodes += [node for node in graph.nodes if node.from_inputs]
                    read.update(graph.outputs)
                read.update(name for node in nodes for name in node.reads)
            # An entry of a list has another number in a microbatch than in the batch, so its name does not show which
            # one is read: all entries of a list that is read are sent.
            lists = [name for name in signature.lists if any(value.startswith(f"{name}.") for value in read)]
            signature.needed[rank] = {
                position
                for position, name in enumerate(signature.input_names)
                if name in read
                or (is_last and not name)
                or position in signature.split_indices
                or name.startswith(tuple(f"{prefix}." for prefix in lists))
            }
        return signature.needed[rank]

    def argument_mask(self, batch: Batch) -> float:
        """The arguments of this rank that are not None, as the bits of a number."""
        try:
            given = self._forward_signature.bind_partial(*batch.args, **batch.kwargs).arguments
        except TypeError:  # rank 0 reports arguments that the model does not take
            given = {}
        names = [name for name, value in (*given.items(), (TARGET, batch.target)) if value is not None]
        return float(sum({self._argument_bits.get(name, 0) for name in names}))

    def check_arguments(self, masks: Sequence[float], has_loss_fn: bool) -> None:
        """Raise an error, the same on every rank, if a rank passed an argument that would not be used."""
        last_rank = self._plan.schedule.placement[self._plan.num_stages - 1]
        for rank, mask in enumerate(masks):
            unused = int(mask) & ~int(masks[0])
            if rank == last_rank and has_loss_fn:
                unused &= ~self._argument_bits[TARGET]
            if not unused:
                continue
            names = [name for name, bit in self._argument_bits.items() if unused & bit]
            hint = f"pass {', '.join(names)} on rank 0"
            if has_loss_fn:
                hint += f", which sends the batch to the others; only target may be passed on rank {last_rank} instead"
            problem = 'with inputs="first" all arguments must be given to rank 0'
            raise RunError(problem, rank=rank, names=names, hint=hint).on_all_ranks()


def has_batch(batch: Batch) -> bool:
    """Whether a rank passed more than a target and options of the model, such as `use_cache=False`."""
    plain = (value is None or isinstance(value, int | float | str) for value in batch.kwargs.values())
    return bool(batch.args) or not all(plain)


@contextmanager
def hinting_at_rank_0_arguments() -> Iterator[None]:
    """Add to an error of the model that it was given the arguments of rank 0 only."""
    try:
        yield
    except (CaptureError, NoLossError) as error:
        hints = (error.hint, 'with inputs="first" the model gets the arguments of rank 0 only: pass all of them there')
        raise error.with_hint("; ".join(filter(None, hints))) from error.__cause__


def send_tensors(
    groups: ProcessGroups, tensors: Sequence[Tensor], needed_by: Callable[[int], Collection[int] | None]
) -> None:
    """On rank 0: send every rank the tensors with the indices that it needs; None: all of them."""
    # The user may pass some tensors on the host and others on a device.
    devices = [tensor.device for tensor in tensors if goes_through_host(groups.group, tensor.device)]
    if devices:
        tensors = to_host(tensors, devices[0])
    works = [
        groups.start(dist.isend, tensors[index], group=groups.group, group_dst=rank)
        for rank in range(1, groups.num_ranks)
        for index in _sent(tensors, needed_by(rank))
    ]
    for work in works:
        groups.wait(work)


def receive_tensors(
    groups: ProcessGroups, buffers: Sequence[Tensor], needed: Collection[int] | None
) -> Sequence[Tensor]:
    """On the other ranks: fill the buffers with the needed tensors; the rest stay uninitialised."""
    indices = _sent(buffers, needed)
    received = list(buffers)
    if buffers and goes_through_host(groups.group, buffers[0].device):
        received = [host_buffer(buffer.shape, buffer.dtype) for buffer in buffers]
    works = [groups.start(dist.irecv, received[index], group=groups.group, group_src=0) for index in indices]
    for work in works:
        groups.wait(work)
    return [to_device(tensor, buffer.device) for tensor, buffer in zip(received, buffers, strict=True)]


def _sent(tensors: Sequence[Tensor], needed: Collection[int] | None) -> list[int]:
    return [index for index, tensor in enumerate(tensors) if tensor.numel() and (needed is None or index in needed)]


def _as_batch(structure: Any) -> Batch:
    return Batch(tuple(structure[0]), dict(structure[1]), structure[2])
