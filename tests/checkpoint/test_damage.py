"""Damage to the files of a checkpoint is found before any weight changes."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import TypeAdapter
from typer.testing import CliRunner

from benchmarks.damages import DAMAGES, ELSEWHERE, LINK, damaged, forged
from penstock.checkpoint import manifest as manifest_module
from penstock.checkpoint import read_manifest, verify_checkpoints
from penstock.checkpoint.manifest import NAME, Manifest, document_with_digest
from penstock.cli import app
from penstock.errors import CheckpointError, DamagedError, PenstockWarning
from penstock.runtime.tensor_json import json_bytes, parse_json
from tests.checkpoint.trainings import Training, numbers, saved, the_plan

ROUNDS = 200


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints."""
    root = tmp_path_factory.mktemp("good")
    saved(root, 1, 2)
    return root


@pytest.fixture(scope="module")
def training() -> Training:
    made = Training(the_plan(2), local=True)
    made.losses(1)
    return made


def test_damage_of_any_kind_is_found(good: Path, tmp_path: Path) -> None:
    found = 0
    for number in range(ROUNDS):
        newer, older = verify_checkpoints(damaged(good, tmp_path / str(number), number))
        found += bool(newer.problem) and not older.problem
        shutil.rmtree(tmp_path / str(number))
    assert found == ROUNDS


@pytest.mark.filterwarnings("ignore:newer checkpoints are damaged")
@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_the_checkpoint_before_a_damaged_one_is_loaded(
    number: int, good: Path, training: Training, tmp_path: Path
) -> None:
    assert training.pipe.load(damaged(good, tmp_path / "worse", number), training.optimizer).step == 1


def test_a_damaged_checkpoint_given_by_its_own_name_is_refused_and_changes_nothing(
    good: Path, training: Training, tmp_path: Path
) -> None:
    shutil.copytree(good, tmp_path / "worse")
    flip_in = tmp_path / "worse" / "step-000002" / "stage-001.safetensors"
    content = flip_in.read_bytes()
    flip_in.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = numbers(training)
    with pytest.raises(DamagedError, match="changed since it was written"):
        training.pipe.load(tmp_path / "worse" / "step-000002", training.optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, numbers(training), strict=True))


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name != LINK])
def test_a_manifest_that_leads_elsewhere_is_refused(name: str, good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "step-000001", tmp_path / "one")
    forged(tmp_path / "one", name)
    with pytest.raises(DamagedError, match="outside its directory"):
        read_manifest(tmp_path / "one")


@pytest.mark.parametrize("name", [NAME, "plan.json", "stage-000.safetensors"])
def test_links_are_refused(name: str, good: Path, training: Training, tmp_path: Path) -> None:
    shutil.copytree(good / "step-000001", tmp_path / "one")
    (tmp_path / "one" / name).unlink()
    (tmp_path / "one" / name).symlink_to(good / "step-000001" / name)
    with pytest.raises(DamagedError, match="link"):
        training.pipe.load(tmp_path / "one")


@pytest.mark.filterwarnings("ignore:newer checkpoints are damaged")
def test_a_read_error_counts_as_damage(good: Path, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: Any, name: str) -> Any:
        if "step-000002" in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            raise OSError(5, "Input/output error")
        return digest(file, name)

    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", broken)
    assert training.pipe.load(good, training.optimizer).step == 1


def test_a_linked_directory_does_not_count(good: Path, training: Training, tmp_path: Path) -> None:
    shutil.copytree(good / "step-000001", tmp_path / "step-000001")
    (tmp_path / "step-000009").symlink_to(good / "step-000002")
    assert training.pipe.load(tmp_path).step == 1


