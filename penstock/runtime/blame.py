"""Blame: what was the first in a step to be no finite number, and how all ranks learn it from the one that knows."""

import json
from dataclasses import dataclass, replace

import torch

from penstock.runtime.groups import ProcessGroups

_NOBODY = -1


@dataclass(frozen=True)
class Blame:
    """What broke first, in which stage and, where that is known, in which microbatch."""

    stage: int
    microbatch: int | None = None
    what: str = ""

    def because(self, what: str) -> "Blame":
        """The same place, and what broke there."""
        return replace(self, what=what)

    @property
    def values(self) -> dict[str, object]:
        """What an error says of it."""
        place = {} if self.microbatch is None else {"microbatch": self.microbatch}
        return {"first_not_finite": self.what, **place}


def agreed(groups: ProcessGroups, own: Blame | None) -> Blame | None:
    """What the ranks found, on all of them the same: that of the last stage, of the first replica that found any."""
    stages = groups.gather(torch.tensor([_NOBODY if own is None else own.stage])).flatten().tolist()
    text = json.dumps(None if own is None else [own.stage, own.microbatch, own.what])
    text = groups.broadcast_text(text, stages.index(max(stages)))
    found = groups.gather_replicas(torch.tensor([int(max(stages) != _NOBODY)])).flatten().tolist()
    told = json.loads(groups.broadcast_text_to_replicas(text, found.index(max(found))))
    return None if told is None else Blame(*told)
