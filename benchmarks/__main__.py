"""Runs the named benchmarks, or what README's table "Measured" shows, and fails if a line misses its target.

`python -m benchmarks [--write] [NAME ...]`; with `--write` the results are stored in `benchmarks/results.json`, beside
those of other benchmarks and tables.
`python -m benchmarks runtime_sleep --table "80 ms"` runs only the tables with this text in their titles.
"""

import argparse
import sys
import time
from datetime import UTC, datetime

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
    results,
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


def main(args: list[str]) -> int:
    """Show tables, what README shows of them, and what failed; 0 if nothing has, 1 otherwise, 2 for a wrong call."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(SCRIPTS)}")
    parser.add_argument("--write", action="store_true", help=f"store the results in benchmarks/{results.PATH.name}")
    parser.add_argument("--table", default="", metavar="TEXT", help="only the tables whose titles contain TEXT")
    options = parser.parse_args(args)
    names = options.names or dict.fromkeys(row.benchmark for row in results.ROWS)
    if unknown := [name for name in names if name not in SCRIPTS]:
        print(f"unknown benchmark (name: {unknown[0]})\ntry: {', '.join(SCRIPTS)}", file=sys.stderr)
        return 2
    runs = {}
    for name in names:
        began, known = time.perf_counter(), SCRIPTS[name]()
        chosen = [table for table in known if options.names or results.is_in_readme(name, table)]
        # A table is measured when it is shown.
        tables = tuple(table.show() for table in chosen if options.table in table.title)
        seconds = time.perf_counter() - began
        runs[name] = results.Run(f"{datetime.now(UTC):%Y-%m-%d}", results.machine(), seconds, tables)
        if options.write and tables:
            results.write(name, runs[name], [table.title for table in known])
    rows = results.measured(runs)
    if rows:
        print('\nREADME, "Measured"')
    for what, result, target, verdict, _ in rows:
        print(f"  {verdict}  {what}: {result} (target {target})")
    if not any(run.tables for run in runs.values()):
        print(f"no table of {', '.join(names)} has {options.table!r} in its title", file=sys.stderr)
        return 2
    failures = [f"{name}: {failure}" for name, run in runs.items() for failure in run.failures]
    print("\nfailed:" if failures else "\nall targets are met", *failures, sep="\n  ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
