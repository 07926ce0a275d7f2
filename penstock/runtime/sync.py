"""All ranks check that they were called for the same operation before any of them starts it.

Every call that involves all ranks begins with a sync. A call that one rank makes alone, or in another order, raises
an error on all ranks that names the calls, instead of a hang. The ranks of a pipeline sync first, then the pipelines:
replicas, and those that share tensors.

gloo accepts a smaller message, or another dtype of the same size, without an error, and a larger message aborts the
process. So the ranks must agree on every shape before data is sent, and the exchange itself uses votes of a fixed size,
whatever operation each rank was called for.
"""

import json
import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PenstockError, RunError
from penstock.launch import text_of
from penstock.runtime.agreement import Agreement, describe_batch, different_batches, first_difference
from penstock.runtime.groups import SYNC_TAG, ProcessGroups

MAX_CONTENT = 36
"""how many numbers a vote can carry from one rank to all others"""
MAX_REDUCED = 4
"""how many sums, and how many maxima, a vote can contribute to"""

_NUM_TAG_OFFSETS, _TAGS_PER_OFFSET = 100, 10_000
"""how many failures have different tags, and how many tags there are for the concurrent syncs after each"""
_UNUSED_BITS = 12
"""bits of a 64-bit digest that are left out, so that a float holds the rest exactly"""
_REFUSED = -1
"""request digest of a rank that refuses"""


@dataclass(frozen=True)
class SyncRequest:
    """The operation that a rank was called for: its name, the number of the next step, and options as text."""

    name: str
    step: int
    options: str = ""

    @cached_property
    def text(self) -> str:
        """The call as a user would write it."""
        return f"{self.name}({self.options})" if self.options else self.name


class SyncVote(NamedTuple):
    """The contribution of one rank to a sync."""

    agreement: Agreement | None = None
    checksum: int = 0
    """checksum of the batch; 0 if batches are not compared"""
    sums: tuple[float, ...] = ()
    """values to add up over all ranks, at most MAX_REDUCED"""
    maxes: tuple[float, ...] = ()
    """values of which the maximum over all ranks is taken; NaN is the largest"""
    content: tuple[float, ...] = ()
    """values that only this rank has, at most MAX_CONTENT"""
    includes_pipelines: bool = False
    """whether the agreement must hold between all pipelines (replicas and tensor-parallel ranks) too"""
    batch: Mapping[str, object] = {}
    """the tensors and plain values of the batch by name, which are described if the checksums differ"""


class SyncResult(NamedTuple):
    """The combined votes. Reductions add up in the order of the ranks, so that they are bit-identical everywhere."""

    sums: tuple[float, ...]
    """over all ranks of all pipelines"""
    maxes: tuple[float, ...]
    pipeline_sums: tuple[float, ...]
    """over the ranks of this pipeline only"""
    votes: bytes = b""
    """those of the ranks of this pipeline, packed"""
    sums_by_pipeline: tuple[tuple[float, ...], ...] = ()
    """the sums of each pipeline, in the order of the pipelines; empty if there is one"""

    def content(self, rank: int) -> tuple[float, ...]:
        """The content of the vote of one rank of this pipeline."""
        return _PackedVote.unpack(self.votes[rank * VOTE_BYTES :]).content


_EMPTY, _NO_AGREEMENT = SyncVote(), Agreement()


