"""between: the profile of microbatches of one size, told from those of a smaller and a larger size.

What a node costs is taken to grow in a straight line with the samples: a part that every call takes, and a part that
every sample takes.
"""

from dataclasses import fields, replace
from typing import Any

from penstock.errors import PlanError
from penstock.ir import Graph, NodeCost, Profile


def between(graph: Graph, share: float, small: Profile, large: Profile) -> Profile:
    """The profile for a graph whose size lies that share of the way from the small one to the large one."""
    ours = [node.name for node in graph.nodes]
    for profile in (small, large):
        if [cost.node for cost in profile.costs] != ours:
            raise PlanError("microbatches of other sizes run other nodes", nodes=len(ours), measured=len(profile.costs))
    costs: tuple[NodeCost, ...] = tuple(
        _between(one, other, share) for one, other in zip(small.costs, large.costs, strict=True)
    )
    sizes = dict(large.held)
    held = tuple((name, round(_line(size, sizes.get(name, size), share))) for name, size in small.held)
    step = _line(small.step_seconds, large.step_seconds, share)
    return replace(small, costs=costs, step_seconds=step, fingerprint=graph.fingerprint, held=held)


def _between(one: Any, other: Any, share: float) -> Any:
    """The same record with every figure on the line; whatever is no figure is that of the small size."""
    changed: dict[str, Any] = {}
    for field in fields(one):
        here, there = getattr(one, field.name), getattr(other, field.name)
        if isinstance(here, int):
            changed[field.name] = max(0, round(_line(here, there, share)))
        elif isinstance(here, float):
            changed[field.name] = max(0.0, _line(here, there, share))
        elif hasattr(here, "__dataclass_fields__"):
            changed[field.name] = _between(here, there, share)
    return replace(one, **changed)


def _line(here: float, there: float, share: float) -> float:
    return here + (there - here) * share
