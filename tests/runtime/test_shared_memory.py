"""Messages through shared memory arrive in order and unchanged, and a rank that waits is woken by the other's end."""

import errno
import faulthandler
import os
import signal
import socket
import threading
import time
import unittest
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.errors import RunError
from penstock.ir import TensorSpec, Value
from penstock.runtime.transports import LocalTransport, Route, SharedMemoryTransport, TensorCodec
from penstock.runtime.transports.links import Link
from penstock.runtime.transports.ring import Ring
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, noise, seeded

HOST = torch.device("cpu")
SMALL = TensorSpec((2, 3), "float64", requires_grad=True)
DTYPES = "float64 float32 float16 bfloat16 complex128 complex64 int64 int32 int16 int8 uint8 bool float8_e4m3fn uint16"


class FakeMonitor:
    """A deadline, and the error of a lost message."""

    def __init__(self, seconds: float = 20.0) -> None:
        self.seconds = seconds
        self.waits: list[tuple[int, int]] = []

    def waiting(self, code: int, peer: int) -> None:
        self.waits.append((code, peer))

    def check_deadline(self, start: float) -> None:
        if time.monotonic() - start > self.seconds:
            raise RuntimeError("timed out")

    def message_error(self, code: int, peer: int, error: RuntimeError) -> RunError:
        return RunError("lost", code=code, peer=peer, reason=error)


@pytest.fixture
def ends() -> tuple[SharedMemoryTransport, SharedMemoryTransport]:
    """Both ends of the connection of ranks 0 and 1, in one process."""
    return connected(FakeMonitor())


def connected(monitor: Any) -> tuple[SharedMemoryTransport, SharedMemoryTransport]:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    remote = LocalTransport(HOST)
    return (
        SharedMemoryTransport({1: Link(first)}, remote, HOST, monitor),
        SharedMemoryTransport({0: Link(second)}, remote, HOST, monitor),
    )


def codecs(*specs: TensorSpec, is_optional: bool = False) -> tuple[TensorCodec, ...]:
    return tuple(TensorCodec(Value(f"v{index}", spec), False, is_optional) for index, spec in enumerate(specs))


def slots(ends: Any, *specs: TensorSpec, count: int = 1, is_optional: bool = False) -> list[tuple[Any, Any]]:
    """The slots of a step with `count` messages of these values."""
    shared = codecs(*specs, is_optional=is_optional)
    return [
        (
            ends[0].send_slot(Route(7, (0, 1, number), 1, 3, shared)),
            ends[1].recv_slot(Route(8, (0, 1, number), 0, 3, shared)),
        )
        for number in range(count)
    ]


def send(slot: Any, *tensors: Tensor | None) -> None:
    slot.put(tensors)
    slot.send()


def receive(slot: Any) -> Any:
    slot.post()
    slot.wait()
    return slot.take()


def values(spec: TensorSpec, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 2, spec.shape, generator=generator)
    return drawn.to(getattr(torch, spec.dtype))


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_every_dtype_arrives_unchanged(ends: Any, dtype: str) -> None:
    spec = TensorSpec((3, 5), dtype)
    ((send_slot, recv_slot),) = slots(ends, spec)
    for seed in range(5):
        send(send_slot, values(spec, seed))
        (found,) = receive(recv_slot)
        assert found.dtype == getattr(torch, dtype)
        assert torch.equal(found.view(torch.uint8), values(spec, seed).view(torch.uint8))


def test_layouts_empty_tensors_and_scalars_arrive_as_they_were(ends: Any) -> None:
    specs = (
        TensorSpec((2, 3, 4, 5), "float32", order=(0, 2, 3, 1)),
        TensorSpec((0, 4), "float32"),
        TensorSpec((), "int64"),
        TensorSpec((2, 3), "complex128", order=(1, 0)),
    )
    ((send_slot, recv_slot),) = slots(ends, *specs)
    sent = (
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(0, 4),
        torch.tensor(7),
        torch.complex(torch.arange(6.0), torch.ones(6)).to(torch.complex128).view(3, 2).t().conj(),
    )
    send(send_slot, *sent)
    for given, found in zip(sent, receive(recv_slot), strict=True):
        assert torch.equal(given, found)
        assert given.stride() == found.stride()


