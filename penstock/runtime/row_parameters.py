"""Parameters that are rows of parameters of the unsplit model, as those of an output layer with `vocabulary_shards`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import RowSlice, row_slices, whole_parameters
from penstock.errors import PlanError
from penstock.ir import Plan
from penstock.runtime.gradients import dense, receive_tensor, send_tensor
from penstock.runtime.groups import ProcessGroups
from penstock.stages import parameter_ranks


@dataclass(frozen=True)
class RowParameter:
    """A parameter that is some rows of a whole one, as in a split output layer.

    `rows` and `whole` are None on ranks that do not have them.
    """

    name: str
    slice: RowSlice
    rows: nn.Parameter | None
    whole: nn.Parameter | None
    rows_rank: int
    whole_rank: int | None
    """None: no rank has the whole parameter"""


class RowParameters:
    """All row parameters of a model; adds their gradients to that of the whole parameter, where some rank has it.

    On the rank of the whole parameter the rows share its memory, and only the whole parameter is trained. Rows on other
    ranks are trained there, with the sum of both gradients.
    """

    def __init__(self, groups: ProcessGroups, plan: Plan, model: nn.Module, own: Mapping[str, nn.Parameter]) -> None:
        """`own`: the parameters of this process's stages by name."""
        self._groups = groups
        self.slices = row_slices(model)
        """the rows by the names of their parameters, on every rank"""
        self._all = self._find(plan, whole_parameters(model), own)
        self._summed = [
            row for row in self._all if row.whole_rank is not None and not (row.rows is None and row.whole is None)
        ]
        held = {value.name for value in plan.graph.parameters}
        self.split_names: dict[str, list[str]] = {}
        """the parameters that no rank has whole, each with the names of its rows in order"""
        for name, row_slice in self.slices.items():
            if row_slice.whole not in held:
                self.split_names.setdefault(row_slice.whole, []).append(name)
        self.replaced = {id(row.rows): row for row in self._summed if row.rows is not None and row.whole is not None}
        """the rows that a whole parameter of this process replaces, by the ids of their parameters"""
        for row in self.replaced.values():
            # They share memory already, unless the model was on the meta device.
            row.rows.data = row.slice.of(row.whole.data)

    def _find(
        self, plan: Plan, wholes: Mapping[str, nn.Parameter], own: Mapping[str, nn.Parameter]
    ) -> list[RowParameter]:
        """The parameters that are rows of others, in the order of the graph, with the ranks of both."""
        found, users = [], parameter_ranks(plan)
        for name, row_slice in self.slices.items():
            (rank,) = users[name]
            holders = users.get(plan.graph.tensor_of(row_slice.whole), set())
            if len(holders) > 1 and not self._groups.is_local:
                raise PlanError(
                    "a parameter that is tied to a split output layer must be used on one rank only",
                    name=row_slice.whole,
                    ranks=sorted(holders),
                    hint="vocabulary_shards=None",
                )
            whole, whole_rank = own.get(row_slice.whole), next(iter(holders), None)
            if self._groups.is_local:
                if whole is None and not wholes[row_slice.whole].is_meta:
                    # The user's own parameter, whose memory the rows share.
                    whole = wholes[row_slice.whole]
                rank, whole_rank = 0, None if whole is None else 0
            found.append(RowParameter(name, row_slice, own.get(name), whole, rank, whole_rank))
        return found

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are summed."""
        return [p for row in self._summed for p in (row.rows, row.whole) if p is not None]

    @property
    def trained(self) -> dict[int, RowSlice]:
        """The rows that this process trains in place of a whole parameter, by the ids of their parameters."""
        own = (row for row in self._all if row.rows is not None)
        return {id(row.rows): row.slice for row in own if id(row.rows) not in self.replaced}

    @property
    def not_owned(self) -> set[int]:
        """The ids of rows that the rank of the whole parameter counts in norms."""
        return {id(row.rows) for row in self._summed if row.rows is not None and row.whole is None}

    def finish(self) -> None:
        """Sum on the rank of the whole parameter and send rows back; every rank visits them in the same order."""
        # Two loops: the gradient of a whole parameter is complete only once the rows of all ranks were added to it.
        trained = [row for row in self._summed if (row.rows if row.whole is None else row.whole).requires_grad]
        for row in trained:
            gradient = None if row.rows is None else row.rows.grad
            if row.whole is None:
                send_tensor(self._groups, gradient, row.whole_rank)
                continue
            if row.rows is None:
                gradient = receive_tensor(self._groups, row.slice.of(row.whole), row.rows_rank)
            else:
                row.rows.grad = None
            if gradient is not None:
                total = torch.zeros_like(row.whole) if row.whole.grad is None else dense(row.whole.grad)
                row.slice.of(total).add_(gradient)
                row.whole.grad = total
        for row in trained:
            if row.whole is None:
                row.rows.grad = receive_tensor(self._groups, row.rows, row.whole_rank)
            elif row.rows is None:
                gradient = row.whole.grad
                send_tensor(self._groups, None if gradient is None else row.slice.of(gradient), row.rows_rank)

    def gather(self, whole_name: str, own: Mapping[str, Tensor]) -> Tensor | None:
        """The whole of a tensor of which `own` has the rows of this process by name; a collective call.

        None except on the rank that has the first rows.
        """
        ranks = {row.name: row.rows_rank for row in self._all}
        first, *others = self.split_names[whole_name]
        if self._groups.is_local:
            return torch.cat([own[name] for name in (first, *others)])
        rows = [own[first]] if first in own else []
        for name in others:
            if first in own and name in own:
                rows.append(own[name])
            elif name in own:
                send_tensor(self._groups, own[name], ranks[first])
            elif first in own:
                like = own[first].new_empty((self.slices[name].length, *own[first].shape[1:]))
                received = receive_tensor(self._groups, like, ranks[name])
                rows.append(received)
        return torch.cat(rows) if first in own else None

    def join(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with whole parameters in place of their rows, as far as all rows are there."""
        joined = dict(tensors)
        for originals in dict.fromkeys(row_slice.names for row_slice in self.slices.values()):
            names = [name for name, row_slice in self.slices.items() if row_slice.names == originals]
            whole = joined.get(originals[0])
            if whole is None and all(name in joined for name in names):
                whole = torch.cat([joined[name] for name in names])
            if whole is not None:
                joined = {name: tensor for name, tensor in joined.items() if name not in names}
                joined |= dict.fromkeys(originals, whole)
        return joined

    def split(self, state: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
        """A state dict of the unsplit model with rows in place of whole parameters.

        `names` are those of the split model: a whole parameter that it has too stays.
        """
        found, unused = dict(state), set()
        for name, row_slice in self.slices.items():
            given = [state[other] for other in row_slice.names if other in state]
            if given and isinstance(given[0], Tensor) and len(given[0]) == row_slice.size:
                found.setdefault(name, row_slice.of(given[0]))
                unused.update(set(row_slice.names) - set(names))
        return {name: value for name, value in found.items() if name not in unused}
