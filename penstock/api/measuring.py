"""The doors from a captured model to its Profile, and from a running group to its Cluster."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.api.progress import progress as progress_bar
from penstock.capture import Captured
from penstock.errors import CaptureError, CostError
from penstock.ir import Cluster, DeviceSpeed, Profile, as_int, is_finite
from penstock.measure import Cache, identity
from penstock.measure import estimate as estimate_nodes
from penstock.measure import measure as measure_nodes
from penstock.measure import measure_links as measure_group
from penstock.measure import measure_speed as measure_device
from penstock.runtime import measured_model

BUDGET_SECONDS = 20.0


def measure(
    captured: Captured,
    *,
    iterations: int = 10,
    loss_fn: Callable[..., Any] | None = None,
    speed: DeviceSpeed | None = None,
    cache: bool | str | Path | None = True,
    budget: float = BUDGET_SECONDS,
    progress: bool | None = None,
) -> Profile:
    """Seconds and bytes of every node of a captured model, for a microbatch like its example.

    Each node runs alone, so often as `iterations` says, by turns with the unsplit model, to whose step the sum is
    calibrated. After `budget` seconds no further turn begins, unless it is one of the first three. With a `loss_fn`
    gradients of all outputs return, else of the loss among them. A profile that was measured before, of the same model,
    code, shapes, device and settings, is taken from the `cache`: the user's, a directory, or False for none.

    On the meta device, or if a `speed` is given, nothing is timed: seconds are estimated from operations and bytes.
    """
    _check(captured, iterations, budget)
    _check_kinds(loss_fn, speed, cache)
    subject = measured_model(captured, loss_fn is not None)
    with progress_bar("measuring", progress) as tell:
        if captured.is_meta or speed is not None:
            return estimate_nodes(subject, speed or measure_speed(), tell)
        store = _store(cache)
        key = f"{identity(subject)}-{iterations}" if store else ""
        found = store.get(key) if store else None
        if found is None or found.fingerprint != subject.graph.fingerprint:
            found = measure_nodes(subject, iterations, budget, tell)
            if store:
                store.put(key, found)
        return found


def measure_speed(device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> DeviceSpeed:
    """How fast a device is, found in a moment; by default that of the first GPU, or of the CPU."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    return measure_device(device or usual, dtype)


def measure_links(
    group: Any = None, *, memory: int | str | tuple[int, ...] | None = None, progress: bool | None = None
) -> Cluster:
    """A Cluster with the latency and bandwidth between the ranks of a running group, the same on every rank.

    All ranks must call it. `memory` is what a rank has, in bytes or as "24GiB", one figure or one per rank.
    """
    with progress_bar("measuring links", progress) as tell:
        return replace(measure_group(group, progress=tell), memory=memory)


def clear_profiles(directory: str | Path | None = None) -> int:
    """Forget all measured profiles, the user's or those in a directory; returns how many there were."""
    return Cache(directory).clear()


def _store(cache: bool | str | Path | None) -> Cache | None:
    if cache is None or cache is False:
        return None
    return Cache(None if cache is True else cache)


def _check(captured: object, iterations: object, budget: object) -> None:
    if not isinstance(captured, Captured):
        hint = "penstock.measure(penstock.capture(model, args))"
        raise CaptureError("measure takes a captured model", given=type(captured).__name__, hint=hint)
    count = as_int(iterations)
    if count is None or count < 1:
        raise CostError("iterations must be a whole number, 1 or more", iterations=repr(iterations))
    if not is_finite(budget) or budget < 0:  # type: ignore[operator]  # a number by now
        raise CostError("the budget is seconds, 0 or more", budget=repr(budget))


def _check_kinds(loss_fn: object, speed: object, cache: object) -> None:
    if not (loss_fn is None or (callable(loss_fn) and not isinstance(loss_fn, type))):
        raise CostError("loss_fn is a function", given=repr(loss_fn), hint="a function of output and target")
    if not (speed is None or isinstance(speed, DeviceSpeed)):
        raise CostError("speed is a DeviceSpeed", given=repr(speed), hint="penstock.measure_speed()")
    if not (cache is None or isinstance(cache, bool | str | Path)):
        raise CostError("the cache is a directory", given=repr(cache), hint="cache=True, cache=False, or a path")