def test_a_received_tensor_is_not_overwritten_by_later_messages(ends: Any) -> None:
    ((send_slot, recv_slot),) = slots(ends, SMALL)
    found = []
    for number in range(10):
        send(send_slot, torch.full((2, 3), number, dtype=torch.float64))
        found += receive(recv_slot)
    assert [float(tensor.detach()[0, 0]) for tensor in found] == list(range(10))
    assert all(tensor.requires_grad for tensor in found)


def test_messages_are_received_in_the_order_in_which_they_were_posted(ends: Any) -> None:
    pairs = slots(ends, SMALL, count=4)
    for number, (send_slot, recv_slot) in enumerate(pairs):
        recv_slot.post()
        send(send_slot, torch.full((2, 3), number, dtype=torch.float64))
    for number, (_, recv_slot) in reversed(list(enumerate(pairs))):
        recv_slot.wait()
        (found,) = recv_slot.take()
        assert float(found.detach()[0, 0]) == number


def test_messages_larger_than_a_slot_and_more_than_the_ring_arrive_without_blocking_the_sender(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.transports.ring.MAX_SLOT_BYTES", 4096)
    monkeypatch.setattr("penstock.runtime.transports.ring.MAX_RING_BYTES", 8192)
    specs = (TensorSpec((1000, 7), "float32"), TensorSpec((33,), "bool"), TensorSpec((100,), "complex64"))
    pairs = slots(ends, *specs, count=6, is_optional=True)
    sent = [
        tuple(values(spec, number) if number % 3 != index else None for index, spec in enumerate(specs))
        for number in range(6)
    ]
    for (send_slot, _), tensors in zip(pairs, sent, strict=True):
        send(send_slot, *tensors)
    for (_, recv_slot), tensors in zip(pairs, sent, strict=True):
        for given, found in zip(tensors, receive(recv_slot), strict=True):
            assert found is None if given is None else torch.equal(given, found)
    for send_slot, _ in pairs:
        send_slot.finish()


def test_a_message_that_finds_no_room_is_kept_until_it_is_written(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.transports.ring.MAX_SLOT_BYTES", 4096)
    monkeypatch.setattr("penstock.runtime.transports.ring.MAX_RING_BYTES", 8192)
    pairs = slots(ends, TensorSpec((1000, 7), "float32"), count=3)
    # A tensor that shares the memory of an array keeps the array alive.
    arrays = [np.full((1000, 7), number, "float32") for number in range(3)]
    references = [weakref.ref(array) for array in arrays]
    for send_slot, _ in pairs:
        send(send_slot, torch.from_numpy(arrays.pop()))
    assert references[0]() is not None
    for _, recv_slot in pairs:
        receive(recv_slot)
    for send_slot, _ in pairs:
        send_slot.finish()
    assert all(reference() is None for reference in references)


def test_a_step_with_larger_messages_gets_a_larger_ring(ends: Any) -> None:
    sent, found = [], []
    for size in (1, 10, 3000, 5, 100_000):
        spec = TensorSpec((size,), "float32")
        pairs = slots(ends, spec, count=3)
        for number, (send_slot, recv_slot) in enumerate(pairs):
            sent.append(torch.full((size,), float(number)))
            recv_slot.post()
            send(send_slot, sent[-1])
            if number:
                recv_slot.wait()
                pairs[number - 1][1].wait()
        found += [tensor for _, recv_slot in pairs for tensor in recv_slot.take()]
    assert all(map(torch.equal, sent, found))


def test_without_memory_for_a_ring_messages_travel_in_pieces(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    create = Ring.create

    def limited(num_messages: int, message_bytes: int) -> Any:
        if message_bytes > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(num_messages, message_bytes)

    monkeypatch.setattr(Ring, "create", staticmethod(limited))
    spec = TensorSpec((5000,), "float64")
    with unittest.TestCase().assertLogs("penstock") as logs:
        ((send_slot, recv_slot),) = slots(ends, spec)
        send(send_slot, values(spec))
        assert torch.equal(*receive(recv_slot), values(spec))
    assert "no shared memory for messages of 40000 bytes" in logs.output[0]
    send_slot.finish()


def test_without_any_memory_the_error_names_the_other_transport(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Ring, "create", staticmethod(refuse))
    ((send_slot, _),) = slots(ends, SMALL)
    with pytest.raises(RunError, match="distributed"):
        send(send_slot, torch.ones(2, 3, dtype=torch.float64))


def test_a_ring_whose_descriptor_the_system_dropped_is_an_error() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = Link(first), Link(second)
    # As after the limit on open files: the message arrives without its descriptor.
    with mock.patch.object(socket, "send_fds", lambda connection, content, *_: connection.send(content[0])):
        sender.send_ring(*Ring.create_smallest())
    with pytest.raises(RuntimeError, match="too many open files"):
        receiver.receive_ring()


def test_a_receiver_sleeps_until_a_message_arrives(ends: Any) -> None:
    ((send_slot, recv_slot),) = slots(ends, SMALL)
    send(send_slot, torch.zeros(2, 3, dtype=torch.float64))
    receive(recv_slot)
    timer = threading.Timer(0.5, lambda: send(send_slot, torch.ones(2, 3, dtype=torch.float64)))
    timer.start()
    cpu = time.thread_time()
    (found,) = receive(recv_slot)
    assert time.thread_time() - cpu < 0.1
    assert float(found.detach().sum()) == 6.0
    timer.join()


def test_a_rank_that_ends_wakes_one_that_waits_once_its_messages_are_read(ends: Any) -> None:
    pairs = slots(ends, SMALL, count=2)
    send(pairs[0][0], torch.ones(2, 3, dtype=torch.float64))
    timer = threading.Timer(0.2, ends[0].clear)
    timer.start()
    assert float(receive(pairs[0][1])[0].detach().sum()) == 6.0
    start = time.monotonic()
    with pytest.raises(RunError, match="connection closed"):
        receive(pairs[1][1])
    assert time.monotonic() - start < 10.0
    timer.join()


def seconds_until_a_killed_rank_is_noticed(signum: int) -> float:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        second.close()
        faulthandler.disable()  # it would print the stack
        time.sleep(60.0)
        os._exit(1)
    first.close()
    transport = SharedMemoryTransport({0: Link(second)}, LocalTransport(HOST), HOST, FakeMonitor())  # type: ignore[arg-type]
    recv_slot = transport.recv_slot(Route(8, (0, 1, 0), 0, 3, codecs(SMALL)))
    killed: list[float] = []
    timer = threading.Timer(0.3, lambda: (killed.append(time.monotonic()), os.kill(pid, signum)))
    timer.start()
    with pytest.raises(RunError, match="connection closed"):
        receive(recv_slot)
    seconds = time.monotonic() - killed[0]
    timer.join()
    os.waitpid(pid, 0)
    return seconds


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGABRT])
def test_a_rank_that_waits_is_woken_by_the_end_of_a_killed_one(signum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # It must be woken by the socket, and not find out by asking for the process. Benchmarks measure how soon that is:
    # on a busy machine a process takes long to die.
    monkeypatch.setattr("penstock.runtime.transports.links.process_state", lambda pid: "R")
    assert seconds_until_a_killed_rank_is_noticed(signum) < 30.0


def test_a_failed_check_keeps_the_connection(ends: Any) -> None:
    ((send_slot, recv_slot),) = slots(ends, SMALL)
    ends[0].problem = RunError("the ranks disagree")
    ends[0].clear()
    send(send_slot, torch.ones(2, 3, dtype=torch.float64))
    assert float(receive(recv_slot)[0].detach().sum()) == 6.0


def test_waits_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.transports.ring.MAX_SLOT_BYTES", 4096)
    monkeypatch.setattr("penstock.runtime.transports.ring.MAX_RING_BYTES", 8192)
    monitor = FakeMonitor(0.3)
    pairs = slots(connected(monitor), TensorSpec((100_000,), "float32"), count=1)
    with pytest.raises(RunError, match="timed out"):
        receive(pairs[0][1])
    send(pairs[0][0], torch.ones(100_000))
    with pytest.raises(RunError, match="timed out"):
        pairs[0][0].finish()
    assert monitor.waits == [(8, 0), (7, 1)]


def test_another_message_than_the_expected_one_is_an_error(ends: Any) -> None:
    send_slot = ends[0].send_slot(Route(7, (0, 1, 0), 1, 3, codecs(SMALL)))
    recv_slot = ends[1].recv_slot(Route(8, (0, 1, 0), 0, 4, codecs(SMALL)))
    send(send_slot, torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(RunError, match="another message"):
        receive(recv_slot)


def test_a_value_of_another_shape_is_refused(ends: Any) -> None:
    ((send_slot, _),) = slots(ends, SMALL)
    with pytest.raises(RunError, match=r"agreed on .*\ntry: if its size depends on .* other cuts"):
        send(send_slot, torch.ones(3, 3, dtype=torch.float64))


def test_rings_have_no_name_and_are_bounded() -> None:
    ring, handle = Ring.create(1000, 1 << 30)
    assert "memfd:" in os.readlink(f"/proc/self/fd/{handle}")
    assert os.fstat(handle).st_size < 17 << 20
    assert os.fstat(handle).st_nlink == 0
    os.close(handle)
    assert ring.has_room


def test_ever_larger_messages_need_few_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    created, create = [], Ring.create

    def counted(num_messages: int, message_bytes: int) -> Any:
        created.append(message_bytes)
        return create(num_messages, message_bytes)

    monkeypatch.setattr(Ring, "create", staticmethod(counted))
    ends, kept = connected(FakeMonitor()), []
    for size in range(100, 3000, 100):
        kept += slots(ends, TensorSpec((size,), "float32"), count=2)
        for send_slot, recv_slot in kept[-2:]:
            send(send_slot, torch.ones(size))
            assert float(receive(recv_slot)[0].detach().sum()) == size
    assert len(created) <= 12


def without_memory_on_one_rank() -> tuple[float, float, str]:
    """The loss with any transport and over gloo, and the error if only shared memory is allowed."""
    model, x = seeded(nn.Sequential(Block(), Block())), noise(4, WIDTH)
    plan = quick_plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b")
    refusal = OSError(errno.ENOSPC, "No space left on device")
    is_missing = mock.patch.object(Ring, "create_smallest", side_effect=refusal)
    losses, text = [], ""
    with is_missing if dist.get_rank() == 1 else nullcontext():
        for transport in ("auto", "distributed", "shared"):
            try:
                options = penstock.RunOptions(transport=transport)
                pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, options=options)
                losses.append(float(pipe.step(x, target=x).loss))
            except RunError as error:
                text = str(error)
    return (*losses, text)


@pytest.mark.gloo
def test_a_rank_without_shared_memory_uses_gloo(pools: Pools) -> None:
    (first, second) = pools[2].run(without_memory_on_one_rank)
    assert first == second
    assert first[0] == first[1]
    assert "rank 1 cannot use shared memory" in first[2]
    assert 'RunOptions(transport="auto")' in first[2]


def losses_after_a_failed_step() -> tuple[str, float, float]:
    """The error of a step that is interrupted on rank 0 before its first message, and the losses of a new Pipeline."""
    model, x = seeded(nn.Sequential(Block(), Block())), noise(4, WIDTH)
    plan = quick_plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss)
    pipe.step(x, target=x)
    text = ""
    is_broken = mock.patch.object(model[0], "forward", side_effect=KeyboardInterrupt("broken"))
    with is_broken if dist.get_rank() == 0 else nullcontext():
        try:
            pipe.step(x, target=x)
        except (RunError, KeyboardInterrupt) as error:
            text = str(error)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss)
    return text, float(pipe.step(x, target=x).loss), float(pipe.step(2 * x, target=x).loss)


@pytest.mark.gloo
def test_a_new_pipeline_does_not_receive_what_a_failed_step_left(pools: Pools) -> None:
    first, second = pools[2].run(losses_after_a_failed_step)
    model, x = seeded(nn.Sequential(Block(), Block())), noise(4, WIDTH)
    assert "broken" in first[0]
    assert "lost contact with rank 0" in second[0]
    expected = [float(mse_loss(model(batch), x).detach()) for batch in (x, 2 * x)]
    assert first[1:] == second[1:] == pytest.approx(expected, rel=1e-12)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(RunError, match='transport must be "auto", "shared" or "distributed"'):
        penstock.RunOptions(transport="tcp")
