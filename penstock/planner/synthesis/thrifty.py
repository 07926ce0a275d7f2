"""thrifty: orders that let only so many microbatches into the pipeline at once, for memory where little else fits.

A microbatch goes through all stages and back, step by step; the next enters when one of those under way has left. With
one at a time nothing is ever held or received beside it, so that hardly any order needs less.
"""

from collections.abc import Iterator

from penstock.planner.synthesis.order import Order
from penstock.planner.synthesis.problem import Problem
from penstock.planner.synthesis.shop import B, F, Shop, Words
from penstock.planner.synthesis.words import schedule_of


def thrifty(problem: Problem, name: str) -> Iterator[Order]:
    """One order for each number of microbatches under way, from one up to as many as there are ranks."""
    shop = Shop.of(problem)
    for under_way in range(1, min(problem.num_microbatches, shop.num_ranks) + 1):
        yield Order(problem, schedule_of(shop, _words(shop, under_way)), name)


def _words(shop: Shop, under_way: int) -> Words:
    stages = range(len(shop.home))
    way = [stage << 2 | F for stage in stages] + [stage << 2 | B for stage in reversed(stages)]
    # Microbatches set out so far apart that one leaves before the next but `under_way` enters.
    apart = -(-len(way) // under_way)
    passes = [
        (microbatch * apart + step, microbatch, step)
        for microbatch in range(shop.num_microbatches)
        for step in range(len(way))
    ]
    words: Words = [[] for _ in range(shop.num_ranks)]
    for _, _, step in sorted(passes):
        words[shop.home[way[step] >> 2]].append(way[step])
    return words
