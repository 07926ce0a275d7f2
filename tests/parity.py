"""The parity harness: trains a model whole and split, and compares every value that training leaves behind.

A split model runs in one of three ways, chosen by name: "stages" calls the stages of a plan one after another on the
whole batch, "local" is a pipeline inside this process, "processes" is one rank of a pipeline over processes; the name
of a transport in place of "processes" selects how their messages travel.
`WholeModel`, `StagedModel` and `penstock.Pipeline` have the same `step`, so `train` and `values` take all of them.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import stages
from penstock.batches import microbatch_sizes
from penstock.capture import Captured
from penstock.ir import Partition, Plan, WeightGrad, leaves, map_leaves
from tests.process_pool import Pools

Values = dict[str, Tensor | None]
"""losses, outputs, gradients and state by name, such as "gradient 0.weight"; None where there is no gradient"""

LossFn = Callable[[Any, Any], Tensor]

PIPELINES = ("local", pytest.param("processes", marks=pytest.mark.gloo))
EXECUTIONS = ("stages", *PIPELINES)
TRANSPORTS = ("shared", "distributed")

TOLERANCE = 1e-12
"""for models in float64, relative to the largest entry of the tensor"""

# A tensor that is smaller than this part of the largest of its kind is rounding around zero, as the gradient of a
# key's bias always is. Its difference is measured against that part, and not against itself.
_FLOOR = 1e-3
_SEED = 5


class StepResult(NamedTuple):
    """The loss of a step and the tensors of the model's output, in order."""

    loss: Tensor
    outputs: list[Tensor]


class WholeModel:
    """A model trained by plain PyTorch, on the whole batch or accumulating over microbatches weighted by samples."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None = None,
        microbatches: int | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        """Without `loss_fn`, the first output is the loss; `forward` is called in place of the model."""
        self.model, self._loss_fn, self._microbatches = model, loss_fn, microbatches
        self._forward = forward or model

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Forward and backward; losses that the model adds with `penstock.add_loss` count."""
        if self._microbatches is None:
            return self._step_on(args, kwargs, target)
        sizes = microbatch_sizes(len(target), self._microbatches)
        total = torch.zeros((), dtype=torch.float64)
        for *part, wanted in zip(*(tensor.split(sizes) for tensor in (*args, target)), strict=True):
            weight = len(wanted) / len(target)
            total += self._step_on(tuple(part), kwargs, wanted, weight).loss * weight
        return StepResult(total, [])

    def _step_on(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, weight: float = 1.0) -> StepResult:
        with penstock.added_losses() as added:
            output = self._forward(*args, **kwargs)
            outputs = tensors_of(output)
            loss = outputs[0] if self._loss_fn is None else self._loss_fn(output, target)
        total = loss + torch.stack(added).sum() if added else loss
        total.backward(total.new_tensor(weight))
        return StepResult(total.detach(), outputs)


