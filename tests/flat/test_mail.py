"""Messages say what they hold, and one that is not the expected one is refused."""

from collections import defaultdict, deque
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.flat.messages import Messages
from penstock.ir import Recv, Send
from penstock.runtime import DistributedTransport


class Work:
    """Done at once, or when what is awaited has been sent."""

    def __init__(self, letters: deque[Tensor], buffer: Tensor | None = None) -> None:
        self._letters, self._buffer = letters, buffer

    def wait(self, _: timedelta) -> None:
        if self._buffer is not None:
            self._buffer.copy_(self._letters.popleft())


class Post:
    """Stands for a process group: letters lie in the box of their tag until they are received."""

    def __init__(self) -> None:
        self._boxes: dict[int, deque[Tensor]] = defaultdict(deque)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self._boxes[tag].append(tensors[0])
        return Work(self._boxes[tag])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return Work(self._boxes[tag], tensors[0])


class Nobody:
    """Hears of waits and does nothing."""

    deadline = timedelta(seconds=1)

    def waiting(self, code: int, peer: int) -> None:
        """Nothing to note."""


def carried(values: list[Tensor], sent_in: int = 0, expected_in: int = 0) -> list[Tensor]:
    """What arrives of values sent from stage 0 to stage 1, each in a call of its own number."""
    between = DistributedTransport(Post(), torch.device("cpu"), Nobody())  # type: ignore[arg-type]
    Messages(between, sent_in).send(Send(0, 2, 1), 7, values)
    receiver = Messages(between, expected_in)
    receiver.expect(Recv(1, 2, 0), 8)
    return receiver.take((0, 1, 2))


def test_values_of_any_shape_and_type_arrive_as_they_were_laid_out() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    values = [image, torch.arange(3), torch.zeros(0, 5), torch.randn(2, dtype=torch.complex64), torch.tensor(1.5)]
    arrived = carried(values)
    assert all(map(torch.equal, arrived, values))
    assert [value.dtype for value in arrived] == [value.dtype for value in values]
    assert arrived[0].stride() == image.stride()
    assert [value.requires_grad for value in arrived] == [True, False, False, False, False]


def test_a_message_of_another_call_is_refused() -> None:
    with pytest.raises(RunError, match=r"another call.*\n?.*expected: \(4, 0, 1, 2\), found: \(3, 0, 1, 2\)"):
        carried([torch.zeros(1)], sent_in=3, expected_in=4)


def test_more_values_than_a_header_has_room_for_are_refused() -> None:
    with pytest.raises(RunError, match=r"too many values for the header of a message \(values: 300"):
        carried([torch.zeros(1)] * 300)
