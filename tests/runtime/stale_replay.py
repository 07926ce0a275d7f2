"""The oracle of asynchronous pipelines: one process that replays the weights of every microbatch in plain PyTorch.

Each stage is a module of its own. A microbatch runs through copies of the stages that hold the weights of its forward,
and its gradients are added up in those copies' originals. Which weights a forward uses follows from counting: stage s
of S has done the backward of microbatch k - (S - 1 - s) - 1 before its forward of microbatch k.
"""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from penstock.batches import microbatch_sizes

Versions = list[list[dict[str, Tensor]]]
Predicted = list[dict[tuple[int, int], dict[str, Tensor]]]
LossFn = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer]


class StaleReplay:
    """Trains `stages` as a stream of batches would; call `run` once per stream."""

    def __init__(
        self, stages: Sequence[nn.Module], make: MakeOptimizer, loss_fn: LossFn, microbatches: int, staleness: str
    ) -> None:
        self.stages, self._loss_fn, self._microbatches, self._staleness = stages, loss_fn, microbatches, staleness
        self._optimizers = [make(list(stage.parameters())) for stage in stages]
        self.losses: list[Tensor] = []

    def run(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One stream, drained at its end."""
        count = len(self.stages)
        sizes = [microbatch_sizes(len(x), self._microbatches) for x, _ in batches]
        ends = [sum(map(len, sizes[: index + 1])) for index in range(len(sizes))]
        # versions[s][u] are the weights of stage s after u updates, predicted[s][u, d] those predicted d updates on.
        versions = [[copy.deepcopy(stage.state_dict())] for stage in self.stages]
        predicted: Predicted = [{} for _ in self.stages]
        for stage in range(count):
            self._predict(stage, 0, versions, predicted)
        microbatch = 0
        for batch, (x, target) in enumerate(batches):
            total = torch.zeros((), dtype=torch.float64)
            for part, wanted in zip(x.split(sizes[batch]), target.split(sizes[batch]), strict=True):
                used = []
                for stage in range(count):
                    done = microbatch - (count - 1 - stage)
                    updates = sum(end <= done for end in ends)
                    if self._staleness == "2bw":
                        updates = max(batch - 1, 0)
                    ahead = batch - updates
                    if self._staleness == "predict" and ahead:
                        used.append(predicted[stage][updates, ahead])
                    else:
                        used.append(versions[stage][updates])
                weight = len(part) / len(x)
                total += self._step(part, wanted, used, weight).double() * weight
                microbatch += 1
            for stage, optimizer in enumerate(self._optimizers):
                self.stages[stage].load_state_dict(versions[stage][batch])
                optimizer.step()
                optimizer.zero_grad()
                versions[stage].append(copy.deepcopy(self.stages[stage].state_dict()))
                self._predict(stage, batch + 1, versions, predicted)
            self.losses.append(total)

    def _step(self, x: Tensor, target: Tensor, used: Sequence[dict[str, Tensor]], weight: float) -> Tensor:
        """Forward and backward of a microbatch with these weights; gradients are added to those of the stages."""
        copies = []
        for stage, state in zip(self.stages, used, strict=True):
            stale = copy.deepcopy(stage)
            stale.load_state_dict(state)
            stale.zero_grad()
            copies.append(stale)
            x = stale(x)
        loss = self._loss_fn(x, target)
        loss.backward(torch.full_like(loss, weight))
        for stage, stale in zip(self.stages, copies, strict=True):
            for parameter, other in zip(stage.parameters(), stale.parameters(), strict=True):
                if other.grad is not None:
                    parameter.grad = other.grad if parameter.grad is None else parameter.grad + other.grad
        return loss.detach()

    def _predict(self, stage: int, updates: int, versions: Versions, predicted: Predicted) -> None:
        """Predict the weights of a stage from its newest version and the present state of its optimizer."""
        if self._staleness != "predict":
            return
        optimizer, module = self._optimizers[stage], self.stages[stage]
        for ahead in range(1, len(self.stages) + 1):
            state = dict(versions[stage][updates])
            for name, parameter in module.named_parameters():
                state[name] = predicted_weight(optimizer, parameter, state[name], ahead)
            predicted[stage][updates, ahead] = state


def predicted_weight(optimizer: torch.optim.Optimizer, parameter: Tensor, weight: Tensor, ahead: int) -> Tensor:
    """SGD with momentum, Adam and AdamW without weight decay of the L2 kind, as docs/asynchronous.md defines it."""
    state, group = optimizer.state.get(parameter, {}), optimizer.param_groups[0]
    rate = group["lr"]
    if state.get("momentum_buffer") is not None:
        buffer = state["momentum_buffer"]
        for _ in range(ahead):
            buffer = buffer * group["momentum"]
            weight = torch.add(weight, buffer, alpha=-rate)
    elif "exp_avg" in state:
        (beta1, beta2), mean, done = group["betas"], state["exp_avg"], int(state["step"])
        for step in range(done + 1, done + ahead + 1):
            mean = mean * beta1
            if group["decoupled_weight_decay"]:
                weight = weight * (1 - rate * group["weight_decay"])
            root = state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step) + group["eps"]
            weight = torch.addcdiv(weight, mean, root, value=-rate / (1 - beta1**step))
    return weight
