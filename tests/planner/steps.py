"""Steps as a runtime might record them: the passes of a plan with random noise."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from penstock.ir import Plan, Series, Trace
from penstock.passes import lower
from penstock.planner import PlanOptions, search
from penstock.simulate import simulate
from tests.planner.chains import measured


@cache
def planned(ranks: int = 4, schedule: str = "1f1b", layers: int = 12) -> Plan:
    """Passes of some ten milliseconds."""
    return search({8: measured([4e-3] * layers)}, PlanOptions(ranks, schedule=schedule, budget_seconds=0.0))


class Steps:
    """Steps of a plan with noise: passes are a few per cent off, some of them disturbed, now and then a whole rank."""

    def __init__(self, plan: Plan, seed: int = 0, wrong: Mapping[int, float] | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.predicted = simulate(lower(plan.schedule, cuts=plan.cuts), plan.costs)
        self.wrong = np.ones(plan.num_ranks)
        """how many times longer than planned each rank really takes"""
        for rank, factor in (wrong or {}).items():
            self.wrong[rank] = factor

    def take(self, slow: Mapping[int, float] | None = None) -> Trace:
        """One step, in which some ranks are slow."""
        table, chance = self.predicted.program.table, self.random
        factors = self.wrong.copy()
        for rank, factor in (slow or {}).items():
            factors[rank] *= factor
        factors *= chance.choice([1.0, 1.0, 1.0, 1.0, 3.0]) if chance.random() < 0.1 else 1.0
        factors[chance.integers(len(factors))] *= 2.5 if chance.random() < 0.1 else 1.0
        starts = self.predicted.starts.values
        passes = (self.predicted.ends.values - starts) * factors[table.rank_of]
        passes *= chance.normal(1.05, 0.05, len(passes)).clip(0.9)
        passes[chance.random(len(passes)) < 0.3] *= 2.0  # other work had the core
        return replace(self.predicted, ends=Series(starts + passes))
