"""Loss scaling for half-precision training, with the same scale and the same skipped steps on all ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.errors import RunError
from penstock.ir import as_int, is_finite
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.nonfinite import all_finite
from penstock.runtime.sync import RankSync, SyncRequest, SyncVote


class GradScaler:
    """Loss scaling for float16. Pass it to the Pipeline, and call `scaler.step(optimizer)` and `scaler.update()`.

    Gradients are multiplied by the scale until `unscale_`, which `step` calls if the user did not. All ranks have the
    same scale and skip the same steps. With several optimizers, step all of them and then call `update` once.

    Args:
        init_scale: the first scale
        growth_factor: factor of the scale after `growth_interval` steps without overflow
        backoff_factor: factor of the scale after an overflow
        growth_interval: number of steps without overflow after which the scale grows
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        _check(init_scale, growth_factor, backoff_factor, growth_interval)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.scale = float(init_scale)
        self.skipped = 0
        """number of optimizer steps that were skipped"""
        self._clean = 0
        """updates since the last overflow or growth"""
        self._gradients = _GradientState()
        self._sync = RankSync(ProcessGroups.local(1))

    def bind(self, sync: RankSync) -> None:
        """Use the rank sync of a Pipeline, so that all ranks skip the same steps."""
        self._sync = sync

    def begin(self) -> None:
        """Begin a training step, which adds scaled gradients; the Pipeline calls this."""
        if self._gradients.overflows:
            raise RunError(
                "unscaled gradients must be used before the next step adds scaled ones to them",
                hint="scaler.step(optimizer) and scaler.update() before the next step",
            )
        self._gradients = _GradientState(is_scaled=True)

    def scale_of(self, parameters: Iterable[nn.Parameter]) -> float:
        """The scale of the current gradients of these parameters: 1.0 once they are unscaled."""
        state = self._gradients
        unscaled = {id(parameter) in state.unscaled for parameter in parameters if parameter.grad is not None}
        if state.is_scaled and len(unscaled) > 1:
            raise RunError(
                "either all gradients or none must be unscaled",
                hint="scaler.unscale_ for every optimizer, or for none, before clip_grad_norm_",
            )
        is_unscaled = True in unscaled if unscaled else state.was_unscaled
        return 1.0 if is_unscaled or not state.is_scaled else self.scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and check for overflow on all ranks. A collective call.

        Args:
            optimizer: whose parameters' gradients are divided
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RunError("optimizer must be a torch optimizer", got=type(optimizer).__name__)
        if id(optimizer) in self._gradients.overflows:
            raise RunError("gradients must be unscaled once per step", hint="scaler.update() after each step")
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._gradients.was_unscaled = True
        for parameter in parameters:
            parameter.grad.div_(self.scale)
            self._gradients.unscaled.add(id(parameter))
        has_overflow = not all_finite(parameter.grad for parameter in parameters)
        request = SyncRequest("unscale_", self._sync.step)
        result = self._sync.exchange(request, SyncVote(maxes=(float(has_overflow),)))
        self._sync.operation_ended()
        self._gradients.overflows[id(optimizer)] = result.maxes[0] > 0

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        """Step the optimizer, unless gradients overflowed on any rank. A collective call.

        Args:
            optimizer: the optimizer to step

        Returns:
            What the optimizer's `step` returned; None if it was skipped.
        """
        if id(optimizer) in self._gradients.stepped:
            raise RunError("an optimizer must be stepped once per step", hint="scaler.update() after each step")
        if id(optimizer) not in self._gradients.overflows:
            self.unscale_(optimizer)
        self._gradients.stepped.add(id(optimizer))
        if self._gradients.overflows[id(optimizer)]:
            self.skipped += 1
            return None
        return optimizer.step()

    def update(self) -> None:
        """Reduce the scale after an overflow, and increase it after `growth_interval` steps without one."""
        if not self._gradients.overflows:
            raise RunError("update must follow a step", hint="scaler.step(optimizer), then scaler.update()")
        overflowed = any(self._gradients.overflows.values())
        self._clean = 0 if overflowed else self._clean + 1
        if overflowed:
            self.scale *= self.backoff_factor
        elif self._clean == self.growth_interval:
            self.scale, self._clean = self.scale * self.growth_factor, 0
        self._gradients.overflows.clear()
        self._gradients.stepped.clear()

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"scale": self.scale, "clean": self._clean, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint.

        Args:
            state: what `state_dict` returned
        """
        names = ("scale", "clean", "skipped")
        if not isinstance(state, Mapping) or not all(is_finite(state.get(name)) for name in names):
            raise RunError("the state of a scaler must have three numbers", names=names, got=repr(state))
        if not state["scale"] > 0:
            raise RunError("scale must be above 0", scale=state["scale"])
        self.scale, self._clean, self.skipped = float(state["scale"]), int(state["clean"]), int(state["skipped"])


class _GradientState:
    """Which gradients are scaled, and which optimizers have used them, since the last training step."""

    def __init__(self, is_scaled: bool = False) -> None:
        self.is_scaled = is_scaled
        self.was_unscaled = False
        self.unscaled: set[int] = set()
        """ids of the parameters whose gradients are unscaled"""
        self.overflows: dict[int, bool] = {}
        """by id of each unscaled optimizer, whether gradients overflowed on any rank"""
        self.stepped: set[int] = set()


def _check(init_scale: object, growth_factor: object, backoff_factor: object, growth_interval: object) -> None:
    factors = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
    values = {**factors, "growth_interval": growth_interval}
    for name, value in factors.items():
        if not is_finite(value):
            raise RunError(f"{name} must be a number", got=repr(value), hint="GradScaler(init_scale=65536.0)")
    interval = as_int(growth_interval)
    if not (init_scale > 0 and growth_factor >= 1 and 0 < backoff_factor < 1):
        raise RunError(
            "init_scale must be above 0, growth_factor at least 1 and backoff_factor between 0 and 1", **values
        )
    if interval is None or interval < 1:
        raise RunError("growth_interval must be an integer above 0", got=repr(growth_interval))
