"""What an asynchronous device needs, with a simulated one: few reads, events for times, pinned copies for gloo."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.launch import group_device
from penstock.measure.timing import Clock
from penstock.runtime.executor import ActionTimes, DeviceTimes, action_times
from penstock.runtime.host_memory import goes_through_host, read_scalars, to_host
from penstock.runtime.inputs import send_tensors

CUDA = torch.device("cuda", 0)
USERS = tuple(f"penstock.runtime.{name}" for name in ("transports.distributed", "gradients", "inputs"))
"""the files that copy through host memory"""
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
"""the calls that wait for the device of a tensor"""


class Queue:
    """A device that runs kernels later: `run` takes time on its clock, `log` has the calls of its events."""

    def __init__(self) -> None:
        self.milliseconds, self.log = 0.0, []

    def run(self, milliseconds: float) -> None:
        self.milliseconds += milliseconds

    def event(self, device: torch.device, *, enable_timing: bool = False) -> "Event":
        self.log.append(f"event on {device}{' with time' if enable_timing else ''}")
        return Event(self)


class Event:
    """As torch.Event."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self.recorded_at = queue, 0.0

    def record(self) -> None:
        self.recorded_at = self._queue.milliseconds
        self._queue.log.append("record")

    def synchronize(self) -> None:
        self._queue.log.append("synchronize")

    def elapsed_time(self, end: "Event") -> float:
        return end.recorded_at - self.recorded_at


@contextmanager
def simulated_device() -> Iterator[Queue]:
    """Events of torch are those of the queue inside."""
    import torch._dynamo  # it derives classes from torch.Event: not from one of these

    queue = Queue()
    with mock.patch.object(torch, "Event", queue.event):
        yield queue


@pytest.fixture
def queue() -> Iterator[Queue]:
    with simulated_device() as made:
        yield made


# ------------------------------------------------------------------------------------------------------------- times


def test_recorded_times_are_those_of_the_device(queue: Queue) -> None:
    times = action_times(CUDA)
    assert isinstance(times, DeviceTimes)
    queue.run(2.0)
    for milliseconds in (10.0, 5.0):
        times.start()
        queue.run(milliseconds)
        times.end()
    assert "synchronize" not in queue.log
    assert (times.starts, times.ends) == ([], [])
    times.read()
    assert queue.log.count("synchronize") == 1
    assert [1e3 * (each - times.began) for each in times.starts] == pytest.approx([2.0, 12.0])
    assert [1e3 * (each - times.began) for each in times.ends] == pytest.approx([12.0, 17.0])
    times.read()
    assert len(times.starts) == 2


def test_times_on_the_host_need_no_events(queue: Queue) -> None:
    times = action_times(torch.device("cpu"))
    assert type(times) is ActionTimes
    times.start()
    times.end()
    times.read()
    assert times.began <= times.starts[0] <= times.ends[0]
    assert queue.log == []


def test_a_recorded_step_reads_its_events_once(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.engine.action_times", lambda _: DeviceTimes(CUDA))
    pipe, x, y = pipeline(4)
    trace = pipe.step(x, target=y, record=True).trace
    assert trace is not None
    assert queue.log.count("synchronize") == 2  # once for each rank
    assert queue.log.count("record") == 2 + 2 * len(trace.starts)


def test_a_call_is_timed_by_two_events(queue: Queue) -> None:
    seconds, result = Clock(CUDA).seconds(lambda: queue.run(20.0))
    assert (seconds, result) == (pytest.approx(0.02), None)
    event = "event on cuda:0 with time"
    assert queue.log == [event, event, "record", "record", "synchronize"]


# ------------------------------------------------------------------------------------------------------------- reads


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Tied(nn.Module):
    """A language model whose last layer is its embedding, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return h @ self.tokens.weight.t()


def tied(microbatches: int, ranks: int = 2) -> tuple[nn.Module, "penstock.Plan", Tensor, Tensor]:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(0, 16, (16, 5))
    x, y = tokens[:, :-1], tokens[:, 1:]
    speed = penstock.DeviceSpeed(1e12, 1e11)  # estimated, so that every rank makes the same plan
    plan = penstock.plan(
        model, (x,), ranks=ranks, microbatches=microbatches, schedule="zbv", loss_fn=loss_fn, speed=speed
    )
    return model, plan, x, y


def pipeline(microbatches: int) -> tuple["penstock.Pipeline", Tensor, Tensor]:
    model, plan, x, y = tied(microbatches)
    return penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True, reduction="mean"), x, y


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Counts the calls that would wait for a device."""
    reads: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
        reads[name] += 1
        return original(tensor, *args)

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            original = getattr(Tensor, name)
            call = partial(counting, name, original)
            patch.setattr(Tensor, name, lambda tensor, *args, call=call: call(tensor, *args))
        yield reads


@pytest.mark.parametrize("microbatches", [4, 8])
def test_the_reads_of_a_step_do_not_depend_on_the_microbatches(microbatches: int) -> None:
    pipe, x, y = pipeline(microbatches)
    for _ in range(2):
        pipe.step(x, target=y)
    with counted_reads() as reads:
        pipe.step(x, target=y)
    assert reads == {"tolist": 2}  # losses; extremes of outputs and gradients


def test_a_step_without_nan_checks_reads_its_losses_only() -> None:
    model, plan, x, y = tied(4)
    options = penstock.RunOptions(nonfinite="ignore")
    pipe = penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True, reduction="mean", options=options)
    pipe.step(x, target=y)
    with counted_reads() as reads:
        pipe.step(x, target=y)
    assert reads == {"tolist": 1}


