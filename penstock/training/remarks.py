"""Remarks: what a user should know about a run, each said once."""

import warnings

from penstock.training.ending import Ending
from penstock.training.load import Load


class Remarks:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._seen: list[object] = []

    def say(self, load: Load, ending: Ending) -> None:
        """Warn of everything that makes the numbers of microbatches differ from those of the whole batch."""
        for recording in load.inputs.recordings:
            if not any(recording is one for one in self._seen):
                self._seen.append(recording)
                for sentence in ending.remarks(recording):
                    if sentence not in self._said:
                        self._said.add(sentence)
                        text = f"{sentence}; gradients are those of a loop over the microbatches"
                        warnings.warn(text, UserWarning, stacklevel=6)
