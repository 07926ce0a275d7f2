"""docs/architectures.md is what the survey writes, and the zoo's part of it is true."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.stages.architectures import Architecture
from tests.survey import results
from tests.survey.__main__ import LIBRARIES, PARTS, main, read_corpus, survey_model
from tests.survey.cases import RESULTS, Case, run, squares
from tests.survey.document import DOCUMENT, render
from tests.survey.results import Entry, Part
from tests.survey.zoo import run_zoo_model
from tests.zoo import ZOO
from tests.zoo.batch import noise
from tests.zoo.by_hand import MODELS as BY_HAND

STORED = results.load()


def test_the_document_is_written_from_the_stored_results() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(STORED)


def test_the_document_has_every_model_of_the_zoo_and_the_libraries() -> None:
    models = {"zoo": list(ZOO), **{name: list(library.MODELS) for name, library in LIBRARIES.items()}}
    assert {name: list(STORED[name].models) for name in PARTS} == models
    assert len(ZOO) >= 80


def test_no_difference_of_the_zoo_is_beyond_its_tolerance() -> None:
    for name, entry in STORED["zoo"].models.items():
        assert entry.difference <= Architecture(name, "blocks").tolerance, name


# Without --whole some of those written by hand, and one that is warned of.
SELECTED = (*list(BY_HAND)[::6], "batch_norm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SELECTED else pytest.mark.whole) for name in ZOO]
)
def test_a_model_of_the_zoo_has_the_outcome_that_the_document_shows(name: str) -> None:
    entry, outcome = STORED["zoo"].models[name], run_zoo_model(name)
    assert (outcome.result, outcome.reason) == (entry.result, entry.reason)


class Counting(nn.Module):
    """Does something else in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x) * self.calls
        return x


def test_outcomes_are_told_apart_by_the_check() -> None:
    x, target = noise(4, 4), noise(4, 4, seed=1)
    linear = [nn.Linear(4, 4) for _ in range(4)]
    exact = run(Case(nn.Sequential(*linear), (x,), loss_fn=mse_loss, target=target))
    random = run(Case(nn.Sequential(*linear, nn.Dropout(0.5)), (x,), loss_fn=squares))
    coupled = run(Case(nn.Sequential(*linear), (x,), loss_fn=lambda output, _: output.mean(0).square().sum()))
    refused = run(Case(Counting(), (x,), loss_fn=squares))
    assert [outcome.result for outcome in (exact, random, coupled, refused)] == ["exact", "exact", "warned", "refused"]
    assert coupled.reason
    assert "runs differently each time" in refused.reason


def test_a_model_that_is_refused_is_tried_without_microbatches() -> None:
    entry = survey_model(lambda: Case(Counting(), (torch.ones(4, 4),), loss_fn=squares))
    assert (entry.result, entry.stages) == ("refused", "refused")


def test_results_are_read_as_they_were_saved(tmp_path: Path) -> None:
    parts = {"zoo": Part({"torch": "2"}, {"a": Entry("refused", 'a "reason"', "exact", (3, 40), (1, 1), 2e-7)})}
    results.save(parts, tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == parts
    assert results.load(tmp_path / "missing.json") == {}


def test_results_of_the_tests_of_transformers_are_shown_with_their_reasons(tmp_path: Path) -> None:
    matches = "the pipeline matches the unsplit model\nthe same microbatches, one after another: identical"
    cases = {
        "bert": {"model": "B", "result": "refused", "error": "CaptureError: no"},
        "albert": {"model": "A", "result": "exact", "report": f"{matches}\nthe whole batch: identical"},
        "resnet": {"model": "R", "result": "exact", "report": f"{matches}\nbatch norm: a"},
        "clip": {"model": "C", "result": "does not train"},
    }
    rows = [{"case": f"tests.models.{name}.test_modeling_{name}.Test", **case} for name, case in cases.items()]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    part = read_corpus(path)
    assert part.models == {
        "albert A": Entry("exact"),
        "bert B": Entry("refused", "CaptureError: no", "unknown"),
        "resnet R": Entry("warned", "batch norm: a"),
    }
    page = render({"tests of transformers": part})
    assert "| all | 3 | 1 | 1 | 1 | 0 | 0 |" in page
    assert "| refused | CaptureError: no | bert B |" in page


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cooking"]) == 2
    assert "unknown part (name: cooking)\ntry: zoo, timm" in capsys.readouterr().err


def test_results_are_those_that_the_document_counts() -> None:
    assert {entry.result for part in STORED.values() for entry in part.models.values()} <= set(RESULTS)
