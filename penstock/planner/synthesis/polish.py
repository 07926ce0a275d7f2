"""polish: shortens one order by moving single passes that its length hangs on, a little worse allowed for a while.

A pass of the critical chain moves a few places up or down its rank. What the move makes unlawful or too much for the
memory is put off to where it may run. A result that is longer is kept with a probability that falls with the
temperature, which sinks to nothing; the best of all is returned.
"""

from math import exp
from random import Random

from penstock.planner.synthesis.critical import critical
from penstock.planner.synthesis.evaluate import evaluate
from penstock.planner.synthesis.goal import Goal
from penstock.planner.synthesis.pool import measure
from penstock.planner.synthesis.shop import B, F, I, Shop, W, Word, Words

_HOT, _COLD = 1e-2, 5e-4
"""the first and the last temperature, in parts of the length"""
_REACH = 8
"""the farthest move, in places"""
MOVE = 0.15
"""the effort of a move, in parts of a greedy run"""


def polish(shop: Shop, words: Words, moves: int, goal: Goal) -> Words:
    """The best words after so many moves, or when the goal is met or the effort spent."""
    random = Random(0)
    times = evaluate(shop, words)
    length = best = measure(shop, times)
    result, chain = words, critical(shop, words, times)
    for move in range(moves):
        if goal.is_over(best):
            break
        goal.spend(MOVE * sum(map(len, words)))
        rank, place = random.choice(chain)
        changed = _moved(shop, rank, words[rank], place, random)
        if changed is None:
            continue
        trial = [*words[:rank], changed, *words[rank + 1 :]]
        times = evaluate(shop, trial)
        temperature = length * _HOT * (_COLD / _HOT) ** (move / moves)
        if not _accepts(measure(shop, times) - length, temperature, random):
            continue
        words, length, chain = trial, measure(shop, times), critical(shop, trial, times)
        if length < best * (1 - 1e-12):
            result, best = words, length
    return result


def _accepts(longer: float, temperature: float, random: Random) -> bool:
    return longer <= 0 or (temperature > 0 and random.random() < exp(-longer / temperature))


def _moved(shop: Shop, rank: int, word: Word, place: int, random: Random) -> Word | None:
    distance = 1 + int(random.random() ** 2 * _REACH)
    target = place + (distance if random.random() < 0.5 else -distance)
    rest = [*word[:place], *word[place + 1 :]]
    target = min(max(target, 0), len(rest))
    changed = settled(shop, rank, [*rest[:target], word[place], *rest[target:]])
    return None if changed == word else changed


def settled(shop: Shop, rank: int, word: Word) -> Word | None:
    """The word with every pass put off until its own stage and the memory allow it; None if some never may."""
    room, taken = shop.room[rank], shop.taken
    done = dict.fromkeys((stage << 2 | kind for stage in shop.stages[rank] for kind in (F, B, I, W)), 0)
    held, result, waiting = 0.0, [], list[int]()
    for code in word:
        waiting.append(code)
        at = 0 if len(waiting) == 1 or _may(waiting[0], done, held + taken[waiting[0]], room) else len(waiting) - 1
        # Only what runs can make room for what waits.
        while at < len(waiting):
            code = waiting[at]
            if _may(code, done, held + taken[code], room):
                del waiting[at]
                done[code] += 1
                held += taken[code]
                result.append(code)
                at = 0
            else:
                at += 1
    return result if not waiting else None


def _may(code: int, done: dict[int, int], held: float, room: float) -> bool:
    kind, stage = code & 3, code & ~3
    if kind == F:
        return held <= room
    if kind == W:
        return done[code] < done[stage | I]
    return done[stage | B] + done[stage | I] < done[stage] and held <= room
