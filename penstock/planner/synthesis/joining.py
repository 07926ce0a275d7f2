"""joining: runs an input gradient and its weight gradient as one full backward, where that is shorter.

A full backward may take less than its two parts one after the other, and gives back its memory sooner. A weight
gradient that fills no gap is better run at once; so every pair is tried, the last first, and kept unless it costs time.
"""

from penstock.planner.synthesis.evaluate import evaluate
from penstock.planner.synthesis.goal import Goal
from penstock.planner.synthesis.pool import measure
from penstock.planner.synthesis.shop import B, I, Shop, W, Word, Words

TRIAL = 0.1
"""the effort of a trial, in parts of a greedy run"""


def joined(shop: Shop, words: Words, goal: Goal) -> Words:
    """The same words with parts joined; those that stand side by side first, many at once."""
    shorter = sorted(stage for stage in range(len(shop.home)) if _saved(shop, stage) > 0)
    if not shorter:
        return words
    words, length = _side_by_side(shop, words, shorter, goal)
    for stage in shorter:
        words, length = _pairs_joined(shop, words, (shop.home[stage], stage), length, goal)
    return words


def _saved(shop: Shop, stage: int) -> float:
    return shop.seconds[stage << 2 | I] + shop.seconds[stage << 2 | W] - shop.seconds[stage << 2 | B]


def _side_by_side(shop: Shop, words: Words, stages: list[int], goal: Goal) -> tuple[Words, float]:
    """All stages together, or one by one where others would wait for what a full backward sends later."""
    length = measure(shop, evaluate(shop, words))
    together = [_without_gaps(word, set(stages)) for word in words]
    at_once = measure(shop, evaluate(shop, together))
    for stage in stages:
        if goal.is_over(min(length, at_once)):
            break
        goal.spend(TRIAL * sum(map(len, words)))
        trial = [_without_gaps(word, {stage}) for word in words]
        taken = measure(shop, evaluate(shop, trial))
        if taken <= length:
            words, length = trial, taken
    return (together, at_once) if at_once <= length else (words, length)


def _without_gaps(word: Word, stages: set[int]) -> Word:
    """With a full backward wherever nothing stands between its parts, and no weight gradient is left from before."""
    result, waiting = list[int](), dict[int, int]()
    for code in word:
        stage, kind = code >> 2, code & 3
        waiting[stage] = waiting.get(stage, 0) + (kind == I) - (kind == W)
        is_pair = kind == W and result and result[-1] == (stage << 2 | I) and waiting[stage] == 0
        if is_pair and stage in stages:
            result[-1] = stage << 2 | B
        else:
            result.append(code)
    return result


def _pairs_joined(shop: Shop, words: Words, where: tuple[int, int], length: float, goal: Goal) -> tuple[Words, float]:
    rank, stage = where
    for turn in reversed(range(words[rank].count(stage << 2 | I))):
        if goal.is_over(length):
            break
        goal.spend(TRIAL * sum(map(len, words)))
        trial = [*words[:rank], _with_one(words[rank], stage, turn), *words[rank + 1 :]]
        taken = measure(shop, evaluate(shop, trial))
        if taken <= length:
            words, length = trial, taken
    return words, length


def _with_one(word: Word, stage: int, turn: int) -> Word:
    """Joins the `turn`-th input gradient that is still alone with its weight gradient."""
    first = _place(word, stage << 2 | I, turn)
    second = _place(word, stage << 2 | W, turn)
    return [*word[:first], stage << 2 | B, *word[first + 1 : second], *word[second + 1 :]]


def _place(word: Word, code: int, turn: int) -> int:
    return [place for place, each in enumerate(word) if each == code][turn]
