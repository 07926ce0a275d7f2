"""words: a Schedule as words of letters, and words as a Schedule."""

import numpy as np

from penstock.ir import Codes, Orders, Schedule, kind_of, pack, stage_of
from penstock.planner.synthesis.shop import B, F, I, Shop, W, Word, Words


def words_of(schedule: Schedule) -> Words:
    """The letters of a schedule; overlapped pairs are taken apart, and every stage takes its microbatches in turn."""
    whole = schedule.table.taken_apart(np.ones(len(schedule.table.passes.index), dtype=np.bool_))
    return [(stage_of(codes) << 2 | kind_of(codes)).tolist() for codes in map(whole.rank, range(len(whole)))]


def schedule_of(shop: Shop, words: Words) -> Schedule:
    """The schedule that words say."""
    orders = Orders([_numbered(word) for word in words])
    return Schedule(shop.problem.placement, shop.num_microbatches, orders)


def _numbered(word: Word) -> Codes:
    """Microbatches by counting: backwards with input gradients, weight gradients as their input gradients."""
    codes = np.asarray(word, dtype=np.int64)
    kind, stage = codes & 3, codes >> 2
    microbatch = np.zeros(len(codes), dtype=np.int64)
    for each in np.unique(stage):
        here = stage == each
        forward, backward = here & (kind == F), here & ((kind == B) | (kind == I))
        microbatch[forward] = np.arange(int(forward.sum()))
        microbatch[backward] = np.arange(int(backward.sum()))
        microbatch[here & (kind == W)] = microbatch[here & (kind == I)]
    return pack(kind, stage, microbatch)


def peak(shop: Shop, word: Word) -> float:
    """The most bytes of activations that a word holds."""
    held = most = 0.0
    for code in word:
        held += shop.taken[code]
        most = max(most, held)
    return most
