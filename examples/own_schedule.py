"""Your own order: written by hand, proven, compared with 1f1b and saved as CSV; and one that is refused.

Run it with `python examples/own_schedule.py`. Nothing here imports torch. To add a schedule for everybody, see
CONTRIBUTING.md.
"""

import penstock

# A row per rank, a cell per action: stage, kind (F, B, or I and W), microbatch.
EAGER = """\
0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
"""
BLOCKED = """\
0F0,0B0,0F1,0B1
1F0,1F1,1B0,1B1
"""


def main() -> None:
    """Prove and time one order; show why the other is refused."""
    own = penstock.Schedule.from_csv(EAGER)
    penstock.verify(own)
    for name, schedule in {"own": own, "1f1b": penstock.schedule("1f1b", 2, 4)}.items():
        trace = penstock.simulate(schedule)
        print(f"{name}: {trace.makespan:g} s, {trace.bubble:.1%} bubble")
    try:
        penstock.verify(penstock.Schedule.from_csv(BLOCKED))
    except penstock.PenstockError as error:
        print(error)


if __name__ == "__main__":
    main()
