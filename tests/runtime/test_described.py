"""Messages carry a header of shapes and dtypes; an unexpected message is refused."""

from collections import defaultdict, deque
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.transports import DescribedTransport, Route


class Work:
    """A send, which is done at once, or a receive, which is done once the tensor was sent."""

    def __init__(self, sent: deque[Tensor], buffer: Tensor | None = None) -> None:
        self._sent, self._buffer = sent, buffer

    def wait(self, _: timedelta) -> None:
        if self._buffer is not None:
            self._buffer.copy_(self._sent.popleft())


class FakeGroup:
    """Stands for a process group: tensors are kept by tag until they are received."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[Tensor]] = defaultdict(deque)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self._sent[tag].append(tensors[0])
        return Work(self._sent[tag])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return Work(self._sent[tag], tensors[0])


class FakeMonitor:
    """Ignores reports of waits."""

    def wait(self, work: Work) -> None:
        work.wait(timedelta(seconds=1))

    def waiting(self, code: int, peer: int) -> None:
        """No-op."""


def transfer(values: list[Tensor | None], sent_in: int = 0, expected_in: int = 0) -> list[Tensor | None]:
    """Send values from stage 0 in one step and receive them on stage 1 in another."""
    groups = SimpleNamespace(control=FakeGroup(), monitor=FakeMonitor())
    transport = DescribedTransport(groups, torch.device("cpu"))  # type: ignore[arg-type]
    key = (0, 1, 2)
    sender, receiver = transport.send_slot(Route(7, key, 1, 0, ())), transport.recv_slot(Route(8, key, 0, 0, ()))
    transport.step_number = sent_in
    sender.put(values)
    sender.send()
    transport.step_number = expected_in
    receiver.post()
    receiver.wait()
    return list(receiver.take())


def test_values_of_any_shape_and_dtype_arrive_with_their_memory_layout() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    values = [image, torch.arange(3), torch.zeros(0, 5), torch.randn(2, dtype=torch.complex64), torch.tensor(1.5)]
    *arrived, nothing = transfer([*values, None])
    assert nothing is None
    assert all(map(torch.equal, arrived, values))
    assert [value.dtype for value in arrived] == [value.dtype for value in values]
    assert arrived[0].stride() == image.stride()
    assert [value.requires_grad for value in arrived] == [True, False, False, False, False]


def test_a_message_of_another_call_is_refused() -> None:
    with pytest.raises(RunError, match=r"another call.*\n?.*expected: \(4, 0, 1, 2\), found: \(3, 0, 1, 2\)"):
        transfer([torch.zeros(1)], sent_in=3, expected_in=4)


def test_more_values_than_fit_in_a_header_are_refused() -> None:
    with pytest.raises(RunError, match=r"the header of a message must have at most 4096 bytes \(got: \d+, values: 300"):
        transfer([torch.zeros(1)] * 300)