class StagedModel:
    """A model trained as stages that run one after another, each on the whole batch."""

    def __init__(
        self, captured: Captured, partition: Partition, loss_fn: LossFn | None = None, is_split: bool = False
    ) -> None:
        """`is_split`: the backward of every stage runs as input gradients, then weight gradients."""
        self.model, self._loss_fn, self._captured = captured.model, loss_fn, captured
        self._partition, self._is_split = partition, is_split

    @cached_property
    def sequence(self) -> stages.StageSequence:
        """The stages; of a model that was planned and not yet recorded, they exist after the first step."""
        return stages.StageSequence(self._captured, self._partition, self._is_split)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Forward and backward of all stages."""
        self._captured.recording(args, kwargs)
        output = self.sequence(*args, **kwargs)
        outputs = tensors_of(output)
        if self._loss_fn is None:
            self.sequence.backward({0: None})
            return StepResult(outputs[0].detach(), outputs)
        # The loss is computed on leaves in place of the outputs; their gradients are where the stages start.
        roots = {id(tensor): tensor.detach().requires_grad_() for tensor in outputs if tensor.requires_grad}
        loss = self._loss_fn(map_leaves(output, lambda leaf: roots.get(id(leaf), leaf)), target)
        # Not `loss.backward()`: that would give the gradients the memory layout of the leaves.
        grads = torch.autograd.grad(loss, list(roots.values()), allow_unused=True)
        positions = {id(tensor): position for position, tensor in reversed(list(enumerate(outputs)))}
        self.sequence.backward(
            {positions[key]: grad for key, grad in zip(roots, grads, strict=True) if grad is not None}
        )
        return StepResult(loss.detach(), outputs)


def split(execution: str, model: nn.Module, plan: Plan, loss_fn: LossFn | None = None) -> Any:
    """A model split by a plan, to be trained as stages, in a local pipeline or on this rank of a pipeline."""
    if execution == "stages":
        actions = [part for order in plan.schedule.orders for action in order for part in action.parts]
        is_split = any(isinstance(action, WeightGrad) for action in actions)
        return StagedModel(Captured.planned(model, plan.graph), plan.partition, loss_fn, is_split)
    options = penstock.RunOptions(transport=execution if execution in TRANSPORTS else "auto")
    return penstock.Pipeline(model, plan, loss_fn=loss_fn, local=execution == "local", options=options)


class Execution:
    """Runs the jobs of a test in this process, or on every process of a pool; the `execution` fixture."""

    def __init__(self, name: str, pools: Pools) -> None:
        self.name, self._pools = name, pools

    def run(self, job: Callable[..., list[Values]], ranks: int, *args: Any) -> list[Values]:
        """The results of `job(*args, name)`, a function at the top of a module, merged over the ranks."""
        if self.name in ("stages", "local"):
            return job(*args, self.name)
        return [merged(parts) for parts in zip(*self._pools[ranks].run(job, *args, self.name), strict=True)]


def train(trained: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Values:
    """The values after one optimizer step per batch of inputs and target; the gradients are those of the last one."""
    optimizer = torch.optim.SGD(held_by(trained).parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        losses.append(trained.step(x, target=target).loss)
        optimizer.step()
    return values(trained, losses)


def accumulate(trained: Any, *args: Any, target: Any = None, steps: int = 1, **kwargs: Any) -> Values:
    """The values after some steps on one batch, without an optimizer."""
    return values(trained, [trained.step(*args, target=target, **kwargs).loss for _ in range(steps)])


def values(trained: Any, losses: Sequence[Tensor] = ()) -> Values:
    """Losses, and all gradients, parameters and buffers of a model, or of this rank's part of it."""
    state = held_by(trained).state_dict()
    return gradients(trained, losses) | {f"state {name}": value.detach().clone() for name, value in state.items()}


def gradients(trained: Any, losses: Sequence[Tensor] = ()) -> Values:
    """Losses and gradients without the state, for buffers that count otherwise than in the whole model."""
    found: Values = {f"loss {step}": loss for step, loss in enumerate(losses)}
    return found | {f"gradient {name}": p.grad for name, p in held_by(trained).named_parameters()}


def copied(found: Values) -> Values:
    """The values in memory of their own, which later steps do not change."""
    return {name: None if value is None else value.clone() for name, value in found.items()}


def held_by(trained: Any) -> Any:
    """What holds parameters and state: a pipeline itself, or the model of the others."""
    return trained.model if isinstance(trained, WholeModel | StagedModel) else trained


def merged(parts: Sequence[Values]) -> Values:
    """The values of all ranks; a name that several ranks have must have the same bits on each."""
    found: Values = {}
    for part in parts:
        twice = found.keys() & part.keys()
        assert_identical({name: part[name] for name in twice}, {name: found[name] for name in twice})
        found |= part
    return found


def tensors_of(output: object) -> list[Tensor]:
    """The tensors of an output, left to right."""
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Batch:
    """The arguments of one call; if `is_scored`, the first output is the loss, else all outputs are projected."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_scored: bool

    @property
    def loss_fn(self) -> LossFn | None:
        """The loss function to train with."""
        return None if self.is_scored else projection

    def other(self) -> "Batch":
        """Other data of the same shapes: the rows in another order, floats with the other sign."""
        return Batch(map_leaves(self.args, _reversed), map_leaves(dict(self.kwargs), _reversed), self.is_scored)

    def copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in memory of their own, as a model may write into them."""
        return map_leaves(self.args, _cloned), map_leaves(dict(self.kwargs), _cloned)


def projection(output: object, target: object = None) -> Tensor:
    """A loss for any output: the sum of its tensors times fixed noise, so that their gradients are that noise."""
    generator = torch.Generator().manual_seed(_SEED)
    distinct = {id(tensor): tensor for tensor in tensors_of(output) if tensor.requires_grad}
    total = torch.zeros((), dtype=torch.float64)
    for tensor in distinct.values():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        product = (tensor * noise).sum()
        total = total + (product.real if product.is_complex() else product).double()
    return total


