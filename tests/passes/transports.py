"""The two ways in which messages move between threads, and the hall in which the threads wait for each other.

A message is known by its key (source stage, target stage, microbatch); a mailbox is the buffer that a receive posts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import Condition
from typing import NamedTuple

Key = tuple[int, int, int]


class WrongRunError(Exception):
    """The run did something unlawful, hangs, or ended with a wrong result."""


class StoppedError(Exception):
    """Another rank went wrong, so this one ends too."""


class Hall:
    """Where ranks wait. It sees a hang at once: nobody is awake, and somebody still waits.

    A rank is awake until it waits or leaves. Any change wakes all who wait, since it may be what they wait for. The
    deadline is a safety net for mistakes in this file; no verdict depends on it.
    """

    DEADLINE_SECONDS = 60.0

    def __init__(self, num_ranks: int) -> None:
        self.changed = Condition()
        self.failure: Exception | None = None
        self._awake = num_ranks
        self._waiting = 0

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait, with `changed` held, until something is so."""
        while self._go_on() and not ready():
            self._waiting += 1
            self._leave_awake()
            if self._go_on() and not self.changed.wait(self.DEADLINE_SECONDS):
                raise AssertionError("the deadline passed although not all ranks wait")

    def tell(self) -> None:
        """Say, with `changed` held, that something has changed."""
        self._awake += self._waiting
        self._waiting = 0
        self.changed.notify_all()

    def leave(self, failure: Exception | None = None) -> None:
        """A rank is done, or gives up."""
        with self.changed:
            if failure and not isinstance(failure, StoppedError):
                self._fail(failure)
            self._leave_awake()

    def _leave_awake(self) -> None:
        self._awake -= 1
        if not self._awake and self._waiting:
            self._fail(WrongRunError("hang: every rank that has not finished waits"))

    def _fail(self, failure: Exception) -> None:
        self.failure = self.failure or failure
        self.tell()

    def _go_on(self) -> bool:
        if self.failure:
            raise StoppedError
        return True


class Transport(ABC):
    """Moves messages between ranks; each method is called by the rank that acts, in its order."""

    def __init__(self, num_ranks: int) -> None:
        self.hall = Hall(num_ranks)
        self._delivered: dict[Key, int] = {}
        self._posted: set[Key] = set()

    @abstractmethod
    def send(self, ranks: tuple[int, int], key: Key, values: int) -> None:
        """Rank `ranks[0]` sends to rank `ranks[1]`."""

    @abstractmethod
    def post(self, ranks: tuple[int, int], key: Key) -> None:
        """Rank `ranks[0]` posts a mailbox for a message from rank `ranks[1]`; it does not wait."""

    @abstractmethod
    def check_nothing_is_left(self) -> None:
        """Every message that was begun has arrived."""

    def take(self, key: Key) -> int:
        """What arrived in a mailbox, which this rank has posted before."""
        with self.hall.changed:
            if key not in self._posted:
                raise WrongRunError(f"the values of message {key} are used before their receive is posted")
            self.hall.wait_until(lambda: key in self._delivered)
            return self._delivered[key]


class Rendezvous(Transport):
    """A send waits until the mailbox with its key is posted."""

    def send(self, ranks: tuple[int, int], key: Key, values: int) -> None:
        with self.hall.changed:
            self.hall.wait_until(lambda: key in self._posted)
            self._delivered[key] = values
            self.hall.tell()

    def post(self, ranks: tuple[int, int], key: Key) -> None:
        with self.hall.changed:
            self._posted.add(key)
            self.hall.tell()

    def check_nothing_is_left(self) -> None:
        if left := self._posted - set(self._delivered):
            raise WrongRunError(f"mailboxes stay empty: {sorted(left)}")


class End(NamedTuple):
    """One end of a message as a transport without tags sees it: a direction, and a buffer."""

    sends: bool
    key: Key
    values: int


class InOrder(Transport):
    """Nothing waits at a send or a receive; the k-th end that one rank of a pair issues meets the k-th of the other.

    Keys are not looked at: what is sent lands in the mailbox that happens to meet it. Two sends, or two receives, never
    meet, and block all that come after them.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._issued: dict[tuple[int, int], list[End]] = {}
        self._met: dict[tuple[int, int], int] = {}

    def send(self, ranks: tuple[int, int], key: Key, values: int) -> None:
        with self.hall.changed:
            self._issue(ranks, End(True, key, values))

    def post(self, ranks: tuple[int, int], key: Key) -> None:
        with self.hall.changed:
            self._posted.add(key)
            self._issue(ranks, End(False, key, 0))

    def check_nothing_is_left(self) -> None:
        for ranks, ends in self._issued.items():
            if self._met.get((min(ranks), max(ranks)), 0) < len(ends):
                raise WrongRunError(f"ranks {ranks} leave messages that never met: {ends}")

    def _issue(self, ranks: tuple[int, int], end: End) -> None:
        own, other = (self._issued.setdefault(way, []) for way in (ranks, ranks[::-1]))
        own.append(end)
        pair = (min(ranks), max(ranks))
        first = self._met.get(pair, 0)
        for mine, theirs in zip(own[first:], other[first:], strict=False):
            if mine.sends == theirs.sends:
                return
            sent, mailbox = (mine, theirs) if mine.sends else (theirs, mine)
            self._delivered[mailbox.key] = sent.values
            self._met[pair] = self._met.get(pair, 0) + 1
            self.hall.tell()
