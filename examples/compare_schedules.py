"""Compare schedules for 8 ranks whose backward takes longer than the forward, within a memory limit.

Run it with `python examples/compare_schedules.py`. Nothing here imports torch.
"""

import penstock

RANKS, MICROBATCHES = 8, 24
MEMORY = 6.5 * 2**30
CANDIDATES = {"1f1b": 1, "interleaved": 2, "zb_h1": 1, "zb_h2": 1, "zbv": 2, "v_half": 2, "v_min": 2}


def costs_of(stages_per_rank: int) -> penstock.StageCosts:
    """Return costs of 10, 12 and 8 ms and 1 GiB for the layers of a rank, shared by its stages."""
    stages = RANKS * stages_per_rank
    return penstock.StageCosts(
        forward=(0.010 / stages_per_rank,) * stages,
        input_grad=(0.012 / stages_per_rank,) * stages,
        weight_grad=(0.008 / stages_per_rank,) * stages,
        activation_bytes=(2**30 // stages_per_rank,) * stages,
    )


def main() -> None:
    """Print a line per schedule, the fastest first."""
    cluster = penstock.Cluster(RANKS, latency=50e-6)
    lines = []
    for name, stages_per_rank in CANDIDATES.items():
        costs = costs_of(stages_per_rank)
        schedule = penstock.schedule(name, RANKS, MICROBATCHES, costs=costs)
        trace = penstock.simulate(penstock.lower(schedule), costs, cluster)
        peak = max(trace.peak_bytes(rank) for rank in range(RANKS))
        result = "fits" if peak <= MEMORY else "does not fit"
        lines.append((trace.makespan, f"{name:12} {trace.bubble:6.1%} bubble, {peak / 2**30:4.1f} GiB: {result}"))
    for makespan, line in sorted(lines):
        print(f"{1000 * makespan:6.0f} ms  {line}")


if __name__ == "__main__":
    main()
