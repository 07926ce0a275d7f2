"""Behind: modules as the second of two stages, run forward and backward in microbatches, whole or in parts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.capture import capture
from penstock.partitioners import by_modules
from penstock.stages import Stage, StageRun, split

_NUM_MICROBATCHES = 3


class Scale(nn.Module):
    """The first stage: it makes all that comes in need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """x times one."""
        return x * self.factor.to(x.dtype)


class Behind:
    """A module, and others after it, as the second of two stages; the first one only scales its input."""

    def __init__(self, module: nn.Module, example: Tensor, *others: nn.Module) -> None:
        self.model = nn.Sequential(Scale(), module, *others)
        self.captured = capture(self.model, (example,))
        graph = self.captured.graph
        names = [str(place) for place in range(1, len(self.model))]
        self.stage: Stage = split(self.captured, by_modules(graph, [["0"], names]))[1]
        self.example, self.name = example, graph.nodes[0].makes[0].name

    def run(self, is_split: bool, number: int = 0) -> StageRun:
        """One forward; each number is another microbatch."""
        value = (self.example + number).detach().requires_grad_()
        with torch.random.fork_rng():
            torch.manual_seed(number)
            return StageRun(self.stage, self.captured.first, {}, {self.name: value}, is_split)

    def gradients(self, is_split: bool, before_weights: Callable[[], object] = lambda: None) -> dict[str, Tensor]:
        """All gradients of parameters and inputs, summed over microbatches; in parts, all inputs come first."""
        self.model.zero_grad()
        runs = [self.run(is_split, number) for number in range(_NUM_MICROBATCHES)]
        back = [{name: torch.cos(value.detach()) for name, value in each.take_outputs().items()} for each in runs]
        found: dict[str, Tensor] = {}
        for number, (run, gradient) in enumerate(zip(runs, back, strict=True)):
            returned = run.input_grad(gradient) if is_split else run.backward(gradient)
            found |= {f"{name} {number}": each for name, each in returned.items() if each is not None}
        before_weights()
        if is_split:
            for run in runs:
                run.weight_grad()
        return found | {name: p.grad for name, p in self.stage.named_parameters() if p.grad is not None}


def differing(ones: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    """The names under which two sets of gradients are not the same, bit for bit."""
    return [
        name
        for name in sorted({*ones, *others})
        if name not in ones
        or name not in others
        or ones[name].dtype is not others[name].dtype
        or not torch.equal(ones[name], others[name])
    ]
