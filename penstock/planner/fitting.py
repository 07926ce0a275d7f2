"""Fitting: whether a plan keeps within the memory of every rank, and by how much it does not."""

from penstock.ir import Plan, bytes_text


def excess(plan: Plan) -> int:
    """Bytes that the worst rank is short of; 0 for a plan that fits."""
    return max((peak - limit for peak, limit in _pairs(plan)), default=0)


def worst_rank(plan: Plan) -> int:
    """The rank that is nearest to its limit, or farthest above it."""
    over = [peak - limit for peak, limit in _pairs(plan)]
    return over.index(max(over))


def shortage(plan: Plan) -> str:
    """What is short, in words."""
    rank = worst_rank(plan)
    peak, limit = plan.predicted.peaks[rank], plan.cluster.limits[rank]
    return f"rank {rank} lacks {bytes_text(peak - limit)}: it would hold {bytes_text(peak)} of {bytes_text(limit)}"


def _pairs(plan: Plan) -> list[tuple[int, int]]:
    return list(zip(plan.predicted.peaks, plan.cluster.limits, strict=False))
