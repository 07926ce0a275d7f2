"""Files: written whole, or left as they were."""

from pathlib import Path

import pytest

from penstock.errors import FormatError
from penstock.ir import write_atomic


def test_a_file_takes_the_place_of_the_old_one(tmp_path):
    (tmp_path / "orders.csv").write_text("old")
    write_atomic(tmp_path / "orders.csv", "new ü")
    assert (tmp_path / "orders.csv").read_text(encoding="utf-8") == "new ü"
    assert [path.name for path in tmp_path.iterdir()] == ["orders.csv"]


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
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
def test_what_cannot_be_written_is_refused(path):
    with pytest.raises(FormatError, match="cannot write the file"):
        write_atomic(path, "text")
