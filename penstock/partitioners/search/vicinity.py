"""Vicinity: what an atom exchanges with others, so that a move of one atom is judged without judging all of them."""

from dataclasses import dataclass
from functools import cached_property

from penstock.partitioners.atoms.atoms import Atoms, grouped
from penstock.partitioners.atoms.uses import Ints


@dataclass(frozen=True)
class Vicinity:
    """The values and tensors that each atom has to do with, and who else has."""

    atoms: Atoms

    def window(self, atom: int, everyone: Ints, num_stages: int) -> tuple[int, int]:
        """The first and the last stage that the atom may go to."""
        before, after = self.atoms.predecessors[atom], self.atoms.successors[atom]
        first = int(everyone[before].max()) if len(before) else 0
        last = int(everyone[after].min()) if len(after) else num_stages - 1
        return first, last

    def bytes(self, atom: int, target: int, everyone: Ints, ranks: Ints) -> float:
        """Bytes that the values and parameters of the atom cost if it is in the target stage."""
        own = everyone[atom]
        everyone[atom] = target
        total = 0.0
        values, tensors = self.atoms.values, self.atoms.tensors
        for value in self._values[atom]:
            readers = set(everyone[self._readers[value]].tolist())
            owner = ranks[everyone[values.maker[value]]]
            total += (values.forward[value] + values.backward[value]) * sum(ranks[stage] != owner for stage in readers)
        for tensor in self._tensors[atom]:
            holders = set(ranks[everyone[self._users[tensor]]].tolist())
            total += tensors.parameters[tensor] * (len(holders) - 1)
        everyone[atom] = own
        return total

    @cached_property
    def _values(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(len(self.atoms) + 1)]
        for value, maker in enumerate(self.atoms.values.maker.tolist()):
            found[maker].append(value)
        uses = self.atoms.values.uses
        for value, atom in zip(uses.thing.tolist(), uses.atom.tolist(), strict=True):
            if atom != self.atoms.values.maker[value]:
                found[atom].append(value)
        return found

    @cached_property
    def _readers(self) -> tuple[Ints, ...]:
        uses = self.atoms.values.uses
        return grouped(uses.thing, uses.atom, len(self.atoms.values.maker))

    @cached_property
    def _tensors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(len(self.atoms) + 1)]
        for tensor, atom in zip(
            self.atoms.tensors.uses.thing.tolist(), self.atoms.tensors.uses.atom.tolist(), strict=True
        ):
            found[atom].append(tensor)
        return found

    @cached_property
    def _users(self) -> tuple[Ints, ...]:
        return grouped(self.atoms.tensors.uses.thing, self.atoms.tensors.uses.atom, len(self.atoms.tensors.state))
