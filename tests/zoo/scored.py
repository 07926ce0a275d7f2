"""Scored: a plain torch.nn model that returns its loss first when it is given labels."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class Scored(nn.Module, ABC):
    """`answer` is the model; the loss is the distance of its first tensor from the labels."""

    @abstractmethod
    def answer(self, *inputs: Any) -> Any:
        """What the model makes of its inputs."""

    def forward(self, *inputs: Any, labels: Tensor | None = None) -> Any:
        """The answer, or the loss and the answer."""
        answer = self.answer(*inputs)
        if labels is None:
            return answer
        first = answer[0] if isinstance(answer, tuple) else answer
        return functional.mse_loss(first.float(), labels), answer