class RankSync:
    """Runs the syncs of one Pipeline, one after another. With all ranks in one process they always agree."""

    _next_pipeline: ClassVar[int] = 0
    _num_abandoned: ClassVar[int] = 0
    """how often this process has called `abandon_messages`; counted together with the other ranks of each Pipeline"""
    _unfinished: ClassVar[dict[int | None, "RankSync"]] = {}
    """by the id of a control group, which the sync keeps alive: the sync that was started and not finished"""

    def __init__(self, groups: ProcessGroups, tag: int = SYNC_TAG) -> None:
        self._groups = groups
        self._control_id = None if groups.is_local or tag != SYNC_TAG else id(groups.control)
        # Other syncs may be open while this one is used, so they do not share its channels.
        self._ranks = None if groups.is_local else _Exchange(groups, groups.control, tag, uses_channels=tag == SYNC_TAG)
        self._pipelines = None if groups.peers is None else _Exchange(groups, groups.peers, tag)
        self._number, self._pipeline_id = 0, -1
        self.tag_offset = 0
        """to add to the tags of messages that a failed step may leave behind: later Pipelines must not take them"""
        self.step = 0
        """the step of the last request"""
        self._open: tuple[SyncRequest, SyncVote, _PackedVote | None] | None = None

    def first_sync(self, options: Agreement, plan_digest: int = 0) -> bool:
        """Run the first sync: compare the options of each rank's Pipeline, and give it one number on all ranks.

        Returns whether all ranks gave the same digest of the plan.
        """
        if self._ranks is None:
            return True
        numbers = (RankSync._next_pipeline, plan_digest, -plan_digest, RankSync._num_abandoned)
        maxes = tuple(map(float, numbers))
        result = self.exchange(SyncRequest("Pipeline", 0), SyncVote(options, maxes=maxes, includes_pipelines=True))
        number, largest, smallest, num_abandoned = result.maxes
        RankSync._num_abandoned = int(num_abandoned)
        self.tag_offset = RankSync._num_abandoned % _NUM_TAG_OFFSETS
        self._pipeline_id = int(number)
        RankSync._next_pipeline = self._pipeline_id + 1
        if self._groups.monitor is not None:
            self._groups.monitor.preparing()
        return largest == -smallest

    def concurrent(self, number: int) -> "RankSync":
        """Another sync of the same Pipeline, which may be open at the same time as this one; numbered from 1."""
        other = RankSync(self._groups, SYNC_TAG + self.tag_offset * _TAGS_PER_OFFSET + number)
        other._pipeline_id = self._pipeline_id
        return other

    def abandon_messages(self) -> None:
        """After a failure that leaves messages of concurrent syncs behind: later Pipelines use other tags.

        Not every Pipeline has tags of its own: ranks that call different ones would not be seen to disagree.
        """
        RankSync._num_abandoned += 1

    def exchange(self, request: SyncRequest, vote: SyncVote = _EMPTY) -> SyncResult:
        """Exchange votes and wait for those of all ranks."""
        if self._ranks is None:
            self.step = request.step
            return SyncResult(vote.sums, vote.maxes, vote.sums)
        self.start(request, vote)
        return self.finish()

    def compare(self, request: SyncRequest, agreement: Agreement | None) -> None:
        """Raise an error, on all ranks of all pipelines, if two of them have different agreements. Collective.

        A rank without an agreement passes None, and is compared with none.
        """
        digest = 0.0 if agreement is None else float(agreement.digest >> _UNUSED_BITS)
        result = self.exchange(request, SyncVote(maxes=() if agreement is None else (digest, -digest)))
        # If no rank has an agreement, both maxima are -inf.
        if self._ranks is None or result.maxes[0] in (-result.maxes[1], -math.inf):
            return
        own = json.dumps([dist.get_rank(), [] if agreement is None else agreement.lines])
        found = sorted(json.loads(text) for text in self._groups.gather_texts_of_all(own))
        given = [(rank, lines) for rank, lines in found if lines]
        problem = first_difference([lines for _, lines in given], "rank", [rank for rank, _ in given])
        raise problem.on_all_ranks()

    def start(self, request: SyncRequest, vote: SyncVote = _EMPTY) -> None:
        """Send this rank's vote without waiting for the others."""
        # The number of the pipeline is part of the digest: a call on another Pipeline is another request.
        self._send(request, vote, zlib.crc32(f"{self._pipeline_id} {request.text}".encode()))

    def refuse(self, request: SyncRequest, error: Exception, failed_at: float = 0.0) -> None:
        """Join the sync of this request only to make all other ranks raise `error`; the caller raises it itself.

        If several ranks refuse, the others raise the error that happened first, by `failed_at` (time.time()).
        """
        if isinstance(error, PenstockError):
            error.repeats = False
        with suppress(RunError):
            self._send(request, SyncVote(Agreement([_error_text(error)]), content=(failed_at,)), _REFUSED)
            self.finish()

    @contextmanager
    def errors_on_all_ranks(self, request: SyncRequest) -> Iterator[None]:
        """Raise an error of the body on every rank: the other ranks raise it in the sync of this request."""
        try:
            yield
        except Exception as error:
            raised = error if isinstance(error, PenstockError) else RunError(f"{type(error).__name__}: {error}")
            self.refuse(request, raised)
            if isinstance(raised, RunError) and not (raised.is_shared or self._groups.is_local):
                raised = raised.at(rank=self._groups.rank)
            raise raised.on_all_ranks() from (error.__cause__ if isinstance(error, PenstockError) else error)

    def operation_ended(self) -> None:
        """Report to the monitor that the operation that this sync began is over."""
        if self._groups.monitor is not None:
            self._groups.monitor.idle()

    def _send(self, request: SyncRequest, vote: SyncVote, digest: int) -> None:
        unfinished = self if self._open is not None else self._unfinished.get(self._control_id)
        if unfinished is not None:
            # A step that failed before its first message left a sync open, perhaps one of another Pipeline: the votes
            # that were sent must be received, or they would be taken for those of this sync.
            with suppress(RunError):
                unfinished.finish()
        packed = None
        if self._ranks is not None:
            agreement_digest = 0 if vote.agreement is None else vote.agreement.digest
            key = _Key(self._number, request.step, digest, agreement_digest, vote.checksum)
            packed = _PackedVote(key, request.text, vote.sums, vote.maxes, vote.content)
            self._ranks.start(packed.pack())
        self._number += 1
        self.step = request.step
        self._open = (request, vote, packed)
        if self._control_id is not None:
            self._unfinished[self._control_id] = self

    def finish(self) -> SyncResult:
        """Wait for the votes of all ranks; raises the same error on every rank if they do not agree."""
        (request, vote, packed), self._open = self._open, None
        self._unfinished.pop(self._control_id, None)
        if packed is None:
            return SyncResult(vote.sums, vote.maxes, vote.sums)
        if self._groups.monitor is not None:
            self._groups.monitor.syncing(request.name, request.step)
        data = self._ranks.finish()
        problem = None if _keys_are_equal(data) else _problem(self._ranks, _unpack_votes(data), vote, "rank")
        sums, maxes = _combined([_reductions(data, start) for start in range(0, len(data), VOTE_BYTES)])
        pipeline_sums, by_pipeline = sums, ()
        if self._pipelines is not None:
            pipeline_vote = packed._replace(sums=sums, maxes=maxes)
            votes, problem = self._finish_pipelines(self._pipelines, pipeline_vote, vote, problem)
            sums, maxes = _combined(votes)
            by_pipeline = tuple(own_sums for own_sums, _ in votes)
        if problem is not None:
            raise problem
        return SyncResult(sums, maxes, pipeline_sums, data, by_pipeline)

    def _finish_pipelines(
        self, pipelines: "_Exchange", pipeline_vote: "_PackedVote", vote: SyncVote, problem: RunError | None
    ) -> "tuple[list[_Reductions], RunError | None]":
        """The results of all pipelines, and their problem; a problem of one pipeline is a problem of all."""
        agreement, digest = _NO_AGREEMENT, pipeline_vote.key.request
        if problem is not None:
            agreement, digest = Agreement([_error_text(problem)]), _REFUSED
        elif vote.agreement is not None and (vote.includes_pipelines or digest == _REFUSED):
            agreement = vote.agreement
        key = _Key(pipeline_vote.key.number, pipeline_vote.key.step, digest, agreement.digest)
        own = pipeline_vote._replace(key=key, content=())
        pipelines.start(own.pack())
        votes = _unpack_votes(pipelines.finish())
        kind = "replica" if self._groups.num_tensor_ranks == 1 else "pipeline"
        other = _problem(pipelines, votes, SyncVote(agreement), kind)
        return [(packed.sums, packed.maxes) for packed in votes], problem or other


