"""Cache: what was measured is there the next time, and nothing else is."""

import stat
import warnings
from pathlib import Path

import pytest

from penstock.ir import NodeCost, Profile
from penstock.measure import Cache
from penstock.measure import cache as cache_file
from penstock.measure.cache import default_directory

PROFILE = Profile((NodeCost("a", 1.0, 2.0, 1.0, 1.0),), 3.0, "0" * 64, "cpu")


def test_a_stored_profile_is_found(tmp_path: Path):
    Cache(tmp_path).put("key", PROFILE)
    assert Cache(tmp_path).get("key") == PROFILE
    assert Cache(tmp_path).get("other") is None


def test_files_and_directory_are_the_users_own(tmp_path: Path):
    Cache(tmp_path / "new").put("key", PROFILE)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()] == [0o600]


@pytest.mark.parametrize("text", ["", "{", '{"penstock": 1, "type": "Graph", "value": {}}', "\x00\xff"])
def test_an_unreadable_file_is_warned_of_and_rewritten(tmp_path: Path, text: str):
    (tmp_path / "key.json").write_text(text, encoding="latin-1")
    with pytest.warns(UserWarning, match="cannot read a cached profile"):
        assert Cache(tmp_path).get("key") is None
    Cache(tmp_path).put("key", PROFILE)
    assert Cache(tmp_path).get("key") == PROFILE


def test_a_directory_that_cannot_be_made_costs_a_warning(tmp_path: Path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match="cannot store a profile"):
        Cache(tmp_path / "file" / "below").put("key", PROFILE)


def test_it_can_be_cleared(tmp_path: Path):
    for key in ("one", "other"):
        Cache(tmp_path).put(key, PROFILE)
    assert Cache(tmp_path).clear() == 2
    assert Cache(tmp_path).get("one") is None
    assert Cache(tmp_path / "nowhere").clear() == 0


def test_those_used_longest_ago_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_file, "_MAX_FILES", 2)
    store = Cache(tmp_path)
    times = iter(range(100))
    monkeypatch.setattr(cache_file, "_last_used", lambda path: (path.stem == "new", next(times)))
    for key in ("a", "b", "new"):
        store.put(key, PROFILE)
    assert {path.stem for path in tmp_path.iterdir()} == {"b", "new"}


def test_nothing_is_left_behind_and_nothing_is_warned_of(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cache(tmp_path).put("key", PROFILE)
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


def test_it_lies_where_the_user_wants(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("PENSTOCK_CACHE", "/own")
    assert default_directory() == Path("/own")
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_directory() == Path("/cache/penstock/profiles")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_directory() == Path("/home/somebody/.cache/penstock/profiles")
