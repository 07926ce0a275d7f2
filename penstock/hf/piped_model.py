"""PipedModel: what a Trainer holds in the place of the model that it would wrap for training on several processes."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from penstock.api.pipeline import Pipeline


class PipedModel(nn.Module):
    """A call is an evaluation by all ranks; its parameters are those of this rank, by the names of the whole model."""

    def __init__(self, pipe: Pipeline, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # In a tuple: no module, and nothing that is looked into.
        self._pipe = (pipe,)
        self.keeps_outputs = True
        """whether a call returns more than the loss"""

    def forward(self, **inputs: Any) -> Any:
        """What the model would return for the whole batch, on every rank."""
        result = self._pipe[0].eval(**inputs, return_outputs=self.keeps_outputs)
        if result.outputs is None:
            return {"loss": result.loss}
        if not hasattr(result.outputs, "items"):
            return result.outputs if result.loss is None else (result.loss, *result.outputs[1:])
        found = {name: value for name, value in result.outputs.items() if name != "loss" and value is not None}
        return found if result.loss is None else {"loss": result.loss, **found}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's; a tied one by its first name, as in the whole model."""
        graph = self._pipe[0].plan.graph
        return ((graph.tensor_of(name), parameter) for name, parameter in self._pipe[0].named_parameters())
