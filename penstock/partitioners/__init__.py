"""FAMILY: Problem -> Division, one way to cut per file; explicit cuts beside them."""

from penstock.errors import PartitionError
from penstock.ir import find_named
from penstock.partitioners.acyclic import Acyclic
from penstock.partitioners.assess import assess, moves
from penstock.partitioners.auto import Auto
from penstock.partitioners.base import Division, Holding, Partitioner, Problem
from penstock.partitioners.explicit import by_modules, cut_after, cut_before
from penstock.partitioners.linear import Linear
from penstock.partitioners.metis import Metis
from penstock.partitioners.mpipe import MPipe
from penstock.partitioners.parameters import Parameters
from penstock.partitioners.pipedream import PipeDream
from penstock.partitioners.uniform import Uniform, uniform

PARTITIONERS: dict[str, type[Partitioner]] = {
    "uniform": Uniform,
    "parameters": Parameters,
    "linear": Linear,
    "pipedream": PipeDream,
    "metis": Metis,
    "mpipe": MPipe,
    "acyclic": Acyclic,
    "auto": Auto,
}

__all__ = [
    "PARTITIONERS",
    "Division",
    "Holding",
    "Problem",
    "assess",
    "by_modules",
    "cut_after",
    "cut_before",
    "divide",
    "find",
    "moves",
    "uniform",
]


def divide(name: str, problem: Problem) -> Division:
    """The division that the named partitioner makes with its default options."""
    return find(name)()(problem)


def find(name: str) -> type[Partitioner]:
    """The member of that name; case and punctuation do not matter."""
    return find_named("partitioner", name, PARTITIONERS, PartitionError)
