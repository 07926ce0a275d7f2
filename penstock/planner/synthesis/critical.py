"""critical: the chain of passes, back from the end of a step, in which each waits for the one before it."""

from penstock.planner.synthesis.evaluate import Times
from penstock.planner.synthesis.shop import F, Shop, W, Words

_ROUNDING = 1e-9

Place = tuple[int, int]
"""a rank and the place of a pass in its word"""


def critical(shop: Shop, words: Words, times: Times) -> list[Place]:
    """One such chain, last pass first; where a pass waits for two, the one on its own rank is followed."""
    places = _places(words)
    rank = _longest(shop, words, times)
    place = len(words[rank]) - 1
    chain = [(rank, place)]
    grace = _ROUNDING * times.makespan
    while True:
        start = times.ends[rank][place] - shop.seconds[words[rank][place]]
        if place and times.ends[rank][place - 1] >= start - grace:
            place -= 1
        else:
            sender = _sender(shop, words, times, places, (rank, place), start)
            if sender is None:
                return chain
            rank, place = sender
        chain.append((rank, place))


def _longest(shop: Shop, words: Words, times: Times) -> int:
    """The rank that the length in the objective is read from."""
    if shop.problem.objective == "makespan":
        return max(range(len(words)), key=lambda rank: times.ends[rank][-1])
    return max(
        range(len(words)),
        key=lambda rank: times.ends[rank][-1] - times.ends[rank][0] + shop.seconds[words[rank][0]],
    )


def _places(words: Words) -> dict[tuple[int, bool], list[Place]]:
    """By stage and direction, where the passes of microbatches 0, 1, 2 ... stand."""
    found: dict[tuple[int, bool], list[Place]] = {}
    for rank, word in enumerate(words):
        for place, code in enumerate(word):
            if code & 3 != W:
                found.setdefault((code >> 2, code & 3 == F), []).append((rank, place))
    return found


def _sender(
    shop: Shop, words: Words, times: Times, places: dict[tuple[int, bool], list[Place]], at: Place, start: float
) -> Place | None:
    """Of the passes that a pass reads, the one that ended last, if the pass waited for it."""
    code = words[at[0]][at[1]]
    if code & 3 == W or start <= 0.0:
        return None
    stage, is_forward = code >> 2, code & 3 == F
    turn = places[stage, is_forward].index(at)
    cuts = shop.problem.cuts
    others = cuts.producers(stage) if is_forward else cuts.gradient_consumers(stage)
    found = [places[other, is_forward][turn] for other in others]
    return max(found, key=lambda place: times.ends[place[0]][place[1]], default=None)
