"""Runs the benchmarks, all or those named, and fails if a line misses its target: `python -m benchmarks [NAME ...]`."""

import sys

from benchmarks import (
    asynchronous,
    backward,
    breaking,
    capture,
    faults,
    joint_plan,
    layouts,
    lengths,
    measure,
    overlap,
    partition,
    planning,
    prediction,
    published,
    rank_sync,
    runtime_compute,
    runtime_memory,
    runtime_sleep,
    saving,
    side_by_side,
    slow_ranks,
    synthesis,
    token_budget,
    torchrun_kills,
    two_hosts,
    verifier,
    vocabulary,
)

SCRIPTS = {
    "planning": planning.tables,
    "verifier": verifier.tables,
    "capture": capture.tables,
    "measure": measure.tables,
    "partition": partition.tables,
    "synthesis": synthesis.tables,
    "joint_plan": joint_plan.tables,
    "layouts": layouts.tables,
    "lengths": lengths.tables,
    "token_budget": token_budget.tables,
    "prediction": prediction.tables,
    "published": published.tables,
    "backward": backward.tables,
    "breaking": breaking.tables,
    "faults": faults.tables,
    "torchrun_kills": torchrun_kills.tables,
    "rank_sync": rank_sync.tables,
    "runtime_memory": runtime_memory.tables,
    "runtime_sleep": runtime_sleep.tables,
    "asynchronous": asynchronous.tables,
    "saving": saving.tables,
    "side_by_side": side_by_side.tables,
    "slow_ranks": slow_ranks.tables,
    "runtime_compute": runtime_compute.tables,
    "two_hosts": two_hosts.tables,
    "vocabulary": vocabulary.tables,
    "overlap": overlap.tables,
}


def main(names: list[str]) -> int:
    """Show the tables of the named scripts; 0 if every line passes, 1 if one fails, 2 for an unknown name."""
    if unknown := [name for name in names if name not in SCRIPTS]:
        print(f"unknown benchmark (name: {unknown[0]})\ntry: {', '.join(SCRIPTS)}", file=sys.stderr)
        return 2
    verdicts = [table.show() for name in names or SCRIPTS for table in SCRIPTS[name]()]
    print(f"\n{'all targets are met' if all(verdicts) else 'a target is missed, see FAIL'}")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
