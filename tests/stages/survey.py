"""Survey: runs all trials and writes the table of architectures in the docs (`python -m tests.stages.survey`)."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

from penstock.partitioners import uniform
from tests.stages.trials import DEPTHS, Trial
from tests.zoo import ZOO, ambient

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
_HEAD = """# Architectures

Every model below is built from its configuration, recorded, cut into 2, 3 and 4 stages, and run in training mode with
labels (where it takes any) and without. The last column is the largest relative difference, over all cuts, between the
stages and the model: in any output, any gradient of a parameter or any buffer, in float32 unless the name says
otherwise. *exact* is no difference in any bit. A value that several stages read gets its gradient summed in parts,
which may differ in the last bit. *Sent* is how many tensors cross each of the cuts when there are four stages.

Written by `python -m tests.stages.survey`. `tests/stages` runs the same trials: with `--whole` all of them, else of
every model at both granularities one with labels and one without, so that it meets 2, 3 and 4 stages.

| model | granularity | nodes | sent | difference |
|---|---|---:|---|---|
"""


def row(name: str, granularity: str) -> str:
    """The line of one model at one granularity."""
    trial = Trial(name, granularity)
    with ambient(name):
        sizes = [apart.size for apart in trial.differences().values()]
        graph = trial.recorded("plain")[0].graph
    crossings = uniform(graph, 4).crossings(graph)
    sent = ", ".join(str(len(crossing.values)) for crossing in crossings)
    worst = f"{max(sizes):.0e}" if max(sizes) else "exact"
    return f"| {name} | {granularity} | {len(graph.nodes)} | {sent} | {worst} |"


def main() -> None:
    """Write the table."""
    rows = [row(name, granularity) for name in ZOO for granularity in DEPTHS]
    TABLE.write_text(_HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
