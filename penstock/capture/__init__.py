"""MECHANISM: nn.Module + example batch -> Graph and its live module, by running the real forward and recording it."""

from penstock.capture.captured import Captured, capture

__all__ = ["Captured", "capture"]
