"""The model that Trainer sees in place of its wrapped model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.api.forward_pass import ForwardPass
from penstock.api.pipeline import Pipeline
from penstock.capture import is_inexact
from penstock.ir import map_leaves, named_leaves


class PipelineOutput(dict[str, Any]):
    """Outputs by name, also as attributes and by position, like those of a transformers model."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in ("loss", "logits"):  # of every transformers model, None if absent
            return None
        raise AttributeError(f"the model has no output {name!r}; it has {', '.join(self)}")

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The outputs without their names."""
        return tuple(self.values())


class PipelineModel(nn.Module):
    """A call runs a batch through the pipeline and returns the outputs on every rank. Parameters are this rank's.

    In training mode and with gradients enabled, outputs are leaves of autograd: after `loss.backward()`, `backward`
    runs the backward of the pipeline, from the gradients of the outputs of every call.
    """

    def __init__(self, pipe: Pipeline, model: nn.Module, device_type: str, autocast: torch.dtype | None) -> None:
        """With a dtype as `autocast`, the pipeline computes in it, and outputs are float32, as with accelerate."""
        super().__init__()
        self.model = model
        # In a tuple, so that nn.Module does not treat it as a submodule.
        self._pipe = (pipe,)
        self._device_type, self._autocast_dtype = device_type, autocast
        self._calls: list[tuple[ForwardPass, Any]] = []
        self.keeps_outputs = True
        """whether an evaluation returns outputs besides the loss"""

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the pipeline computes."""
        return (
            nullcontext() if self._autocast_dtype is None else torch.autocast(self._device_type, self._autocast_dtype)
        )

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """The outputs of the model for the whole batch, on every rank."""
        if self.training:
            with self.autocast():
                forward_pass = self._pipe[0].forward(*args, **inputs)
            outputs = self._outputs(forward_pass.outputs)
            if not torch.is_grad_enabled():
                return outputs
            leaves = map_leaves(outputs, _autograd_leaf)
            self._calls.append((forward_pass, leaves))
            # Copies, because the loss may be changed in place, which is not allowed for leaves.
            return map_leaves(leaves, _clone_leaf)
        with self.autocast():
            result = self._pipe[0].eval(*args, **inputs, return_outputs=self.keeps_outputs)
        if result.outputs is None:
            return PipelineOutput(loss=result.loss)
        outputs = self._outputs(result.outputs)
        if result.loss is None:
            return outputs
        if isinstance(outputs, PipelineOutput):
            return PipelineOutput({"loss": result.loss, **{name: outputs[name] for name in outputs if name != "loss"}})
        return (result.loss, *outputs[1:]) if isinstance(outputs, tuple) else result.loss

    def _outputs(self, outputs: Any) -> Any:
        """Named outputs as a PipelineOutput: on other ranks than that of the last stage they are plain dicts."""

        def in_float32(leaf: object) -> object:
            is_half = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
            return leaf.float() if is_half else leaf

        found = outputs if self._autocast_dtype is None else map_leaves(outputs, in_float32)
        if hasattr(found, "items"):
            return PipelineOutput({name: value for name, value in found.items() if value is not None})
        return found

    def backward(self) -> None:
        """Run backward through the pipeline for every call, from the gradients of its outputs; collective."""
        calls, self._calls = self._calls, []
        for forward_pass, made in calls:
            leaves = [(name, leaf) for name, leaf in named_leaves(made, "") if isinstance(leaf, Tensor)]
            with self.autocast():
                forward_pass.backward({name: leaf.grad for name, leaf in leaves if leaf.grad is not None})

    @property
    def has_calls(self) -> bool:
        """Whether a call was made with gradients whose backward has not run."""
        return bool(self._calls)

    def drop_calls(self) -> None:
        """Drop the calls of a step that failed."""
        self._calls.clear()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters; a tied one by its first name, as in the whole model."""
        graph = self._pipe[0].plan.graph
        return ((graph.tensor_of(name), parameter) for name, parameter in self._pipe[0].named_parameters())

    def _get_name(self) -> str:
        # Trainer decides by the class name whether a smoothed loss shifts labels.
        inner = getattr(self.model, "base_model", self.model) if hasattr(self.model, "peft_config") else self.model
        return type(getattr(inner, "model", inner) if inner is not self.model else inner).__name__

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)  # such as config, device and dtype


def _autograd_leaf(value: object) -> object:
    return value.detach().requires_grad_() if isinstance(value, Tensor) and is_inexact(value) else value


def _clone_leaf(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value
