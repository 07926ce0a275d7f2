"""evaluate: how long words take, by the rules of penstock.simulate.

A message leaves when the pass that made it ends and its link is free; the links that leave a rank thus go by the order
of its passes, and only passes need to be walked. If one pass sends several messages over one link, they go by the
number of the stage that gets them, where the simulator goes by who uses them first.
"""

from collections import deque
from math import inf
from typing import NamedTuple

from penstock.planner.synthesis.shop import F, Shop, W, Words


class Times(NamedTuple):
    """When the passes of every rank end, letter by letter; empty for words that cannot run to their end."""

    ends: list[list[float]]
    makespan: float
    span: float


BLOCKED = Times([], inf, inf)


def evaluate(shop: Shop, words: Words) -> Times:
    """Run every word as soon as its passes can."""
    num_stages, count = len(shop.home), shop.num_microbatches
    # By stage and microbatch, inputs first and returning gradients after those: what is missing, when the rest came.
    missing = [n for side in (shop.num_inputs, shop.num_returns) for n in side for _ in range(count)]
    ready = [0.0] * len(missing)
    done = [0] * (2 * num_stages)
    free = [0.0] * shop.num_links
    ends: list[list[float]] = [[] for _ in words]
    waiting: dict[int, int] = {}
    runnable, unfinished = deque(range(len(words))), len(words)
    seconds, sides = shop.seconds, (shop.outputs, shop.gradients)
    while runnable:
        rank = runnable.popleft()
        mine, word = ends[rank], words[rank]
        now = mine[-1] if mine else 0.0
        for place in range(len(mine), len(word)):
            code = word[place]
            kind, stage = code & 3, code >> 2
            if kind == W:
                now += seconds[code]
                mine.append(now)
                continue
            side = kind != F
            turn = done[stage + side * num_stages]
            slot = (stage + side * num_stages) * count + turn
            if missing[slot]:
                waiting[slot] = rank
                break
            if ready[slot] > now:
                now = ready[slot]
            now += seconds[code]
            mine.append(now)
            done[stage + side * num_stages] += 1
            for target, link, occupied, latency in sides[side][stage]:
                arrival = now
                if link >= 0:
                    if free[link] > now:
                        arrival = free[link]
                    arrival += occupied
                    free[link] = arrival
                    arrival += latency
                slot = (target + side * num_stages) * count + turn
                missing[slot] -= 1
                if arrival > ready[slot]:
                    ready[slot] = arrival
                if not missing[slot] and slot in waiting:
                    runnable.append(waiting.pop(slot))
        else:
            unfinished -= 1
    if unfinished:
        return BLOCKED
    spans = [mine[-1] - mine[0] + seconds[word[0]] for mine, word in zip(ends, words, strict=True)]
    return Times(ends, max(mine[-1] for mine in ends), max(spans))
