"""Every test of this room leaves nothing behind."""

from tests.leftovers import tidy

__all__ = ["tidy"]
