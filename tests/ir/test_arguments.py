"""Checks of argument values, and atomic writes."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import FormatError
from penstock.ir import as_int, is_finite, write_atomic


@pytest.mark.parametrize(("value", "number"), [(3, 3), (-1, -1), (np.int32(3), 3), (np.uint8(0), 0)])
def test_whole_numbers_are_also_numpys(value, number):
    assert as_int(value) == number
    assert type(as_int(value)) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), 3.0, np.float64(3), "3", None, (3,)])
def test_nothing_else_is_a_whole_number(value):
    assert as_int(value) is None


@pytest.mark.parametrize("value", [0, 1.5, np.float32(1), np.int64(1), Fraction(1, 3)])
def test_numbers_are_finite(value):
    assert is_finite(value)


@pytest.mark.parametrize("value", [math.inf, math.nan, np.float64("nan"), 10**400, True, "1", None, 1j])
def test_other_types_nan_and_inf_are_not_finite(value):
    assert not is_finite(value)


def test_a_file_takes_the_place_of_the_old_one(tmp_path):
    (tmp_path / "orders.csv").write_text("old")
    write_atomic(tmp_path / "orders.csv", "new ü")
    assert (tmp_path / "orders.csv").read_text(encoding="utf-8") == "new ü"
    assert [path.name for path in tmp_path.iterdir()] == ["orders.csv"]


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path, monkeypatch):
    (tmp_path / "orders.csv").write_text("old")

    def full(self, content):
        self.touch()
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FormatError, match=r"cannot write the file \(file: .*orders.csv, reason: disk full\)"):
        write_atomic(tmp_path / "orders.csv", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"orders.csv": "old"}


def test_a_device_is_written_to_and_not_replaced():
    write_atomic("/dev/null", "nothing")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("path", ["/nonexist/x", "a\0b", "."])
def test_a_path_that_cannot_be_written_is_refused(path):
    with pytest.raises(FormatError, match="cannot write the file"):
        write_atomic(path, "text")
