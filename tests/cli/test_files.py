"""Files: documents are written whole or not at all."""

import os
from pathlib import Path

import pytest

from penstock.cli import files
from penstock.errors import PenstockError
from penstock.ir import Cluster, Schedule, to_json


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.svg"
    files.write(target, "old")

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    assert target.read_text() == "old"


def test_a_failed_write_names_the_file_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as error:
        files.write(tmp_path / "a.svg", "new")
    assert error.value.filename == str(tmp_path / "a.svg")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_device_is_written_to_and_stays_a_device() -> None:
    files.write(Path("/dev/null"), "gone")
    assert not Path("/dev/null").is_file()


def test_equal_documents_are_compressed_to_equal_files(tmp_path: Path) -> None:
    files.write(tmp_path / "one.gz", "text")
    files.write(tmp_path / "two.gz", "text")
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PenstockError, match="no permission to write the file"):
        files.check_target(tmp_path / "a.svg")


def test_a_file_larger_than_any_noun_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(PenstockError, match="the file is too large"):
        files.read_record(tmp_path / "large.csv")


@pytest.mark.parametrize("name", ["page.html", "code.py", "broken.json", "picture.png"])
def test_a_file_of_another_kind_is_not_taken_for_orders(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"<!doctype html>\n\xff")
    with pytest.raises(PenstockError, match=r"expected JSON or an order \(file: .*\)\ntry: JSON that penstock wrote"):
        files.read_record(tmp_path / name)


@pytest.mark.parametrize("text", [Schedule.from_csv("0F0,0B0\n").to_csv(), to_json(Cluster(2))])
def test_a_record_is_read_from_a_pipe(text: str) -> None:
    reader, writer = os.pipe()
    with open(reader), open(writer, "w") as pipe:
        pipe.write(text)
        pipe.close()
        assert files.read_record(Path(f"/dev/fd/{reader}"))
