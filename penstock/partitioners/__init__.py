"""Partitioners: each cuts a measured graph into stages (Problem -> Division); one algorithm per file, one table.

To add one, write a file with a subclass of Partitioner and add it to PARTITIONERS: the command line, `auto` and the
planner read that table. Files in reading order:

    base.py          Problem, Division and Partitioner
    atoms.py         the graph as arrays: groups of nodes that no cut separates, their costs and edges
    costs.py         seconds and bytes of many candidate stages at once
    score.py         seconds and bytes of one partition, the lower bound, and the Division of a result
    search/          algorithms that several partitioners use
    uniform.py, parameters.py, linear.py, pipedream.py, acyclic.py, metis.py, mpipe.py, auto.py
                     the partitioners
    explicit.py      cuts at modules that the user names
"""

from penstock.errors import PartitionError
from penstock.ir import find_named
from penstock.partitioners.acyclic import Acyclic
from penstock.partitioners.auto import Auto
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.explicit import by_modules, cut_at, cut_before, cut_places
from penstock.partitioners.linear import Linear
from penstock.partitioners.metis import Metis
from penstock.partitioners.mpipe import MPipe, mixed
from penstock.partitioners.parameters import Parameters
from penstock.partitioners.pipedream import PipeDream
from penstock.partitioners.uniform import Uniform, uniform

# Of equally good divisions `auto` takes the one of the member that stands first.
PARTITIONERS: dict[str, type[Partitioner]] = {
    "uniform": Uniform,
    "parameters": Parameters,
    "linear": Linear,
    "acyclic": Acyclic,
    "pipedream": PipeDream,
    "metis": Metis,
    "mpipe": MPipe,
    "auto": Auto,
}


def divide(name: str, problem: Problem, is_mixed: bool = False) -> Division:
    """Returns the division by the named partitioner with its default options.

    With `is_mixed`, ranks get several stages that are not neighbours where that evens them out (mixed pipe): in a
    problem without a placement, by every partitioner that supports it.
    """
    member = find(name)()
    has_choice = problem.placement is None and member.supports_mixed and not member.chooses_placement
    return mixed(member, problem) if is_mixed and has_choice else member(problem)


def find(name: str) -> type[Partitioner]:
    """Returns the member of that name; case and punctuation do not matter."""
    return find_named("partitioner", name, PARTITIONERS, PartitionError)