def one_step(trained: WholeModel | StagedModel, batch: Batch) -> Values:
    """The values of one step with a fixed seed; buffers and gradients are put back afterwards."""
    model = trained.model
    model.zero_grad(set_to_none=True)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = batch.copies()
    torch.manual_seed(_SEED)
    result = trained.step(*args, **kwargs)
    found = gradients(model, [result.loss])
    found |= {f"output {position}": tensor.detach().clone() for position, tensor in enumerate(result.outputs)}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(before[name])
    model.zero_grad(set_to_none=True)
    return found


def assert_stages_train_like_the_model(captured: Captured, partition: Partition) -> None:
    """`penstock.split` accepts the partition, and a step of the stages has the values of the model up to rounding."""
    penstock.split(captured, partition)
    batch = Batch(*captured.recorded_example, is_scored=False)
    # A copy, as a model may also write tensors that are no buffers.
    expected = one_step(WholeModel(copy.deepcopy(captured.model), batch.loss_fn), batch)
    assert_close(one_step(StagedModel(captured, partition, batch.loss_fn), batch), expected, tolerance=1e-6)


@dataclass(frozen=True)
class Difference:
    """The largest relative difference between two sets of values, and the name of the tensor that has it."""

    size: float
    name: str


def difference(found: Mapping[Any, Tensor | None], expected: Mapping[Any, Tensor | None]) -> Difference:
    """The largest difference; infinite if one side has a name, a gradient or a type that the other lacks."""
    if found.keys() != expected.keys():
        return Difference(float("inf"), f"only one side has {sorted(map(str, found.keys() ^ expected.keys()))[0]}")
    apart = _distances(found, expected)
    largest = max(apart, key=lambda name: apart[name], default=None)
    return Difference(0.0, "") if largest is None else Difference(apart[largest], str(largest))


def assert_close(
    found: Mapping[Any, Tensor | None], expected: Mapping[Any, Tensor | None], tolerance: float = TOLERANCE
) -> None:
    """The same names, None where None is expected, and every tensor equal up to the tolerance."""
    assert found.keys() == expected.keys()
    assert {name: size for name, size in _distances(found, expected).items() if not size <= tolerance} == {}


def assert_identical(found: Mapping[Any, Tensor | None], expected: Mapping[Any, Tensor | None]) -> None:
    """The same names, types and bits."""
    assert_close(found, expected, tolerance=0.0)


def assert_parts_close(parts: Sequence[Values], model: nn.Module, tolerance: float = TOLERANCE) -> None:
    """The ranks together hold all that the model holds; each has a tied parameter under one of its names."""
    expected = values(model) | {
        f"gradient {name}": parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    assert {name for part in parts for name in part} >= values(model).keys()
    for part in parts:
        assert_close(part, {name: expected[name] for name in part}, tolerance)


def _distances(found: Mapping[Any, Tensor | None], expected: Mapping[Any, Tensor | None]) -> dict[Any, float]:
    """Of every tensor the largest difference, relative to its largest entry or to a part of the largest of its kind."""
    sizes = {name: _largest(tensor) for name, tensor in expected.items()}
    largest: dict[str, float] = {}
    for name, size in sizes.items():
        largest[_kind(name)] = max(size, largest.get(_kind(name), 0.0))
    return {
        name: _distance(found[name], tensor, max(sizes[name], _FLOOR * largest[_kind(name)]))
        for name, tensor in expected.items()
    }


def _distance(found: Tensor | None, expected: Tensor | None, scale: float) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    apart = _largest(_wide(found) - _wide(expected))
    # A comparison with NaN is always false: it must not pass for equality.
    return apart / scale if scale > 0 and apart == apart else float("inf")


def _largest(tensor: Tensor | None) -> float:
    return float(_wide(tensor).abs().max()) if tensor is not None and tensor.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _kind(name: object) -> str:
    """The first word of a name: gradients are compared with gradients, state with state."""
    return str(name).partition(" ")[0]


def _reversed(leaf: object) -> object:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    return -leaf.flip(0) if leaf.is_floating_point() else leaf.flip(0)


def _cloned(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
