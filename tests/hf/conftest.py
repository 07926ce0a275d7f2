"""Settings of the tests of the Hugging Face Trainer."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _frozen_objects() -> None:
    """Accelerate collects garbage after every training: exclude the objects that tests of other files left."""
    gc.collect()
    gc.freeze()
