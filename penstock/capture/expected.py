"""Expected: what was read from tensors once, and whether the same is read again."""

from dataclasses import dataclass
from typing import Any

import numpy as np

_WITH_NAN = (float, complex, list, tuple)


@dataclass(frozen=True, eq=False)
class Expected:
    """What a guard expects to read."""

    value: Any

    def agrees(self, found: Any) -> bool:
        """Whether the same was read again."""
        if isinstance(self.value, np.ndarray):
            return np.array_equal(found, self.value, equal_nan=True)
        if type(found) is not type(self.value):
            return False
        # What is not a number is the same as itself, also inside a list.
        return bool(found == self.value) or (isinstance(found, _WITH_NAN) and repr(found) == repr(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expected) and self.agrees(other.value)

    __hash__ = None  # type: ignore[assignment]
