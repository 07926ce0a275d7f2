"""partition: load of the busiest rank by partitioner, compared with proven bounds, and CPU time of partitioning."""

from collections.abc import Iterator

import numpy as np

from benchmarks.graphs import BYTES_PER_UNIT, DATA, PIPEDREAM, Measured, chain, devices, pipedream
from benchmarks.table import Line, Table
from benchmarks.timing import cpu_seconds
from penstock.ir import Cluster, Placement
from penstock.partitioners import PARTITIONERS, Division, Problem, divide

OPTIMA = {"bert24_inference": 17.7899, "bert24_training": 41.7458, "resnet50_inference": 33.7747}
"""load of the busiest device in the optimal partition, from the README of the data"""
SLOW = 10.0
"""slowness of the CPU compared with a device"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    ours = (speed(), several_per_rank(), mixed())
    return (*ours, measured(), fewest_bytes(), known_optima()) if DATA.exists() else ours


def speed(nodes: int = 10_000, stages: int = 64, times: int = 7) -> Table:
    """CPU milliseconds of the optimal cut into contiguous stages, from graph and profile to the partition."""

    def lines() -> Iterator[Line]:
        costs = np.random.default_rng(0).lognormal(size=nodes).tolist()
        graph, profile = chain(costs)
        seconds = cpu_seconds(lambda: divide("linear", Problem(graph, profile, Cluster(stages))), times)
        division = divide("linear", Problem(graph, profile, Cluster(stages)))
        cells = ("linear", f"{nodes:,}", str(stages), f"{division.ratio:.4f}", f"{seconds * 1000:.1f}")
        yield Line(cells, seconds * 1000, 50.0, at_least=False)

    return Table(
        "optimal cut into contiguous stages, CPU time", ("partitioner", "nodes", "stages", "ratio", "ms"), lines()
    )


def several_per_rank(ranks: int = 8, layers: int = 32, head: int = 4) -> Table:
    """Equal layers and a heavy head: load of the busiest rank divided by the mean load."""

    def lines() -> Iterator[Line]:
        graph, profile = chain([1.0] * layers + [float(head)])
        mean = (layers + head) / ranks
        for name, placement in (("loop", Placement.loop(ranks, 2)), ("vee", Placement.vee(ranks))):
            stages = divide("uniform", Problem(graph, profile, Cluster(ranks), placement))
            sums = divide("linear", Problem(graph, profile, Cluster(ranks), placement))
            ratios = [division.bottleneck_seconds / mean for division in (stages, sums)]
            proven = sums.contiguous_bound_seconds / mean
            yield Line((name, *(f"{each:.3f}" for each in (*ratios, proven))), ratios[1], 1.112, at_least=False)

    title = f"{layers} equal layers and a head worth {head} on {ranks} ranks, 2 stages each"
    return Table(f"{title}: busiest rank / mean load", ("placement", "uniform", "linear", "bound"), lines())


def mixed() -> Table:
    """Heavy blocks followed by light ones, which only several stages per rank can balance."""

    def lines() -> Iterator[Line]:
        problem = Problem(*chain([4.0] * 8 + [1.0] * 8), Cluster(4))
        for name, target in (("linear", 12.0), ("mpipe", 10.0)):
            division = divide(name, problem)
            cells = (name, str(division.partition.num_stages), f"{division.bottleneck_seconds:g}")
            yield Line(cells, division.bottleneck_seconds, target, at_least=False)

    return Table(
        "costs [4] * 8 + [1] * 8 on 4 ranks: load of the busiest rank", ("partitioner", "stages", "seconds"), lines()
    )


def measured(names: tuple[str, ...] = PIPEDREAM) -> Table:
    """Graphs profiled by PipeDream: busiest rank / mean load of every partitioner; `acyclic` / its proven bound."""
    members = [name for name, each in PARTITIONERS.items() if not each.chooses_placement and each.is_available()]

    def lines() -> Iterator[Line]:
        for name in names:
            graph, profile = pipedream(name)
            for ranks in (4, 8):
                found = {each: _checked(each, (graph, profile), ranks) for each in members}
                shares = [found[each].bottleneck_seconds * ranks / profile.seconds for each in members]
                best = found["acyclic"]
                cells = (f"{name} {ranks}", *(f"{share:.3f}" for share in shares), f"{best.ratio:.3f}")
                yield Line(cells, best.ratio, 1.03, at_least=False)

    return Table("busiest rank / mean load; acyclic / its bound", ("graph", *members, "/ bound"), lines())


def fewest_bytes(names: tuple[str, ...] = PIPEDREAM) -> Table:
    """Bytes over the cuts of `acyclic` divided by those of `linear`, where both have the same busiest rank."""

    def lines() -> Iterator[Line]:
        for name in names:
            for ranks in (4, 8):
                problem = Problem(*pipedream(name), Cluster(ranks))
                linear, acyclic = divide("linear", problem), divide("acyclic", problem)
                is_equal = np.isclose(linear.bottleneck_seconds, acyclic.bottleneck_seconds)
                ratio = acyclic.cut_bytes / linear.cut_bytes if is_equal else 0.0
                gain = 1 - acyclic.bottleneck_seconds / linear.bottleneck_seconds
                cells = (f"{name} {ranks}", f"{gain:.1%}", f"{acyclic.cut_bytes / linear.cut_bytes:.3f}")
                yield Line(cells, ratio, 1.0, at_least=False)

    title = "acyclic compared with linear: seconds saved, and bytes over the cuts, which have a target at equal seconds"
    return Table(title, ("graph", "shorter by", "bytes"), lines())


def known_optima(optima: dict[str, float] | None = None) -> Table:
    """Six devices and a CPU at any position, without overlap of messages, compared with the known optimum."""

    def lines() -> Iterator[Line]:
        for name, known in (optima or OPTIMA).items():
            graph, profile, memory = devices(name)
            cluster = Cluster(6, memory=memory, bandwidth=BYTES_PER_UNIT)
            without = divide("acyclic", Problem(graph, profile, cluster, overlaps=False)).bottleneck_seconds
            least = min(without, *(_with_slow(name, at) for at in range(7)))
            cells = (
                name.replace("_inference", "").replace("training", "tr"),
                f"{without:.4f}",
                f"{least:.4f}",
                f"{known:.4f}",
            )
            yield Line(cells, abs(least / known - 1), 1e-5, at_least=False)

    columns = ("graph", "6 devices", "and a CPU", "optimum")
    return Table("busiest device compared with the known optimum", columns, lines())


def _with_slow(name: str, at: int) -> float:
    graph, profile, memory = devices(name)
    slowness = [1.0] * 7
    slowness[at] = SLOW
    cluster = Cluster(7, memory=memory, bandwidth=BYTES_PER_UNIT, slowness=tuple(slowness))
    return divide("acyclic", Problem(graph, profile, cluster, overlaps=False)).bottleneck_seconds


def _checked(name: str, measured: Measured, ranks: int) -> Division:
    """Divides the graph and checks that the stages have no cyclic dependency."""
    division = divide(name, Problem(*measured, Cluster(ranks)))
    division.partition.check(measured[0])
    return division
