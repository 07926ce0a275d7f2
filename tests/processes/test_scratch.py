"""The private directory: in memory where there is room, gone when its owner is."""

from pathlib import Path

import pytest

from penstock.processes import scratch


def test_it_is_in_memory_where_the_system_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_IN_MEMORY", tmp_path)
    with scratch.scratch() as directory:
        assert directory.parent == tmp_path
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_it_is_a_temporary_directory_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_IN_MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch.scratch() as directory:
        assert directory.parent == tmp_path
