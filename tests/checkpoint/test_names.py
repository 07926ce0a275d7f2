"""Which tensor of a checkpoint is which of a model."""

import pytest

from penstock.checkpoint import ModelNames, match
from penstock.errors import CheckpointError

NAMES = ModelNames(
    frozenset({"body.first", "body.second", "head"}),
    tied=(("body.first", "head"),),
    unsaved=frozenset({"body.table"}),
    prefix="body",
    ignored=(r"\.mask$",),
)


def test_tied_names_find_the_one_that_was_saved() -> None:
    found = match(["body.second", "head"], NAMES)
    assert found == {"body.first": ("head",), "body.second": ("body.second",), "head": ("head",)}


def test_what_the_model_does_not_save_or_passes_over_may_be_there() -> None:
    assert match(["body.first", "body.second", "body.table", "body.mask"], NAMES)["head"] == ("body.first",)


def test_a_checkpoint_of_the_inner_model_is_read_if_all_of_it_fits() -> None:
    assert match(["first", "second", "table"], NAMES)["body.second"] == ("second",)
    inner = ModelNames(frozenset({"first", "second"}), prefix="body")
    assert match(["body.first", "body.second"], inner)["first"] == ("body.first",)


@pytest.mark.parametrize("found", [["first"], ["body.first", "body.second", "other"], ["first", "second", "other"]])
def test_what_does_not_fit_entirely_is_refused(found: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"missing|unexpected"):
        match(found, NAMES)


def test_a_refusal_lists_names_and_the_one_that_was_meant() -> None:
    with pytest.raises(CheckpointError) as refusal:
        match(["body.frist", "body.second"], NAMES)
    assert "missing: body.first, head" in str(refusal.value)
    assert "unexpected: body.frist" in str(refusal.value)
    assert "'body.frist' is this model's 'body.first'" in refusal.value.hint
