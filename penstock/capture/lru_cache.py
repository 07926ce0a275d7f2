"""A bounded cache that keeps the entries used last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

MAX_RECORDINGS = 256
"""recordings that a captured model keeps, and entries of every cache of things made from recordings"""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A dict with a limit on its entries: a new one takes the place of the least recently used.

    Every new shape of a batch adds entries to several caches, so a run with changing lengths would otherwise need more
    memory with every length.
    """

    def __init__(self, size: int | None = None) -> None:
        """`size` is MAX_RECORDINGS by default."""
        self._size = MAX_RECORDINGS if size is None else size
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, by `make` if it is missing; marks it as used."""
        if key not in self._entries:
            self.put(key, make())
        self._entries.move_to_end(key)
        return self._entries[key]

    def find(self, key: K) -> V | None:
        """The value of a key, or None; marks it as used."""
        try:
            self._entries.move_to_end(key)
        except KeyError:
            return None
        return self._entries[key]

    def put(self, key: K, value: V) -> list[V]:
        """Set the value of a key; returns the values that this removed."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        return [self._entries.popitem(last=False)[1] for _ in range(len(self._entries) - self._size)]

    def values(self) -> Iterator[V]:
        """All values, the least recently used first."""
        return iter(self._entries.values())

    def __getitem__(self, key: K) -> V:
        """The value of a key, which this does not mark as used."""
        return self._entries[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