def test_a_manifest_without_a_field_that_was_added_later_is_valid(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class LaterManifest(Manifest):
        comment: str = "none"

    monkeypatch.setattr(manifest_module, "_adapter", lambda: TypeAdapter(LaterManifest))
    read = read_manifest(good / "step-000002")
    assert isinstance(read, LaterManifest)
    assert (read.step, read.comment) == (2, "none")


def test_a_newer_format_is_not_damage(good: Path, training: Training, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "new")
    path = tmp_path / "new" / "step-000002" / NAME
    path.write_bytes(json_bytes({**parse_json(path.read_bytes(), path), "penstock_checkpoint": 2}))
    with pytest.raises(CheckpointError, match="newer format"):
        training.pipe.load(tmp_path / "new")


def with_unknown_field(good: Path, root: Path, digest: str | None = None) -> None:
    """Copy the checkpoints, the newest with another field in its manifest; `digest` replaces that of the manifest."""
    shutil.copytree(good, root)
    path = root / "step-000002" / NAME
    content = {**parse_json(path.read_bytes(), path)["manifest"], "comment": "by hand"}
    document = document_with_digest(content)
    path.write_bytes(document if digest is None else json_bytes({**parse_json(document, path), "sha256": digest}))


def test_a_field_of_a_newer_penstock_is_not_damage(good: Path, training: Training, tmp_path: Path) -> None:
    with_unknown_field(good, tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"written by a newer penstock .*unknown: comment") as caught:
        training.pipe.load(tmp_path / "new")
    assert not isinstance(caught.value, DamagedError)


def test_an_unknown_field_that_the_digest_does_not_cover_is_damage(good: Path, tmp_path: Path) -> None:
    with_unknown_field(good, tmp_path / "new", digest="0" * 64)
    with pytest.raises(DamagedError, match=r"the manifest cannot be read .*key: comment"):
        read_manifest(tmp_path / "new" / "step-000002")


FORGED: dict[str, Any] = {
    "run.json": [[], None, 5],
    "optimizer-000.json": [{}, {"optimizer": "Adam", "groups": 3, "parameters": {}}, []],
    "optimizer-001.json": [{"optimizer": "Adam", "groups": [], "parameters": {"x": {"group": 0, "state": {}}}}],
    "random-000.json": [{}, {"torch": 5}, []],
    "stage-000.safetensors": ["no tensors at all"],
}


@pytest.mark.filterwarnings("ignore:newer checkpoints are damaged")
@pytest.mark.parametrize(("name", "content"), [(name, one) for name, found in FORGED.items() for one in found])
def test_invalid_documents_count_as_damage_although_their_digests_are_right(
    name: str, content: object, good: Path, training: Training, tmp_path: Path
) -> None:
    shutil.copytree(good, tmp_path / "new")
    rewritten(tmp_path / "new" / "step-000002", name, json_bytes(content))
    assert training.pipe.load(tmp_path / "new", training.optimizer).step == 1


def sums(training: Training) -> list[float]:
    return [float(parameter.detach().double().sum()) for parameter in training.pipe.parameters()]


def entries(name: str, key: str) -> list[tuple[str, str, object]]:
    """Wrong values for one key of a document."""
    return [(name, key, value) for value in (None, [], -1, 10**30, float("nan"), "x", {"$tuple": [1]})]


@pytest.mark.filterwarnings("ignore:newer checkpoints are damaged")
def test_a_wrong_value_anywhere_in_a_document_is_refused_and_changes_nothing(
    good: Path, training: Training, tmp_path: Path
) -> None:
    before = sums(training)
    wrong = [*entries("random-000.json", "python"), *entries("random-000.json", "numpy")]
    wrong += [*entries("random-000.json", "torch"), *entries("optimizer-000.json", "parameters")]
    wrong += [*entries("optimizer-000.json", "groups"), *entries("optimizer-000.json", "others")]
    wrong += [*entries("run.json", "num_steps"), *entries("run.json", "fit_progress")]
    for index, (name, key, value) in enumerate(wrong):
        directory = tmp_path / str(index) / "step-000002"
        shutil.copytree(good / "step-000002", directory)
        document = parse_json((directory / name).read_bytes(), name)
        rewritten(directory, name, json.dumps(document | {key: value}).encode())
        try:
            training.pipe.load(directory, training.optimizer)
        except CheckpointError:
            assert sums(training) == before, (name, key, value)
        else:
            before = sums(training)  # a value that is no damage, such as no state at all


@pytest.mark.filterwarnings("ignore:newer checkpoints are damaged")
def test_a_manifest_that_is_too_large_or_has_a_long_file_name_counts_as_damage(
    good: Path, training: Training, tmp_path: Path
) -> None:
    shutil.copytree(good, tmp_path / "new")
    newest = tmp_path / "new" / "step-000002"
    manifest = parse_json((newest / NAME).read_bytes(), NAME)["manifest"]
    record = {"bytes": 1, "sha256": "0" * 64, "rank": 0}
    (newest / NAME).write_bytes(document_with_digest(manifest | {"files": manifest["files"] | {"a" * 300: record}}))
    assert training.pipe.load(tmp_path / "new").step == 1
    (newest / NAME).write_bytes(b'{"penstock_checkpoint": 1, "manifest": [' + b"[]," * 6_000_000 + b"[]]}")
    is_parsed = mock.patch.object(manifest_module, "parse_json", side_effect=AssertionError("parsed"))
    with is_parsed, pytest.raises(DamagedError, match="too large"):
        read_manifest(newest)


def rewritten(directory: Path, name: str, content: bytes, **values: object) -> None:
    """Replace a file, and write a manifest that has its digest."""
    manifest = parse_json((directory / NAME).read_bytes(), NAME)["manifest"]
    (directory / name).write_bytes(content)
    manifest["files"][name] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / NAME).write_bytes(document_with_digest({**manifest, **values}))


WRONG: list[dict[str, object]] = [
    {"plan": {}},
    {"plan": {"ranks": "2", "processes": 1, "stages": 2, "microbatches": 2, "schedule": "1f1b"}},
    {"step": 10**30},
    {"step": 7},
]


@pytest.mark.parametrize("values", WRONG, ids=repr)
def test_an_invalid_manifest_counts_as_damage(values: Any, good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "new")
    newest = tmp_path / "new" / "step-000002"
    rewritten(newest, "run.json", (newest / "run.json").read_bytes(), **values)
    assert [bool(one.problem) for one in verify_checkpoints(tmp_path / "new")] == [True, False]
    assert CliRunner().invoke(app, ["ckpt", "ls", str(tmp_path / "new")]).exit_code == 0
    assert CliRunner().invoke(app, ["ckpt", "show", str(newest)]).exit_code == 6


def test_a_renamed_checkpoint_is_not_a_newer_one(good: Path, training: Training, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "new")
    (tmp_path / "new" / "step-000001").rename(tmp_path / "new" / "step-000009")
    with pytest.warns(PenstockWarning, match="directory name of another step"):
        assert training.pipe.load(tmp_path / "new").step == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"plan": {"ranks": "2"}}, r"key: plan\.ranks, reason: Input should be a valid integer"),
        ({"color": 1, "step": "1"}, "key: step, reason: Input should be a valid integer"),
    ],
)
def test_an_error_in_the_manifest_names_the_key(values: Any, words: str, good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "step-000001", tmp_path / "one")
    rewritten(tmp_path / "one", "run.json", b"{}", **values)
    with pytest.raises(DamagedError, match=words):
        read_manifest(tmp_path / "one")
