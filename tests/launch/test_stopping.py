"""A wish to stop: the first signal asks, the second one ends."""

import os
import signal
from pathlib import Path

import pytest

from penstock.launch import Wish, passing_on, wish_to_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_wish_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with wish_to_stop() as wish:
        assert not wish
        os.kill(os.getpid(), number)
        assert wish
    assert signal.getsignal(number) is before


def test_a_second_signal_is_as_usual() -> None:
    with wish_to_stop():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_launcher_passes_a_signal_on_to_its_ranks(tmp_path: Path) -> None:
    told: list[bool] = []
    wish = Wish(tmp_path)
    with passing_on(tmp_path, lambda: told.append(True)):
        assert not wish
        os.kill(os.getpid(), signal.SIGTERM)
        assert wish
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert told == [True]
