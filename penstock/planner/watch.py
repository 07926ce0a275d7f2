"""Watch: what is told of slow ranks while a plan is trained by, with the plan that would help."""

from penstock.ir import Plan, Trace
from penstock.planner.remedy import call, remedy
from penstock.planner.slow_ranks import SlowRanks


class Watch:
    """Is shown every step of a training on one rank, the first."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ranks = SlowRanks(plan)

    def look(self, step: int, trace: Trace) -> str:
        """A sentence when a step shows a rank to be slow, else empty; steps are numbered as they are told.

        Planning anew takes about a second, once for every rank that becomes slow.
        """
        found = self._ranks.look(step, trace)
        return f"{'; '.join(map(str, found))}; {self._advice()}" if found else ""

    @property
    def slowness(self) -> tuple[float, ...]:
        """How many times longer each rank takes than the profile says, by all that was seen."""
        factors = list(self._plan.cluster.slowness or (1.0,) * self._plan.num_ranks)
        for each in self._ranks.slow:
            factors[each.rank] *= each.over_peers
        return tuple(round(factor, 1) for factor in factors)

    def _advice(self) -> str:
        # Advice must not end a training, whatever is wrong with it.
        try:
            found = remedy(self._plan, self.slowness)
        except Exception:
            found = None
        return str(found) if found is not None else f"to plan for that: {call(self._plan, self.slowness)}"
