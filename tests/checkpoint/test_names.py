"""Names in a checkpoint are mapped to names of the model."""

import pytest

from penstock.checkpoint import ModelNames, match_names
from penstock.errors import CheckpointError

NAMES = ModelNames(
    frozenset({"body.first", "body.second", "head"}),
    tied=(("body.first", "head"),),
    unsaved=frozenset({"body.table"}),
    prefix="body",
    ignored=(r"\.mask$",),
)


def test_tied_names_are_read_from_the_one_that_was_saved() -> None:
    found = match_names(["body.second", "head"], NAMES)
    assert found == {"body.first": ("head",), "body.second": ("body.second",), "head": ("head",)}


def test_buffers_that_are_not_saved_and_ignored_names_are_allowed() -> None:
    assert match_names(["body.first", "body.second", "body.table", "body.mask"], NAMES)["head"] == ("body.first",)


def test_a_checkpoint_of_the_inner_model_is_accepted_if_all_names_match() -> None:
    assert match_names(["first", "second", "table"], NAMES)["body.second"] == ("second",)
    inner = ModelNames(frozenset({"first", "second"}), prefix="body")
    assert match_names(["body.first", "body.second"], inner)["first"] == ("body.first",)


@pytest.mark.parametrize("found", [["first"], ["body.first", "body.second", "other"], ["first", "second", "other"]])
def test_names_that_do_not_match_entirely_are_refused(found: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"missing|unexpected"):
        match_names(found, NAMES)


def test_a_refusal_lists_names_and_suggests_a_similar_one() -> None:
    with pytest.raises(CheckpointError) as refusal:
        match_names(["body.frist", "body.second"], NAMES)
    assert "missing: body.first, head" in str(refusal.value)
    assert "unexpected: body.frist" in str(refusal.value)
    assert "'body.frist' is this model's 'body.first'" in refusal.value.hint