def raise_on_all_ranks(groups: ProcessGroups, problem: RunError | None) -> None:
    """Raise the problem of any rank of any pipeline on all of them."""
    has_problem = groups.gather(torch.tensor([int(problem is not None)])).amax(0)
    if groups.gather_peers(has_problem).any():
        texts = groups.gather_texts_of_all("" if problem is None else json.dumps(problem.to_dict()))
        raise RunError.from_dict(json.loads(next(filter(None, texts))))


class _Key(NamedTuple):
    """The numbers that must be equal on all ranks."""

    number: int
    """how many syncs were before this one"""
    step: int
    request: int
    """a digest of the request, or _REFUSED"""
    agreement: int = 0
    """the digest of the agreement; 0 if there is none"""
    checksum: int = 0
    """that of the batch; 0 if batches are not compared"""


_TEXT_BYTES = 104
_KEY = struct.Struct(f"<{len(_Key._fields)}q")
_REDUCED = struct.Struct(f"<{2 * MAX_REDUCED}d")
_HEAD = struct.Struct(f"{_KEY.format}{_TEXT_BYTES}sii{2 * MAX_REDUCED}d")
_Reductions = tuple[tuple[float, ...], tuple[float, ...]]
VOTE_BYTES = _HEAD.size + MAX_CONTENT * 8
"""size of a vote as it is sent"""
_MAX_TEXT = 10_000  # of the error of another rank

