"""Random state: where the generators of torch, numpy and Python stand, so that a resumed training goes on with them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.errors import DamagedError


def random_state() -> dict[str, Any]:
    """Of this process."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restorer(state: Any) -> Callable[[], None]:
    """What puts the generators back where they stood; it is tried out here, and changes nothing until it is called."""
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
