"""What a step takes beyond the passes of a model that runs alone, whatever the model.

That is the CPU time of the runtime for every pass, message and step, and the time that ranks of one machine lose to
each other. A new term is a field of Overhead. `Cluster.costs_on_ranks` applies it to the passes of a stage; `simulate`
and the synthesis of schedules begin a step with `step_seconds`. `api/local_ranks.py` measures them.
"""

from bisect import bisect_left
from dataclasses import dataclass

from penstock.errors import CostError
from penstock.ir.arguments import is_count, is_finite


@dataclass(frozen=True)
class MessageCpu:
    """CPU seconds of messages of one size, beyond those of a message without content."""

    bytes: int
    """bytes of the message"""
    send_seconds: float
    """of the rank that sends it"""
    receive_seconds: float
    """of the rank that receives it"""

    def __post_init__(self) -> None:
        if not is_count(self.bytes):
            raise CostError("bytes of a message must be a whole number, 1 or more", got=repr(self.bytes))
        for name in ("send_seconds", "receive_seconds"):
            _check_seconds(name, getattr(self, name))


@dataclass(frozen=True)
class Overhead:
    """Seconds of a rank's CPU that the runtime takes besides the model, and how much ranks slow each other down.

    Unlike the latency of a link, these seconds occupy the rank, so nothing hides them. `Cluster.costs_on_ranks`
    includes `slowdown` and the seconds of passes and messages in the costs of stages, and `simulate` begins with those
    of the step.
    """

    pass_seconds: float = 0.0
    """of every forward and of every backward, split or not; a weight gradient only runs what that prepared"""
    message_seconds: float = 0.0
    """of every message, at the sender and again at the receiver"""
    step_seconds: float = 0.0
    """of every step, in which all ranks synchronise"""
    messages: tuple[MessageCpu, ...] = ()
    """further seconds of messages by their size, smallest first; linear between sizes and beyond the last one"""
    slowdown: float = 1.0
    """how many times longer passes take than alone, because other ranks use the same caches and memory"""

    def __post_init__(self) -> None:
        for name in ("pass_seconds", "message_seconds", "step_seconds"):
            _check_seconds(name, getattr(self, name))
        if not is_finite(self.slowdown) or self.slowdown < 1:
            raise CostError("slowdown must be a finite factor, 1 or more", got=repr(self.slowdown))
        object.__setattr__(self, "messages", tuple(self.messages))
        for each in self.messages:
            if not isinstance(each, MessageCpu):
                raise CostError("messages must be MessageCpu records", got=repr(each))
        sizes = [each.bytes for each in self.messages]
        if sizes != sorted(set(sizes)):
            raise CostError("messages must have ascending sizes", got=sizes)

    def send_seconds(self, num_bytes: float) -> float:
        """CPU seconds that a rank takes to send a message of this size."""
        return self.message_seconds + self._by_size(num_bytes, [each.send_seconds for each in self.messages])

    def receive_seconds(self, num_bytes: float) -> float:
        """CPU seconds that a rank takes to receive a message of this size."""
        return self.message_seconds + self._by_size(num_bytes, [each.receive_seconds for each in self.messages])

    def _by_size(self, num_bytes: float, seconds: list[float]) -> float:
        if not seconds:
            return 0.0
        sizes, seconds = [0, *(each.bytes for each in self.messages)], [0.0, *seconds]
        last = max(min(bisect_left(sizes, num_bytes), len(sizes) - 1), 1)
        share = (num_bytes - sizes[last - 1]) / (sizes[last] - sizes[last - 1])
        # A rate of the last two sizes that is below 0, by noise, must not make larger messages free.
        return max(seconds[last - 1] + share * (seconds[last] - seconds[last - 1]), 0.0)


def _check_seconds(name: str, value: float) -> None:
    if not is_finite(value) or value < 0:
        raise CostError(f"{name} must be finite seconds, 0 or more", got=repr(value))
