"""Send and receive slots hold memory only as long as they need it."""

import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.ir import TensorSpec, Value
from penstock.runtime.transports import DescribedTransport, DistributedTransport, LocalTransport, Route, TensorCodec

HOST = torch.device("cpu")


class FakeGroup:
    """Stands for a process group: tensors are kept until they are received; operations can be made to fail."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.buffers: list[weakref.ref[Tensor]] = []
        self.is_down = False

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "Work":
        self.check()
        self.sent.append(tensors[0])
        return Work(self, None)

    def check(self) -> None:
        if self.is_down:
            raise RuntimeError("connection closed")

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "Work":
        self.check()
        self.buffers.append(weakref.ref(tensors[0]))
        return Work(self, tensors[0])


class Work:
    """A send, or a receive into a buffer."""

    def __init__(self, group: FakeGroup, buffer: Tensor | None) -> None:
        self.group, self.buffer = group, buffer

    def wait(self, deadline: timedelta) -> None:
        self.group.check()
        if self.buffer is not None:
            self.buffer.copy_(self.group.sent.pop(0))


class FakeMonitor:
    """Records waits, and creates the error of a lost message."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []

    def waiting(self, code: int, peer: int) -> None:
        self.waits.append((code, peer))

    def wait(self, work: Work) -> None:
        work.wait(timedelta(seconds=1))

    def message_error(self, code: int, peer: int, error: RuntimeError) -> Exception:
        return RunError("lost", code=code, peer=peer, reason=error)


def route(*specs: TensorSpec, is_gradient: bool = False) -> Route:
    codecs = tuple(TensorCodec(Value(f"v{index}", spec), is_gradient) for index, spec in enumerate(specs))
    return Route(7, (1, 0, 0) if is_gradient else (0, 1, 0), 1, 3, codecs)


def described(group: FakeGroup, device: torch.device, monitor: FakeMonitor) -> DescribedTransport:
    return DescribedTransport(SimpleNamespace(control=group, monitor=monitor), device)


VALUE = TensorSpec((2, 3), "float64", requires_grad=True)
LOST = r"lost \(code: 7, peer: 1, reason: connection closed\)"


def test_a_sent_tensor_is_held_without_its_graph_until_it_is_released() -> None:
    group = FakeGroup()
    send_slot = DistributedTransport(group, HOST, FakeMonitor()).send_slot(route(VALUE))
    made = torch.ones(2, 3, dtype=torch.float64, requires_grad=True) * 2
    made_reference = weakref.ref(made)
    send_slot.put([made])
    send_slot.send()
    (sent,) = group.sent
    assert sent.data_ptr() == made.data_ptr()
    assert sent.grad_fn is None
    reference = weakref.ref(sent)
    group.sent.clear()
    del sent, made
    assert made_reference() is None
    assert reference() is not None
    send_slot.release()
    assert reference() is None


def test_a_receive_buffer_is_allocated_by_post_and_dropped_by_take() -> None:
    group = FakeGroup()
    recv_slot = DistributedTransport(group, HOST, FakeMonitor()).recv_slot(route(VALUE))
    assert group.buffers == []
    recv_slot.post()
    (buffer,) = group.buffers
    assert buffer() is not None
    assert buffer().shape == (2, 3)
    group.sent.append(torch.full((2, 3), 5.0, dtype=torch.float64))
    recv_slot.wait()
    (value,) = recv_slot.take()
    assert value is not None
    assert value.requires_grad
    assert value.tolist() == [[5.0] * 3] * 2
    assert list(recv_slot.take()) == []
    del value
    assert buffer() is None


def test_a_gradient_requires_no_gradient_and_is_zero_if_it_was_not_computed() -> None:
    group = FakeGroup()
    transport = DistributedTransport(group, HOST, FakeMonitor())
    send_slot, recv_slot = (
        transport.send_slot(route(VALUE, is_gradient=True)),
        transport.recv_slot(route(VALUE, is_gradient=True)),
    )
    recv_slot.post()
    send_slot.put([None])
    send_slot.send()
    recv_slot.wait()
    (gradient,) = recv_slot.take()
    assert gradient is not None
    assert not gradient.requires_grad
    assert not gradient.any()


def test_only_waits_that_may_block_are_reported() -> None:
    monitor = FakeMonitor()
    send_slot = DistributedTransport(FakeGroup(), HOST, monitor).send_slot(route(VALUE))
    for release in (send_slot.release, send_slot.finish):
        send_slot.put([torch.ones(2, 3, dtype=torch.float64)])
        send_slot.send()
        release()
        send_slot.finish()
    assert monitor.waits == [(7, 1)]


def test_a_lost_message_raises_the_error_of_the_monitor() -> None:
    group = FakeGroup()
    recv_slot = DistributedTransport(group, HOST, FakeMonitor()).recv_slot(route(VALUE))
    recv_slot.post()
    group.is_down = True
    with pytest.raises(RunError, match=LOST):
        recv_slot.wait()


@pytest.mark.parametrize("makes_transport", [DistributedTransport, described])
def test_a_message_that_cannot_be_started_raises_the_error_of_the_monitor(makes_transport: Any) -> None:
    group = FakeGroup()
    transport = makes_transport(group, HOST, FakeMonitor())
    send_slot, recv_slot = transport.send_slot(route(VALUE)), transport.recv_slot(route(VALUE))
    group.is_down = True
    send_slot.put([torch.ones(2, 3, dtype=torch.float64)])
    for start in (send_slot.send, recv_slot.post):
        with pytest.raises(RunError, match=LOST):
            start()


def test_complex_and_transposed_values_arrive_with_their_memory_layout() -> None:
    spec = TensorSpec((2, 3), "complex128", order=(1, 0))
    transport = LocalTransport(HOST)
    send_slot, recv_slot = transport.send_slot(route(spec)), transport.recv_slot(route(spec))
    value = torch.complex(torch.arange(6.0), torch.ones(6)).to(torch.complex128).view(3, 2).t().conj()
    send_slot.put([value])
    send_slot.send()
    assert recv_slot.is_ready
    (received,) = recv_slot.take()
    assert received is not None
    assert torch.equal(received, value)
    assert received.stride() == value.stride()
    assert not recv_slot.is_ready


def test_after_a_failure_nothing_is_held() -> None:
    group = FakeGroup()
    transport = DistributedTransport(group, HOST, FakeMonitor())
    send_slot, recv_slot = transport.send_slot(route(VALUE)), transport.recv_slot(route(VALUE))
    tensors = [torch.ones(2, 3, dtype=torch.float64) for _ in range(2)]
    references = [weakref.ref(tensor) for tensor in tensors]
    send_slot.put([tensors.pop()])
    send_slot.send()
    group.sent.clear()
    send_slot.put([tensors.pop()])
    recv_slot.post()
    references += group.buffers
    assert all(reference() is not None for reference in references)
    send_slot.clear()
    recv_slot.clear()
    assert all(reference() is None for reference in references)
