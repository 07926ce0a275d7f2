"""GradScaler: scales the loss of half-precision training; all ranks agree on the scale and on skipped steps."""

from typing import Any

import torch

from penstock.errors import RunError
from penstock.runtime.crew import Crew


class GradScaler:
    """Give it to the Pipeline, then `scaler.step(optimizer)` and `scaler.update()` in the place of `optimizer.step()`.

    Gradients are the scale times too large until `unscale_`, which `step` calls if the user did not.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (init_scale > 0 and growth_factor >= 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise RunError(
                "a scaler needs a scale above 0, growth of at least 1, a backoff below 1 and an interval of 1 or more",
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
            )
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.scale = float(init_scale)
        self.skipped = 0
        """steps that were not taken"""
        self._clean = 0
        self._overflowed: bool | None = None
        self._crew = Crew.inside(1)

    def bind(self, crew: Crew) -> None:
        """Decide together with these ranks from now on."""
        self._crew = crew

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and look for overflow on all ranks."""
        if self._overflowed is not None:
            raise RunError("the gradients are already unscaled", hint="call update after each step")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        self._overflowed = self._is_anywhere(not all(bool(torch.isfinite(gradient).all()) for gradient in gradients))

    def _is_anywhere(self, here: bool) -> bool:
        return bool(self._crew.gather_everywhere(torch.tensor([float(here)])).any())

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        """Take the optimizer's step, on all ranks or on none."""
        if self._overflowed is None:
            self.unscale_(optimizer)
        if self._overflowed:
            self.skipped += 1
            return None
        return optimizer.step()

    def update(self) -> None:
        """A smaller scale after an overflow, a larger one after many clean steps."""
        if self._overflowed is None:
            raise RunError("update without a step", hint="scaler.step(optimizer), then scaler.update()")
        self._clean = 0 if self._overflowed else self._clean + 1
        if self._overflowed:
            self.scale *= self.backoff_factor
        elif self._clean == self.growth_interval:
            self.scale, self._clean = self.scale * self.growth_factor, 0
        self._overflowed = None

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "clean": self._clean, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.scale, self._clean, self.skipped = float(state["scale"]), int(state["clean"]), int(state["skipped"])
