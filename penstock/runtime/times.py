"""Times: when each action of one rank ran, in seconds of the host's clock."""

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from penstock.runtime.groups import ProcessGroups


@dataclass
class Times:
    """Filled while a step runs; index k is the k-th action of the rank."""

    began: float = field(default_factory=perf_counter)
    """when all ranks had met before the step"""
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def note(self, start: float, end: float) -> None:
        """The next action ran from start to end."""
        self.starts.append(start)
        self.ends.append(end)


def gathered(groups: ProcessGroups, times: Sequence[Times], lengths: Sequence[int]) -> tuple[list[float], list[float]]:
    """Starts and ends of all actions of all ranks, rank by rank, on one clock.

    Processes of one host share its clock; of several hosts, each counts from the moment when all ranks met.
    """
    rows = (
        [_row(one, max(lengths)) for one in times] if groups.is_local else groups.gather(_row(times[0], max(lengths)))
    )
    table = torch.stack(list(rows))
    is_one_host = bool((table[:, 0] == table[0, 0]).all())
    shift = table[:, 2:].min() if is_one_host else table[:, 1:2]
    half = max(lengths)
    starts, ends = table[:, 2 : 2 + half] - shift, table[:, 2 + half :] - shift
    return _joined(starts, lengths), _joined(ends, lengths)


def _row(times: Times, longest: int) -> Tensor:
    """Host, the moment of sync, starts and ends; what is not used repeats the end, so that it is no minimum."""
    row = torch.full((2 + 2 * longest,), max(times.ends, default=times.began), dtype=torch.float64)
    row[0], row[1] = zlib.crc32(socket.gethostname().encode()), times.began
    row[2 : 2 + len(times.starts)] = torch.tensor(times.starts, dtype=torch.float64)
    row[2 + longest : 2 + longest + len(times.ends)] = torch.tensor(times.ends, dtype=torch.float64)
    return row


def _joined(table: Tensor, lengths: Sequence[int]) -> list[float]:
    return [max(float(value), 0.0) for row, length in zip(table, lengths, strict=True) for value in row[:length]]
