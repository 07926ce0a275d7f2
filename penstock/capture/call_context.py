"""The torch contexts in which a call is made: grad mode and autocast, which a replay enters again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from penstock.capture.dtypes import dtype_named
from penstock.capture.objects import code_origin
from penstock.errors import CaptureError
from penstock.ir import CallContext


@contextmanager
def entered(context: CallContext) -> Iterator[None]:
    """Enter the grad mode and autocast of a recorded call, where they differ from those around the model."""
    with ExitStack() as stack:
        if context.grad is not None:
            stack.enter_context(torch.set_grad_enabled(context.grad))
        for device_type, enabled, name in context.autocast:
            dtype = dtype_named(name.removeprefix("torch."))
            stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype))
        yield


class ContextTracker:
    """Compares the contexts inside a forward with those around the model, where the tracker was made.

    Grad mode and autocast can be recorded. Contexts that a replay could not enter again are refused.
    """

    def __init__(self) -> None:
        self._outer_grad, self._outer_autocast = torch.is_grad_enabled(), _autocast_states()
        self._outer_saving = _saved_tensors_hooks()
        self._outer_inference = torch.is_inference_mode_enabled()
        self._num_running_functions = 0

    def current(self) -> CallContext:
        """The context of a call made now."""
        grad = torch.is_grad_enabled()
        # Each device type by itself: a model that runs under autocast for CUDA may turn only that off, as the rotary
        # embeddings of Hugging Face do.
        states = zip(_autocast_states(), self._outer_autocast, strict=True)
        autocast = tuple(state for state, outer in states if state != outer)
        return CallContext(None if grad == self._outer_grad else grad, autocast)

    def counting(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """The `apply` of an autograd function, counted while it runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._num_running_functions += 1
            try:
                return apply(*args, **kwargs)
            finally:
                self._num_running_functions -= 1

        return run

    def in_function_with_own_graph(self) -> bool:
        """Whether an autograd function runs and has enabled gradients: its backward will run a backward inside."""
        return self._num_running_functions > 0 and torch.is_grad_enabled()

    def in_checkpoint(self) -> bool:
        """Whether a checkpoint is active, which runs the calls of the forward again in the backward."""
        return any(getattr(hook, "__module__", "") == "torch.utils.checkpoint" for hook in _saved_tensors_hooks())

    def refuse_unsupported(self, scope: str) -> None:
        """Raise a CaptureError if a context is active that a replay could not enter again."""
        if torch.is_inference_mode_enabled() != self._outer_inference:
            raise CaptureError(
                "the model turns inference mode on between its blocks, where in-place writes cannot be detected",
                module=scope or "the model",
                hint="torch.no_grad() does the same, or keep the module that does so whole (basic_blocks)",
            )
        hooks = _saved_tensors_hooks()
        # The hooks of torch recompute or offload saved tensors, which changes no result.
        has_user_hooks = any(code_origin(getattr(hook, "__module__", "")) != "torch" for hook in hooks)
        if has_user_hooks and hooks != self._outer_saving:
            raise CaptureError(
                "the model changes between its blocks how tensors are saved for the backward (saved_tensors_hooks)",
                module=scope or "the model",
                hint="keep the module that does so whole (basic_blocks)",
            )


def _autocast_states() -> tuple[tuple[str, bool, str], ...]:
    """For each device type, whether autocast is on, and the name of its dtype."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")
    )


def _saved_tensors_hooks() -> tuple[Any, ...]:
    """The innermost pair of pack and unpack hooks, or an empty tuple."""
    return tuple(torch._C._autograd._top_saved_tensors_default_hooks(False) or ())
