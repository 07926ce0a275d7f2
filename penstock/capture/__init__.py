"""MECHANISM: nn.Module + example batch -> Graph and its live module, by running the real forward and recording it."""

from penstock.capture.book import spec_of
from penstock.capture.calls import watched_modules
from penstock.capture.captured import Captured, capture
from penstock.capture.generators import States, python_sources, seed_generators, torch_sources
from penstock.capture.hooks import silent_hooks
from penstock.capture.leaves import Granularity
from penstock.capture.microbatches import Microbatch, Split, microbatch_sizes, split_batch
from penstock.capture.onlooker import shown_to
from penstock.capture.recording import Recording, make_recording
from penstock.capture.replay import Replay
from penstock.capture.surroundings import uncompiled, undisturbed

__all__ = [
    "Captured",
    "Granularity",
    "Microbatch",
    "Recording",
    "Replay",
    "Split",
    "States",
    "capture",
    "make_recording",
    "microbatch_sizes",
    "python_sources",
    "seed_generators",
    "shown_to",
    "silent_hooks",
    "spec_of",
    "split_batch",
    "torch_sources",
    "uncompiled",
    "undisturbed",
    "watched_modules",
]
