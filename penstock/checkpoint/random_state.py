"""State of the random number generators of torch, numpy and Python."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.errors import DamagedError


def random_state() -> dict[str, Any]:
    """The state of this process's generators."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def random_state_restorer(state: Any) -> Callable[[], None]:
    """Check a state on separate generators; the returned function applies it."""
    try:
        torch.Generator().set_state(state["torch"])
        np.random.RandomState().set_state(state["numpy"])
        random.Random().setstate(state["python"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedError("the state of random numbers cannot be read", reason=error) from None

    def restore() -> None:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])

    return restore
