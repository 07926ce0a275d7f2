"""Detail: how much a page shows of what is too much for it, and what it says about the rest."""

from typing import NamedTuple

from penstock.views.page.contents import Contents


class Detail(NamedTuple):
    """How much a page shows."""

    zoom: bool = True
    """whether the timelines can be zoomed into"""
    stills: int = 2
    """how many timelines are also pictures, which need no script"""
    memory: bool = True
    """whether the memory of every rank is drawn"""


DETAILS = (
    Detail(),
    Detail(stills=1),
    Detail(zoom=False),
    Detail(zoom=False, stills=1),
    Detail(zoom=False, stills=1, memory=False),
    Detail(zoom=False, stills=0, memory=False),
)
"""from the most to the least; the first that keeps the page small enough is taken"""


def left_out(contents: Contents, is_zoomed: bool, detail: Detail) -> str:
    """What is not shown, and where it is, in words."""
    missing = []
    if not is_zoomed:
        missing.append("zoom into" if detail.stills else "draw")
    if 0 < detail.stills < len(contents.traces):
        missing.append("draw other than as predicted" if not is_zoomed else "also draw both without JavaScript")
    if not missing:
        return ""
    actions = sum(len(trace.starts) for trace in contents.traces.values())
    memory = "" if detail.memory else " Memory over time is left out as well."
    return (
        f"{actions:,} actions are too many to {' or to '.join(missing)} in a page of this size;"
        f" penstock trace writes them for a viewer that has room.{memory}"
    )
