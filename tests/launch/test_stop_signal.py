"""A request to stop: the first signal asks, the second one ends."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.launch import StopRequest, catch_stop_signals, forward_stop_signals


@pytest.fixture(autouse=True)
def interrupts_are_not_ignored() -> Iterator[None]:
    """A shell starts commands in the background with SIGINT ignored, and these tests send it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_stop_request_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with catch_stop_signals() as request:
        assert not request
        os.kill(os.getpid(), number)
        assert request
    assert signal.getsignal(number) is before


def test_a_second_signal_interrupts_as_usual() -> None:
    with catch_stop_signals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_training_in_another_thread_leaves_the_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def enter() -> bool:
        with catch_stop_signals() as request:
            return bool(request) or signal.getsignal(signal.SIGTERM) is not before

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() is False
    with catch_stop_signals() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request


def test_the_launcher_forwards_a_signal_to_its_ranks(tmp_path: Path) -> None:
    calls: list[bool] = []
    request = StopRequest(tmp_path)
    with forward_stop_signals(tmp_path, lambda: calls.append(True)):
        assert not request
        os.kill(os.getpid(), signal.SIGTERM)
        assert request
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert calls == [True]
