"""Every test of this package leaves no process and no file behind."""

from tests.leftovers import tidy

__all__ = ["tidy"]
