"""recompute: which stages should compute their activations again in the backward."""

from penstock.ir import Plan, StageCosts

Flags = tuple[bool, ...]


def one_more(plan: Plan, plain: StageCosts, thrifty: StageCosts) -> Flags:
    """The stages to recompute next: on every rank that holds too much one more, which frees the most for its time.

    The costs are those without recomputation and those with it everywhere. The same as before if nothing is left to
    recompute there.
    """
    flags = list(plan.choices.recompute)
    freed = [a - b for a, b in zip(plain.activation_bytes, thrifty.activation_bytes, strict=True)]
    for rank, (peak, limit) in enumerate(zip(plan.predicted.peaks, plan.cluster.limits, strict=True)):
        left = [stage for stage in plan.schedule.placement.stages[rank] if not flags[stage]]
        if peak > limit and left:
            flags[max(left, key=lambda stage: freed[stage] / max(plain.forward[stage], 1e-12))] = True
    return tuple(flags)
