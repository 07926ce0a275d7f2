"""Modules as the second of two stages, run forward and backward in microbatches with a whole or split backward."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.capture import capture
from penstock.partitioners import by_modules
from penstock.stages import Stage, StageRun, split
from tests.parity import Values

_NUM_MICROBATCHES = 3


class Scale(nn.Module):
    """The first stage: a parameter that gives every input of the second stage a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """x times one."""
        return x * self.factor.to(x.dtype)


class SecondStage:
    """Modules as the second of two stages; the first one only scales its input."""

    def __init__(self, module: nn.Module, example: Tensor, *others: nn.Module) -> None:
        self.model = nn.Sequential(Scale(), module, *others)
        self.captured = capture(self.model, (example,))
        graph = self.captured.graph
        names = [str(index) for index in range(1, len(self.model))]
        self.stage: Stage = split(self.captured, by_modules(graph, [["0"], names]))[1]
        self.example, self.input_name = example, graph.nodes[0].makes[0].name
        self.received: tuple[str, ...] = ()
        """the input's name, if it comes in a message"""

    def run(self, is_split: bool, microbatch: int = 0) -> StageRun:
        """The forward of one microbatch."""
        value = (self.example + microbatch).detach().requires_grad_()
        with torch.random.fork_rng():
            torch.manual_seed(microbatch)
            return StageRun(
                self.stage,
                self.captured.example_recording,
                {},
                {self.input_name: value},
                is_split,
                received=self.received,
            )

    def gradients(self, is_split: bool, before_weights: Callable[[], object] = lambda: None) -> Values:
        """The input gradients of every microbatch and the weight gradients of all of them.

        In a split backward the input gradients of all microbatches come first, then `before_weights` is called.
        """
        self.model.zero_grad()
        runs = [self.run(is_split, microbatch) for microbatch in range(_NUM_MICROBATCHES)]
        output_grads = [{name: torch.cos(value.detach()) for name, value in run.take_outputs().items()} for run in runs]
        found: Values = {}
        for microbatch, (run, output_grad) in enumerate(zip(runs, output_grads, strict=True)):
            input_grads = run.input_grad(output_grad) if is_split else run.backward(output_grad)
            found |= {f"input {name} {microbatch}": grad for name, grad in input_grads.items()}
        before_weights()
        if is_split:
            for run in runs:
                run.weight_grad()
        return found | {f"gradient {name}": parameter.grad for name, parameter in self.stage.named_parameters()}
