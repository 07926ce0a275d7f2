"""Tests of broken runs look whether anything was left behind."""

from tests.leftovers import tidy

__all__ = ["tidy"]
