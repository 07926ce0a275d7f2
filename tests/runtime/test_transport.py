"""The ends of messages hold memory from when it is needed to when it is not, and no longer."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.ir import TensorSpec, Value
from penstock.runtime.transports import DistributedTransport, LocalTransport, Route, TensorCodec

HOST = torch.device("cpu")


class Post:
    """Stands for a process group: what is sent lies here until it is received; waits may be made to fail."""

    def __init__(self) -> None:
        self.letters: list[Tensor] = []
        self.is_down = False

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "Work":
        self.letters.append(tensors[0])
        return Work(self, None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "Work":
        return Work(self, tensors[0])


class Work:
    """A send, or a receive into a buffer."""

    def __init__(self, post: Post, buffer: Tensor | None) -> None:
        self.post, self.buffer = post, buffer

    def wait(self, deadline: timedelta) -> None:
        if self.post.is_down:
            raise RuntimeError("connection closed")
        if self.buffer is not None:
            self.buffer.copy_(self.post.letters.pop(0))


class Witness:
    """Hears of waits, and puts a loss into words."""

    deadline = timedelta(seconds=1)

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def waiting(self, code: int, peer: int) -> None:
        self.heard.append((code, peer))

    def message_error(self, code: int, peer: int, error: RuntimeError) -> Exception:
        return RunError("lost", code=code, peer=peer, reason=error)


def route(*specs: TensorSpec, is_gradient: bool = False) -> Route:
    codecs = tuple(TensorCodec(Value(f"v{place}", spec), is_gradient) for place, spec in enumerate(specs))
    return Route(7, (1, 0, 0) if is_gradient else (0, 1, 0), 1, 3, codecs)


VALUE = TensorSpec((2, 3), "float64", requires_grad=True)


def test_what_was_sent_is_held_until_it_is_settled_and_without_its_graph() -> None:
    departure = DistributedTransport(Post(), HOST, Witness()).send_slot(route(VALUE))
    made = torch.ones(2, 3, dtype=torch.float64, requires_grad=True) * 2
    departure.put([made])
    departure.send()
    (held,) = departure.held
    assert held.data_ptr() == made.data_ptr()
    assert held.grad_fn is None
    departure.release()
    assert departure.held == []


def test_room_for_a_message_is_made_when_it_is_posted_and_given_away_when_it_is_taken() -> None:
    post = Post()
    arrival = DistributedTransport(post, HOST, Witness()).recv_slot(route(VALUE))
    assert arrival.held == []
    arrival.post()
    assert [tuple(buffer.shape) for buffer in arrival.held] == [(2, 3)]
    post.letters.append(torch.full((2, 3), 5.0, dtype=torch.float64))
    arrival.wait()
    assert arrival.held == []
    (value,) = arrival.take()
    assert value is not None
    assert value.requires_grad
    assert value.tolist() == [[5.0] * 3] * 2
    assert list(arrival.take()) == []


def test_a_gradient_wants_no_gradient_and_is_zero_where_nobody_made_one() -> None:
    post = Post()
    between = DistributedTransport(post, HOST, Witness())
    departure, arrival = (
        between.send_slot(route(VALUE, is_gradient=True)),
        between.recv_slot(route(VALUE, is_gradient=True)),
    )
    arrival.post()
    departure.put([None])
    departure.send()
    arrival.wait()
    (gradient,) = arrival.take()
    assert gradient is not None
    assert not gradient.requires_grad
    assert not gradient.any()


def test_only_a_wait_that_may_take_long_is_noted() -> None:
    witness = Witness()
    departure = DistributedTransport(Post(), HOST, witness).send_slot(route(VALUE))
    for settle in (departure.release, departure.finish):
        departure.put([torch.ones(2, 3, dtype=torch.float64)])
        departure.send()
        settle()
        departure.finish()
    assert witness.heard == [(7, 1)]


def test_a_lost_message_is_told_in_the_words_of_the_observer() -> None:
    post = Post()
    arrival = DistributedTransport(post, HOST, Witness()).recv_slot(route(VALUE))
    arrival.post()
    post.is_down = True
    with pytest.raises(RunError, match=r"lost \(code: 7, peer: 1, reason: connection closed\)"):
        arrival.wait()


def test_complex_and_turned_values_arrive_as_they_lay() -> None:
    spec = TensorSpec((2, 3), "complex128", order=(1, 0))
    inside = LocalTransport(HOST)
    departure, arrival = inside.send_slot(route(spec)), inside.recv_slot(route(spec))
    value = torch.complex(torch.arange(6.0), torch.ones(6)).to(torch.complex128).view(3, 2).t().conj()
    departure.put([value])
    departure.send()
    assert arrival.is_ready
    (came,) = arrival.take()
    assert came is not None
    assert torch.equal(came, value)
    assert came.stride() == value.stride()
    assert not arrival.is_ready


def test_after_a_failure_nothing_is_held() -> None:
    between = DistributedTransport(Post(), HOST, Witness())
    departure, arrival = between.send_slot(route(VALUE)), between.recv_slot(route(VALUE))
    departure.put([torch.ones(2, 3, dtype=torch.float64)])
    departure.send()
    departure.put([torch.ones(2, 3, dtype=torch.float64)])
    arrival.post()
    departure.clear()
    arrival.clear()
    assert departure.held == arrival.held == []