def test_the_reads_of_a_norm_do_not_depend_on_the_parameters() -> None:
    pipe, x, y = pipeline(4)
    pipe.step(x, target=y)
    assert len(list(pipe.parameters())) > 8
    with counted_reads() as reads:
        pipe.clip_grad_norm_(1.0)
    assert reads["tolist"] == 2
    assert sum(reads.values()) <= 4


def test_scalars_are_read_at_once() -> None:
    scalars = [torch.tensor(1.5), torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.1, dtype=torch.bfloat16)]
    with counted_reads() as reads:
        values = read_scalars(scalars)
    assert reads == {"tolist": 1}
    assert values == [float(scalar) for scalar in scalars]
    assert read_scalars([]) == []


# ---------------------------------------------------------------------------------------------------- gloo and devices


def test_collectives_of_a_device_backend_use_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: group)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert group_device("nccl") == torch.device("cuda", 3)
    assert group_device("gloo") == torch.device("cpu")


def test_only_device_tensors_over_gloo_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: group)
    assert goes_through_host("gloo", CUDA)
    assert not goes_through_host("nccl", CUDA)
    assert not goes_through_host("gloo", torch.device("cpu"))
    assert not goes_through_host(None, CUDA)


def test_copies_to_the_host_are_pinned_and_waited_for_once(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, empty = [], torch.empty

    def recording(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", recording)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    copies = to_host(tensors, CUDA)
    assert pinned == [True, True]
    assert queue.log == ["event on cuda:0", "record", "synchronize"]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.data_ptr() != tensor.data_ptr()
        torch.testing.assert_close(copy, tensor, rtol=0, atol=0)
    assert to_host([], CUDA) == []


def test_a_batch_with_one_tensor_on_a_device_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    group = SimpleNamespace(group="gloo", num_ranks=2, start=lambda operation, tensor, **_: sent.append(tensor))
    group.wait = lambda work: None
    # Memory of the meta device stands for that of a device.
    monkeypatch.setattr("penstock.runtime.inputs.goes_through_host", lambda group, device: device.type == "meta")
    monkeypatch.setattr("penstock.runtime.inputs.to_host", lambda tensors, device: [torch.zeros(2) for _ in tensors])
    send_tensors(group, [torch.ones(2), torch.ones(2, device="meta")], lambda rank: None)
    assert [tensor.device.type for tensor in sent] == ["cpu", "cpu"]


def step_through_host(inputs: str) -> tuple[int, float, dict[str, Tensor], list[str]]:
    """One step in which all messages go through host copies; the waits, the loss and the gradients of this rank."""
    copied: list[str] = []

    def to_device(buffer: Tensor, device: torch.device) -> Tensor:
        copied.append(str(device))
        return buffer.clone()

    with simulated_device() as queue, pytest.MonkeyPatch.context() as patch:
        for name in USERS:
            patch.setattr(f"{name}.goes_through_host", lambda *_: True)
            patch.setattr(f"{name}.to_device", to_device)
        model, plan, x, y = tied(4, dist.get_world_size())
        options = penstock.RunOptions(transport="distributed")  # which copies through the host
        pipe = penstock.Pipeline(model, plan, loss_fn=loss_fn, reduction="mean", inputs=inputs, options=options)
        has_batch = inputs == "all" or dist.get_rank() == 0
        result = pipe.step(*((x,) if has_batch else ()), target=y if has_batch else None)
    assert result.loss is not None
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
    return queue.log.count("synchronize"), result.loss.item(), gradients, copied


@pytest.mark.gloo
@pytest.mark.parametrize("inputs", ["all", "first"])
def test_a_step_through_host_copies_has_the_gradients_of_the_model(pools: Any, inputs: str) -> None:
    model, _, x, y = tied(4)
    expected = loss_fn(model(x), y)
    expected.backward()
    results = pools[2].run(step_through_host, inputs)
    names = set()
    for waits, loss, gradients, copied in results:
        assert waits > 0
        assert copied
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
        names |= set(gradients)
    assert names == dict(model.named_parameters()).keys()
