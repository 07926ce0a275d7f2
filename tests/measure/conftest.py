"""Links are measured on the processes that the tests of the runtime use."""

from tests.runtime.conftest import pools, pytest_collection_modifyitems, pytest_configure

__all__ = ["pools", "pytest_collection_modifyitems", "pytest_configure"]
