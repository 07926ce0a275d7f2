"""Lowered programs of all schedules, in many sizes, over chains, skips and branches, with many selections of passes."""

from functools import cache
from itertools import combinations
from random import Random

from penstock.ir import Cuts
from penstock.passes import AddShardMoves, HoistReceives, lower
from penstock.schedules import SCHEDULES, build
from tests.passes.executor import Draft

SELECTIONS = (
    ("add_transfers",),
    ("add_transfers", HoistReceives(ahead=1)),
    ("add_transfers", "add_reductions"),
    ("add_transfers", "add_frees"),
    ("add_transfers", HoistReceives(ahead=3), "add_reductions", "add_frees"),
    ("add_transfers", "hoist_receives", "add_shard_moves"),
    ("add_transfers", "hoist_receives", "add_reductions", AddShardMoves(ahead=1), "add_frees"),
)


def draw(random: Random) -> Draft:
    """A lawful program."""
    name = random.choice(list(SCHEDULES))
    num_ranks, num_microbatches = random.choice((1, 2, 2, 3, 3, 4)), random.randint(1, 4)
    return _lowered(name, num_ranks, num_microbatches, random.randrange(4), random.randrange(len(SELECTIONS)))


@cache
def _lowered(name: str, num_ranks: int, num_microbatches: int, shape: int, selection: int) -> Draft:
    schedule = build(name, num_ranks, num_microbatches)
    cuts = some_cuts(schedule.num_stages, shape)
    program = lower(schedule, cuts=cuts, passes=SELECTIONS[selection])
    return Draft(program.placement, num_microbatches, cuts, program.orders)


def some_cuts(num_stages: int, shape: int) -> Cuts:
    """A chain, a chain with skips, the same where most skips return no gradient, or any graph."""
    random = Random(num_stages)
    chain = Cuts.chain(num_stages).edges
    every = list(combinations(range(num_stages), 2))
    skips = [edge for edge in every if edge not in chain and random.random() < 0.3]
    if shape == 0:
        return Cuts.chain(num_stages)
    if shape == 1:
        return Cuts.of(num_stages, (*chain, *skips))
    if shape == 2:
        return Cuts.of(num_stages, (*chain, *skips), without_gradient=skips[: len(skips) * 2 // 3])
    edges = [edge for edge in every if random.random() < 0.5]
    return Cuts.of(num_stages, edges, without_gradient=[edge for edge in edges if random.random() < 0.3])
