"""measure, measure_speed and measure_links: costs of a model, a device and the links between ranks."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.api.progress import progress as progress_bar
from penstock.capture import Captured
from penstock.errors import CaptureError, CostError, RunError
from penstock.ir import Cluster, DeviceSpeed, Profile, as_int, is_finite
from penstock.loss import added_losses, loss_values
from penstock.measure import Cache, MeasuredModel, profile_key
from penstock.measure import estimate as estimate_nodes
from penstock.measure import measure as measure_nodes
from penstock.measure import measure_links as measure_group
from penstock.measure import measure_speed as measure_device

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
    """Measure seconds and bytes of every node of a captured model, for a microbatch like its example.

    Each node runs alone, interleaved with the full model; the sum is scaled to the measured full step. On the meta
    device, or if a `speed` is given, nothing is timed: seconds are estimated from operations and bytes.

    Args:
        captured: the model, from `capture`
        iterations: how often each node runs
        loss_fn: if given, gradients of all outputs are propagated, else of the loss among them
        speed: estimate for a device of this speed
        cache: where profiles of the same model, code, shapes, device and settings are read from and written to:
            True for the user's cache directory, a directory, or False for none
        budget: seconds after which no further iteration starts, except the first three
        progress: whether to show a progress bar; None: on a terminal

    Returns:
        The cost of every node.

    Raises:
        CostError: if an argument is invalid
        CaptureError: if `captured` is not a captured model
    """
    _check_arguments(captured, iterations, budget, loss_fn, speed, cache)
    subject = measured_model(captured, loss_fn is not None)
    with progress_bar("measuring", progress) as update:
        if captured.is_meta or speed is not None:
            return estimate_nodes(subject, speed or measure_speed(), update)
        if cache is None or cache is False:
            return measure_nodes(subject, iterations, budget, update)
        profiles, key = Cache(None if cache is True else cache), f"{profile_key(subject)}-{iterations}"
        profile = profiles.get(key)
        if profile is None or profile.fingerprint != subject.graph.fingerprint:
            profile = measure_nodes(subject, iterations, budget, update)
            profiles.put(key, profile)
        return profile


def measured_model(captured: Captured, has_loss_fn: bool = False) -> MeasuredModel:
    """The model to be measured, trained as a plan with or without a loss function would train it.

    Backward starts from the loss that the model returns, or from all outputs if a loss function takes them. A model
    that returns no loss will be given a loss function later.
    """
    roots = captured.graph.outputs
    if not has_loss_fn:
        with suppress(RunError):
            roots = tuple(loss_values(captured.example_recording).values())
    return MeasuredModel(captured, roots, added_losses)


def measure_speed(device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> DeviceSpeed:
    """Measure operations and bytes per second of a device.

    Args:
        device: None: the first GPU, or the CPU
        dtype: the dtype of the matrices that are multiplied

    Returns:
        The measured rates.

    Raises:
        CostError: if the device cannot be measured
    """
    return measure_device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu", dtype)


def measure_links(
    group: Any = None, *, memory: int | str | tuple[int, ...] | None = None, progress: bool | None = None
) -> Cluster:
    """Measure latency and bandwidth between the ranks of a running group. A collective call.

    Args:
        group: the process group; None: all processes
        memory: memory of a rank for the result, in bytes or as "24GiB", one value or one per rank
        progress: whether to show a progress bar; None: on a terminal

    Returns:
        The same Cluster on every rank.

    Raises:
        RunError: without an initialised process group, or if a rank does not answer
    """
    with progress_bar("measuring links", progress) as update:
        return replace(measure_group(group, progress=update), memory=memory)


def clear_profiles(directory: str | Path | None = None) -> int:
    """Delete all cached profiles.

    Args:
        directory: a cache directory; None: the user's

    Returns:
        The number of deleted profiles.

    Raises:
        OSError: if a file cannot be deleted
    """
    return Cache(directory).clear()


def _check_arguments(
    captured: object, iterations: object, budget: object, loss_fn: object, speed: object, cache: object
) -> None:
    if not isinstance(captured, Captured):
        hint = "penstock.measure(penstock.capture(model, args))"
        raise CaptureError("captured must be a captured model", got=type(captured).__name__, hint=hint)
    count = as_int(iterations)
    if count is None or count < 1:
        raise CostError("iterations must be a whole number, 1 or more", got=repr(iterations), hint="iterations=10")
    if not is_finite(budget) or budget < 0:
        raise CostError("budget must be 0 seconds or more", got=repr(budget), hint=f"budget={BUDGET_SECONDS:g}")
    if not (loss_fn is None or (callable(loss_fn) and not isinstance(loss_fn, type))):
        raise CostError("loss_fn must be a function", got=repr(loss_fn), hint="a function of output and target")
    if not (speed is None or isinstance(speed, DeviceSpeed)):
        raise CostError("speed must be a DeviceSpeed", got=repr(speed), hint="penstock.measure_speed()")
    if not (cache is None or isinstance(cache, bool | str | Path)):
        hint = "cache=True, cache=False, or a path"
        raise CostError("cache must be a directory, True or False", got=repr(cache), hint=hint)
