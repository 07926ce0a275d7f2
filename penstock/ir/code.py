"""The compact form of an action: one 64-bit integer that holds kind, stage, microbatch, peer and peer microbatch.

All functions work on single integers and on whole numpy arrays alike, so an order of a million actions is built,
matched and proven with a handful of array operations. `peer` is the other stage of a message or the backward half of
an overlapped pair; `peer_microbatch` is used by the latter only.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import (
    Action,
    Backward,
    ComputeAction,
    Forward,
    Free,
    InputGrad,
    Kind,
    Message,
    Overlap,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
    WeightGrad,
)

Codes: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = "int | NDArray[np.integer]"

_STAGE, _MICROBATCH, _PEER, _PEER_MICROBATCH = 4, 17, 33, 46
_KIND_MASK, _STAGE_MASK, _MICROBATCH_MASK = 15, 8191, 65535
_COMPUTE = {kind.kind: kind for kind in (Forward, Backward, InputGrad, WeightGrad)}
_MESSAGE: dict[Kind, type[Message]] = {Kind.SEND: Send, Kind.RECV: Recv}
_STAGE_ACTIONS = {kind.kind: kind for kind in (Reduce, Unshard, Reshard)}


def pack(
    kind: Numbers, stage: Numbers, microbatch: Numbers = 0, peer: Numbers = 0, peer_microbatch: Numbers = 0
) -> Codes:
    """The codes of the given actions; arrays are broadcast against each other."""
    words = (
        np.asarray(kind, dtype=np.int64)
        | (np.asarray(stage, dtype=np.int64) << _STAGE)
        | (np.asarray(microbatch, dtype=np.int64) << _MICROBATCH)
        | (np.asarray(peer, dtype=np.int64) << _PEER)
        | (np.asarray(peer_microbatch, dtype=np.int64) << _PEER_MICROBATCH)
    )
    return np.atleast_1d(np.asarray(words, dtype=np.int64))


def kind_of(codes: Codes) -> Codes:
    """The kind of each action."""
    return codes & _KIND_MASK


def stage_of(codes: Codes) -> Codes:
    """The stage of each action."""
    return (codes >> _STAGE) & _STAGE_MASK


def microbatch_of(codes: Codes) -> Codes:
    """The microbatch of each action (0 where it has none)."""
    return (codes >> _MICROBATCH) & _MICROBATCH_MASK


def peer_of(codes: Codes) -> Codes:
    """The other stage of each message, or the stage of the backward half of each overlapped pair."""
    return (codes >> _PEER) & _STAGE_MASK


def peer_microbatch_of(codes: Codes) -> Codes:
    """The microbatch of the backward half of each overlapped pair."""
    return (codes >> _PEER_MICROBATCH) & _MICROBATCH_MASK


def encode(actions: Iterable[Action]) -> Codes:
    """The codes of action objects."""
    return np.fromiter((_code(action) for action in actions), dtype=np.int64)


def decode(codes: Codes) -> tuple[Action, ...]:
    """The action objects of codes; equal codes share one object."""
    return tuple(map(_action, codes.tolist()))


def decode_one(code: int) -> Action:
    """The action object of one code."""
    return _action(code)


def _code(action: Action) -> int:
    if isinstance(action, Overlap):
        back = action.backward
        return int(pack(action.kind, action.stage, action.forward.microbatch, back.stage, back.microbatch)[0])
    microbatch = action.microbatch if isinstance(action, ComputeAction | Message | Free) else 0
    peer = action.peer if isinstance(action, Message) else 0
    return action.kind | action.stage << _STAGE | microbatch << _MICROBATCH | peer << _PEER


@lru_cache(maxsize=1 << 16)
def _action(code: int) -> Action:
    kind = Kind(code & _KIND_MASK)
    stage, microbatch = (code >> _STAGE) & _STAGE_MASK, (code >> _MICROBATCH) & _MICROBATCH_MASK
    peer = (code >> _PEER) & _STAGE_MASK
    if kind is Kind.OVERLAP:
        backward = Backward(peer, (code >> _PEER_MICROBATCH) & _MICROBATCH_MASK)
        return Overlap(Forward(stage, microbatch), backward)
    if kind in _COMPUTE:
        return _COMPUTE[kind](stage, microbatch)
    if kind in _MESSAGE:
        return _MESSAGE[kind](stage, microbatch, peer)
    if kind is Kind.FREE:
        return Free(stage, microbatch)
    return _STAGE_ACTIONS[kind](stage)