_NO_SUMS, _NO_MAXES = (0.0,) * MAX_REDUCED, (-math.inf,) * MAX_REDUCED


class _PackedVote(NamedTuple):
    """A vote as it is sent, with the key at the beginning."""

    key: _Key
    text: str = ""
    """the request, truncated to _TEXT_BYTES"""
    sums: tuple[float, ...] = ()
    maxes: tuple[float, ...] = ()
    content: tuple[float, ...] = ()

    def pack(self) -> bytes:
        text = self.text.encode()
        if len(text) > _TEXT_BYTES:
            # Cut between characters, not inside one.
            text = text[:_TEXT_BYTES].decode(errors="ignore").encode()
        reduced = (*self.sums, *_NO_SUMS[len(self.sums) :], *self.maxes, *_NO_MAXES[len(self.maxes) :])
        head = _HEAD.pack(*self.key, text, len(text), len(self.content), *reduced)
        return (head + struct.pack(f"<{len(self.content)}d", *self.content)).ljust(VOTE_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> "_PackedVote":
        *key, text, length, count = _HEAD.unpack_from(data)[: len(_Key._fields) + 3]
        content = struct.unpack_from(f"<{count}d", data, _HEAD.size)
        return cls(_Key(*key), text[:length].decode(), *_reductions(data, 0), content)


def _unpack_votes(data: bytes) -> list[_PackedVote]:
    return [_PackedVote.unpack(data[start : start + VOTE_BYTES]) for start in range(0, len(data), VOTE_BYTES)]


def _reductions(data: bytes, start: int) -> _Reductions:
    """Sums and maxima of the vote that begins at `start`, without unpacking the rest."""
    reduced = _REDUCED.unpack_from(data, start + _HEAD.size - _REDUCED.size)
    return reduced[:MAX_REDUCED], reduced[MAX_REDUCED:]


def _combined(votes: Sequence[_Reductions]) -> _Reductions:
    """Sums and maxima over several votes, in their order."""
    sums = tuple(map(sum, zip(*[sums for sums, _ in votes], strict=True)))
    columns = zip(*[maxes for _, maxes in votes], strict=True)
    return sums, tuple(math.nan if any(map(math.isnan, column)) else max(column) for column in columns)


def _keys_are_equal(data: bytes) -> bool:
    """Whether all ranks agree: the usual case, decided without unpacking the votes."""
    key = data[: _KEY.size]
    return all(data.startswith(key, start) for start in range(VOTE_BYTES, len(data), VOTE_BYTES))


class _Exchange:
    """Gathers the votes of all ranks of one group: each sends its own to the last rank, which sends all of them back.

    That takes two messages per rank, where all_gather takes one per pair of ranks. The last rank has nothing to compute
    before the first activation arrives, so it answers at once; rank 0 would answer only after a forward, for which all
    others would wait. Every rank must call `start` and `finish` in turn. With `uses_channels`, votes are sent
    through shared memory once all ranks are connected by it.
    """

    def __init__(self, groups: ProcessGroups, group: Any, tag: int, uses_channels: bool = False) -> None:
        self._groups, self._group, self._tag, self._uses_channels = groups, group, tag, uses_channels
        self._channels: Any = None
        """ByteChannels of the exchange that was started, by rank; those of `groups` may be created before it ends"""
        self._rank, self._last = dist.get_rank(group), dist.get_world_size(group) - 1
        self._table = bytearray((self._last + 1) * VOTE_BYTES)
        self._whole = torch.frombuffer(self._table, dtype=torch.uint8)
        self._votes = torch.split(self._whole, VOTE_BYTES)
        self._works: list[Any] = []

    def start(self, packed: bytes) -> None:
        """Send this rank's vote, without waiting."""
        start = self._rank * VOTE_BYTES
        self._table[start : start + VOTE_BYTES] = packed
        self._channels = self._groups.channels if self._uses_channels else None
        if self._channels:
            if self._rank != self._last:
                self._groups.start(self._channels[self._last].send, packed)
        elif self._rank == self._last:
            self._works = [self._recv(self._votes[rank], rank) for rank in range(self._last)]
        else:
            # Receiving into the table that holds the vote being sent is safe: the answer comes only after the vote
            # has arrived, and has the same bytes at this position.
            self._works = [self._recv(self._whole, self._last), self._send(self._votes[self._rank], self._last)]

    def finish(self) -> bytes:
        """Wait for the votes of all ranks."""
        if self._channels:
            # Not an operation of torch.distributed, but its errors are explained in the same way.
            return self._groups.start(self._finish_channels)
        self._wait(self._works)
        if self._rank == self._last:
            self._wait([self._send(self._whole, rank) for rank in range(self._last)])
        return bytes(self._table)

    def _finish_channels(self) -> bytes:
        if self._rank != self._last:
            return self._channels[self._last].receive(self._groups.monitor)
        for rank in range(self._last):
            start = rank * VOTE_BYTES
            self._table[start : start + VOTE_BYTES] = self._channels[rank].receive(self._groups.monitor)
        table = bytes(self._table)
        for channel in self._channels.values():
            channel.send(table)
        return table

    def texts(self, text: str) -> list[str]:
        """The texts of all ranks.

        They are sent with the tag of this sync: a collective could be matched with one of another open sync, or of the
        user.
        """
        data = torch.tensor(list(text.encode(errors="replace")), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(data)]), [1] * (self._last + 1))
        return [bytes(part.tolist()).decode() for part in self._gather(data, list(map(int, sizes)))]

    def _gather(self, own: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The tensors of all ranks, whose numbers of elements are known."""
        whole = torch.zeros(sum(sizes), dtype=own.dtype)
        parts = torch.split(whole, list(sizes))
        if self._rank == self._last:
            self._wait([self._recv(part, rank) for rank, part in enumerate(parts[:-1]) if len(part)])
            parts[-1].copy_(own)
            self._wait([self._send(whole, rank) for rank in range(self._last)])
        else:
            sent = [self._send(own, self._last)] if len(own) else []
            self._wait([self._recv(whole, self._last), *sent])
        return parts

    def _wait(self, works: list[Any]) -> None:
        for work in works:
            self._groups.wait(work)
        self._works = []

    def _send(self, tensor: Tensor, rank: int) -> Any:
        return self._groups.start(self._group.send, [tensor], rank, self._tag)

    def _recv(self, tensor: Tensor, rank: int) -> Any:
        return self._groups.start(self._group.recv, [tensor], rank, self._tag)


def _problem(exchange: _Exchange, votes: Sequence[_PackedVote], vote: SyncVote, kind: str) -> RunError | None:
    """Why the ranks cannot continue, the same error on all; None if all keys are equal.

    `kind` is "rank", or "replica" or "pipeline" if the votes are those of all pipelines.
    """
    if all(packed.key == votes[0].key for packed in votes):
        return None
    refusing = [index for index, packed in enumerate(votes) if packed.key.request == _REFUSED]
    if not refusing and (problem := _different_requests(votes, kind)) is not None:
        return problem.on_all_ranks()
    # Every rank makes the exchanges below, because all of them have the same votes.
    if not refusing and len({packed.key.checksum for packed in votes}) > 1:
        # Before the agreement: ranks with different batches may also record other calls.
        batches = [json.loads(text) for text in exchange.texts(json.dumps(describe_batch(vote.batch)))]
        return different_batches(batches).on_all_ranks()
    texts = exchange.texts("" if vote.agreement is None else vote.agreement.text)
    if refusing:
        first = min(refusing, key=lambda index: votes[index].content)  # the time of the failure, see `refuse`
        problem = RunError.from_dict(json.loads(texts[first]), **{kind: first})
        problem.repeats = True
        return problem
    problem = first_difference([text.split("\n") for text in texts], kind)
    return (problem or RunError(f"the {kind}s disagree about the next operation")).on_all_ranks()


def _error_text(error: Exception) -> str:
    if not isinstance(error, PenstockError):
        error = RunError(f"{type(error).__name__}: {text_of(error)[:_MAX_TEXT]}")
    return json.dumps(error.to_dict())


def _different_requests(votes: Sequence[_PackedVote], kind: str) -> RunError | None:
    """The error for ranks that were called for different operations; None if all requests are the same."""
    texts = [packed.text for packed in votes]
    if len({packed.key.request for packed in votes}) > 1:
        usual, _ = Counter(texts).most_common(1)[0]
        first = texts.index(usual)
        other = next(index for index, packed in enumerate(votes) if packed.key.request != votes[first].key.request)
        if texts[other] == usual:
            problem = f"{kind} {other} {_called(usual)} of another Pipeline than {kind} {first}"
        else:
            problem = f"{kind} {other} {_called(texts[other])} while {kind} {first} {_called(usual)}"
        return RunError(
            problem,
            step=votes[first].key.step,
            **{f"{kind}_{index}": text for index, text in enumerate(texts)} if len(votes) > 2 else {},
            hint=f"the same calls in the same order, with the same options, on every {kind}",
        )
    steps, numbers = [packed.key.step for packed in votes], [packed.key.number for packed in votes]
    if len(set(steps)) > 1:
        hint = f"the same calls of step and eval on every {kind}"
        return RunError(f"the {kind}s are at different steps", called=texts[0], steps=steps, hint=hint)
    if len(set(numbers)) > 1:
        hint = f"the same calls in the same order on every {kind}"
        return RunError(f"some {kind}s have made more calls than others", called=texts[0], calls=numbers, hint=hint)
    return None


def _called(text: str) -> str:
    # Requests other than calls are phases within one, such as "the end of step".
    return f"was at {text}" if text.startswith("the ") else f"called {text}"
