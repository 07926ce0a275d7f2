"""Seeds: random numbers that depend on step, microbatch and block only, not on who runs them or when."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A number of 63 bits that looks random, from a few small ones; their order matters."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 29) * 0x94D049BB133111EB & _MASK
        state ^= state >> 32
    return state >> 1


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Whatever is seeded inside, the user's own random numbers go on as if nothing had been."""
    host = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
