"""MECHANISM: nn.Module + example batch -> Graph and its live module, by running the real forward and recording it."""

from penstock.capture.captured import Captured, capture
from penstock.capture.microbatches import Microbatch, Split, microbatch_sizes, split_batch

__all__ = ["Captured", "Microbatch", "Split", "capture", "microbatch_sizes", "split_batch"]
