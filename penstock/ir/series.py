"""Series: an immutable row of numbers that compares, hashes and prints like a tuple, and computes like an array."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray


class Series:
    """Seconds or bytes in a row; `values` is a read-only array."""

    def __init__(self, values: Iterable[float] | NDArray[np.float64]) -> None:
        array = values if isinstance(values, np.ndarray) else np.asarray(tuple(values), dtype=np.float64)
        self.values: NDArray[np.float64] = np.array(array, dtype=np.float64)
        self.values.flags.writeable = False

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[float]:
        return iter(self.values.tolist())

    def __getitem__(self, place: int) -> float:
        return float(self.values[place])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return NotImplemented
        return np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        # Adding 0 turns -0 into 0: what is equal must hash alike.
        return hash((self.values + 0.0).tobytes())

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:g}" for value in self.values[:6])
        return f"Series({len(self)}: {shown}{', ...' if len(self) > 6 else ''})"
