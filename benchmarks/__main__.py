"""Runs benchmarks and exits with 1 if a result misses its target.

    python -m benchmarks                                  # the tables behind README's table "Measured"
    python -m benchmarks NAME ...                         # all tables of these benchmarks
    python -m benchmarks runtime_sleep --table "80 ms"    # the tables whose titles contain a text

`--write` also stores the results in benchmarks/results.json.
"""

import argparse
import sys
import time

from benchmarks import (
    asynchronous,
    backward,
    capture,
    concurrent_checkpoints,
    faults,
    joint_plan,
    layouts,
    measure,
    overlap,
    partition,
    planning,
    prediction,
    published,
    rank_failure,
    rank_sync,
    results,
    runtime_compute,
    runtime_memory,
    runtime_sleep,
    saving,
    sequence_lengths,
    slow_ranks,
    synthesis,
    token_budget,
    torchrun_kills,
    two_hosts,
    verifier,
    vocabulary,
)

BENCHMARKS = {
    "planning": planning.tables,
    "verifier": verifier.tables,
    "capture": capture.tables,
    "measure": measure.tables,
    "partition": partition.tables,
    "synthesis": synthesis.tables,
    "joint_plan": joint_plan.tables,
    "layouts": layouts.tables,
    "sequence_lengths": sequence_lengths.tables,
    "token_budget": token_budget.tables,
    "prediction": prediction.tables,
    "published": published.tables,
    "backward": backward.tables,
    "rank_failure": rank_failure.tables,
    "faults": faults.tables,
    "torchrun_kills": torchrun_kills.tables,
    "rank_sync": rank_sync.tables,
    "runtime_memory": runtime_memory.tables,
    "runtime_sleep": runtime_sleep.tables,
    "asynchronous": asynchronous.tables,
    "saving": saving.tables,
    "concurrent_checkpoints": concurrent_checkpoints.tables,
    "slow_ranks": slow_ranks.tables,
    "runtime_compute": runtime_compute.tables,
    "two_hosts": two_hosts.tables,
    "vocabulary": vocabulary.tables,
    "overlap": overlap.tables,
}


def main(args: list[str]) -> int:
    """Runs the benchmarks; returns 0, 1 if a target is missed, or 2 for a usage error."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--write", action="store_true", help=f"store the results in benchmarks/{results.PATH.name}")
    parser.add_argument("--table", default="", metavar="TEXT", help="only the tables whose titles contain TEXT")
    options = parser.parse_args(args)
    names = options.names or dict.fromkeys(row.benchmark for row in results.ROWS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        print(f"unknown benchmark: {unknown[0]}\ntry: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    runs = {}
    for name in names:
        start, available = time.perf_counter(), BENCHMARKS[name]()
        selected = [table for table in available if options.names or results.is_in_readme(name, table)]
        # `show` measures the table.
        tables = tuple(table.show() for table in selected if options.table in table.title)
        seconds = time.perf_counter() - start
        runs[name] = results.Run(results.machine(), seconds, tables)
        if options.write and tables:
            results.write(name, runs[name], [table.title for table in available])
    rows = results.readme_rows(runs)
    if rows:
        print('\nREADME, "Measured"')
    for row in rows:
        print(f"  {'PASS' if row.is_met else 'FAIL'}  {row.what}: {row.result} (target {row.target})")
    if not any(run.tables for run in runs.values()):
        print(f"no table of {', '.join(names)} has {options.table!r} in its title", file=sys.stderr)
        return 2
    failures = [f"{name}: {failure}" for name, run in runs.items() for failure in run.failures]
    print("\nfailed:" if failures else "\nall targets met", *failures, sep="\n  ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
