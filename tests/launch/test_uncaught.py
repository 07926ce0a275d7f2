"""An uncaught error of penstock is printed once and short by the ranks of a program such as torchrun starts."""

import io
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import RunError
from penstock.ir import counted
from penstock.launch import ErrorPrinter
from tests.plans import chain_plan


@pytest.fixture(autouse=True)
def _hook() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


def printed(error: BaseException, rank: int = 0) -> str:
    output = io.StringIO()
    ErrorPrinter(rank)(type(error), error, error.__traceback__, output)
    return output.getvalue()


def refused() -> RunError:
    """An error from inside penstock, raised through frames of penstock and torch."""
    try:
        penstock.Pipeline(torch.nn.Linear(4, 4), chain_plan("1f1b", 2, 1, 2))
    except penstock.PenstockError as error:
        return error  # type: ignore[return-value]
    raise AssertionError


def test_frames_of_penstock_are_left_out() -> None:
    error = refused()
    text = printed(error)
    assert len(traceback.extract_tb(error.__traceback__)) > 1
    assert text.count("  File ") == 1
    assert Path(__file__).name in text
    assert str(error).splitlines()[0] in text
    assert all(line.startswith("[rank0]: ") for line in text.splitlines())


def test_an_error_of_every_rank_is_one_line_on_the_others() -> None:
    error = refused()
    error.on_all_ranks()
    assert (
        printed(error, 1)
        == f"[rank1]: {type(error).__name__}: {error.problem} (every rank has this error: see rank 0)\n"
    )
    assert "Traceback" in printed(error, 0)


def test_an_error_of_one_rank_is_printed_by_that_rank() -> None:
    assert printed(refused(), 1).startswith("[rank1]: Traceback")


def test_the_cause_keeps_the_frames_of_the_user() -> None:
    def forward() -> None:
        raise KeyError("token")

    try:
        try:
            forward()
        except KeyError as cause:
            raise RunError("KeyError: token") from cause
    except RunError as error:
        text = printed(error)
    assert "in forward" in text
    assert "direct cause" in text


def test_an_error_inside_penstock_keeps_its_frames() -> None:
    try:
        try:
            counted(2, None)  # type: ignore[arg-type]
        except AttributeError as cause:
            raise RunError("a bug") from cause
    except RunError as error:
        text = printed(error)
    assert "/penstock/" in text.split("direct cause")[0]


def test_the_variable_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_FULL_TRACEBACK", "1")
    shown: list[BaseException] = []
    sys.excepthook = lambda kind, error, frames: shown.append(error)
    error = refused()
    assert printed(error) == ""
    assert shown == [error]


def test_other_errors_are_printed_as_before() -> None:
    shown: list[BaseException] = []
    sys.excepthook = lambda kind, error, frames: shown.append(error)
    error = KeyError("token")
    assert printed(error) == ""
    assert shown == [error]


def test_it_is_installed_once() -> None:
    ErrorPrinter.install(0)
    first = sys.excepthook
    ErrorPrinter.install(1)
    assert sys.excepthook is first
    assert first.rank == 1  # type: ignore[attr-defined]
