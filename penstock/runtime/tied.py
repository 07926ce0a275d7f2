"""Tied: one parameter that stages of several ranks use; its gradient is the sum over them, on every one the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.runtime.groups import ProcessGroups


@dataclass(frozen=True)
class Shared:
    """A parameter of this rank that other ranks have too; the first of them owns it."""

    name: str
    parameter: nn.Parameter
    ranks: tuple[int, ...]


class Tied:
    """Sums what one step adds to the gradients of shared parameters over their ranks."""

    def __init__(self, groups: ProcessGroups, shared: Sequence[Shared]) -> None:
        self._groups = groups
        self.shared = () if groups.is_local else tuple(shared)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are summed."""
        return [one.parameter for one in self.shared]

    @property
    def borrowed(self) -> set[int]:
        """The identities of parameters that another rank owns: it counts them, this one does not."""
        return {id(one.parameter) for one in self.shared if one.ranks[0] != self._groups.rank}

    def finish(self) -> None:
        """Sum and share; every rank goes through the parameters in the same order."""
        for one in self.shared:
            if one.parameter.requires_grad:
                one.parameter.grad = self._summed(one)

    def _summed(self, one: Shared) -> Tensor | None:
        owner, *others = one.ranks
        total = _dense(one.parameter.grad)
        if self._groups.rank != owner:
            self._send(total, one, owner)
            return self._receive(one, owner)
        for rank in others:
            part = self._receive(one, rank)
            total = part if total is None else total if part is None else total + part
        for rank in others:
            self._send(total, one, rank)
        return total

    def _send(self, gradient: Tensor | None, one: Shared, rank: int) -> None:
        self._ship(torch.tensor([int(gradient is not None)], device=one.parameter.device), rank)
        if gradient is not None:
            self._ship(gradient.contiguous(), rank)

    def _ship(self, tensor: Tensor, rank: int) -> None:
        self._groups.run(dist.isend, tensor, group=self._groups.group, group_dst=rank)

    def _receive(self, one: Shared, rank: int) -> Tensor | None:
        flag = torch.zeros(1, dtype=torch.int64, device=one.parameter.device)
        self._groups.run(dist.irecv, flag, group=self._groups.group, group_src=rank)
        if not int(flag):
            return None
        gradient = torch.empty_like(one.parameter, memory_format=torch.contiguous_format).detach()
        self._groups.run(dist.irecv, gradient, group=self._groups.group, group_src=rank)
        return gradient


def _dense(gradient: Tensor | None) -> Tensor | None:
    """All entries of a gradient, of which a sparse embedding has only some."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
