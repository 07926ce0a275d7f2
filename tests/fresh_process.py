"""Runs a function in a process of its own, for what depends on the state of torch's compiler."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function of a module, called in a new Python process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
