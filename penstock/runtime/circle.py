"""Circle: the ranks of one group, of which each shows its row to the last one, who shows all rows to everyone.

That takes two messages for each rank, where a gather of all to all takes as many as there are ranks. Messages are told
apart from all others of the group by their tag, so that collectives of the user never meet with them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.crew import Crew
from penstock.runtime.row import ROW_BYTES

TAG = 2_000_000_011


class Circle:
    """Exchanges rows and texts; `begin` and `end` take turns, on every rank the same number of times."""

    def __init__(self, crew: Crew, group: Any) -> None:
        self._crew, self._group = crew, group
        self._rank, self._last = dist.get_rank(group), dist.get_world_size(group) - 1
        self._table = bytearray((self._last + 1) * ROW_BYTES)
        self._whole = torch.frombuffer(self._table, dtype=torch.uint8)
        self._rows = self._whole.split(ROW_BYTES)
        self._under_way: list[Any] = []

    def begin(self, row: bytes) -> None:
        """Show the own row; does not wait for anybody."""
        start = self._rank * ROW_BYTES
        self._table[start : start + ROW_BYTES] = row
        if self._rank == self._last:
            self._under_way = [self._receive(self._rows[rank], rank) for rank in range(self._last)]
        else:
            # The answer, which holds the own row too, does not come before that has been sent.
            self._under_way = [self._receive(self._whole, self._last), self._send(self._rows[self._rank], self._last)]

    def end(self) -> bytes:
        """The rows of all ranks, one after another."""
        self._wait_for(self._under_way)
        if self._rank == self._last:
            self._wait_for([self._send(self._whole, rank) for rank in range(self._last)])
        return bytes(self._table)

    def texts(self, text: str, sizes: Sequence[int]) -> list[str]:
        """The texts of all ranks, whose sizes in bytes all know from the rows."""
        own, whole = text.encode(), torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = whole.split(list(sizes))
        if self._rank == self._last:
            self._wait_for([self._receive(part, rank) for rank, part in enumerate(parts[:-1]) if len(part)])
            parts[-1].copy_(_tensor(own))
            self._wait_for([self._send(whole, rank) for rank in range(self._last)])
        else:
            sent = [self._send(_tensor(own), self._last)] if own else []
            self._wait_for([self._receive(whole, self._last), *sent])
        return [bytes(part.tolist()).decode() for part in parts]

    def _wait_for(self, works: list[Any]) -> None:
        for work in works:
            self._crew.wait(work)
        self._under_way = []

    def _send(self, tensor: Tensor, rank: int) -> Any:
        return self._crew.start(self._group.send, [tensor], rank, TAG)

    def _receive(self, tensor: Tensor, rank: int) -> Any:
        return self._crew.start(self._group.recv, [tensor], rank, TAG)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
