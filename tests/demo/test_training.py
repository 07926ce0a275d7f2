"""The text of the demo is the same in every process, and exists without Python's help pages."""

import sys

import pytest
import torch

from penstock.demo.training import NUM_CHARACTERS, SIZES, batches, shipped_text


def test_the_text_is_long_enough_to_train_on() -> None:
    assert len(shipped_text()) > 100_000


def test_without_the_help_pages_docstrings_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert len(shipped_text()) > 20_000


def test_batches_are_the_same_every_time_and_targets_follow_their_tokens() -> None:
    (tokens, target), *_ = first = list(batches(SIZES, 2))
    again = list(batches(SIZES, 2))
    assert all(torch.equal(torch.stack(one), torch.stack(other)) for one, other in zip(first, again, strict=True))
    assert tokens.shape == (SIZES.samples, SIZES.length)
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    assert int(tokens.max()) < NUM_CHARACTERS
