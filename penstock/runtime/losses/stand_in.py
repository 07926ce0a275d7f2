"""Stand-in: a model with noise in the place of its blocks, so that what it does with their results can be tried."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import Captured, Microbatch, Recording, intercept_modules, uncompiled, without_user_hooks
from penstock.ir import Call, Graph, Parts, Ref, TensorSpec, put_together, transform
from penstock.runtime.losses.case import Case
from penstock.runtime.losses.evidence import Outcome
from penstock.runtime.losses.loss_value import loss_of
from penstock.runtime.losses.rows import joined, rows
from penstock.runtime.losses.trial import NOT_CUT, Trial, from_the_same_start, outcome, tried

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def try_model(captured: Captured, recording: Recording, case: Case) -> Trial:
    """The loss of a model that returns it, for a microbatch and for two parts of it, without running any block.

    The Python between the blocks runs three times; blocks with parameters answer with noise. A single sample is
    joined by its partner.
    """
    piece, size = case.piece, case.piece.size
    batch: Batch = (piece.args, piece.kwargs)
    try:
        if size == 1:
            size, batch = 2, joined(batch, (case.partner.args, case.partner.kwargs))
        stand_in = StandIn(captured, recording, piece.size, size)
    except (ValueError, RuntimeError):
        return Trial(None, failure=NOT_CUT)

    def answer(start: int, length: int) -> Outcome:
        return stand_in.outcome(transform(rows(batch, size, start, length), _copied), start, length)

    def part(span: tuple[int, int]) -> Microbatch:
        args, kwargs = rows(batch, size, *span)
        return Microbatch(args, kwargs, None, span[1])

    with captured.isolated(), uncompiled(), without_user_hooks([captured.model]), torch.enable_grad():
        return replace(tried(answer, size, stand_in.dims, 0, part), recording=recording)


class StandIn:
    """A model in which noise of the form that was recorded answers the calls of its blocks."""

    def __init__(self, captured: Captured, recording: Recording, recorded: int, size: int) -> None:
        """`recorded` samples were recorded, and the noise is for `size`."""
        self._captured, self._recording, self._size = captured, recording, size
        self._names = {id(module): name for name, module in recording.granularity.leaves(captured.model).items()}
        self._calls: dict[str, list[Call]] = {}
        for call in recording.record.steps:
            if isinstance(call, Call) and call.is_module and _is_block(captured.model, call, recording.graph):
                self._calls.setdefault(call.target, []).append(call)
        device = next((tensor.device for tensor in captured.model.parameters()), torch.device("cpu"))
        made = [value for calls in self._calls.values() for call in calls for value in _made(call, recording.graph)]
        specs = {name: recording.graph.spec(name) for name in made}
        self._noise = {
            name: _noise(spec, recorded, size, device, seed) for seed, (name, spec) in enumerate(specs.items())
        }

    @property
    def dims(self) -> tuple[int | None, ...]:
        """The dimension of each noise that holds the samples: the first, or none."""
        return tuple(0 if noise.shape[:1] == (self._size,) else None for noise in self._noise.values())

    def outcome(self, batch: Batch, start: int, length: int) -> Outcome:
        """The loss that the model makes of the noise for some samples, and its gradients."""
        parts = zip(self._noise.items(), self.dims, strict=True)
        given = {name: noise if dim is None else noise.narrow(dim, start, length) for (name, noise), dim in parts}
        leaves = {name: noise.detach().requires_grad_() for name, noise in given.items()}
        num_calls: Counter[str] = Counter()

        def called(module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
            name = self._names.get(id(module), "")
            if name in self._calls:
                num_calls[name] += 1
                return self._answer(self._calls[name][num_calls[name] - 1], leaves)
            # Dropout and the like: what is drawn would differ between the whole and its parts.
            is_random = args and name in self._random
            return args[0] if is_random else original(module, *args, **kwargs)

        with intercept_modules(self._captured.model, called), from_the_same_start(self._written):
            loss = loss_of(self._captured.whole(*batch[0], **batch[1]))
            return outcome(loss, list(leaves.values()))

    @cached_property
    def _random(self) -> frozenset[str]:
        return frozenset(node.module for node in self._recording.graph.nodes if node.is_random and node.is_leaf)

    @cached_property
    def _written(self) -> list[Tensor]:
        """The parameters and buffers that are written between blocks."""
        graph, state = self._recording.graph, self._captured.model.state_dict(keep_vars=True)
        names = [name for update in graph.updates if not graph[update.node].is_leaf for name in update.names]
        return [state[name] for name in names if name in state]

    def _answer(self, call: Call, leaves: Mapping[str, Tensor]) -> Any:
        """What a call returned, with noise for what it made; a copy, as the model may write into it."""

        def built(thing: Any) -> Any:
            if isinstance(thing, Ref):
                return leaves[thing.value].clone()
            if isinstance(thing, Parts):
                return put_together(thing.kind, thing.keys, [built(item) for item in thing.items])
            return thing

        return built(self._recording.returned.get(call.name, Ref(call.results.values[0])))


def _is_block(model: nn.Module, call: Call, graph: Graph) -> bool:
    """Whether noise takes its place: what has no parameters, or returns a number as a loss does, runs as it is."""
    has_parameters = any(True for _ in model.get_submodule(call.target).parameters())
    return has_parameters and any(graph.spec(name).shape for name in call.results.values if name)


def _made(call: Call, graph: Graph) -> list[str]:
    """The values that a block returns; raises a ValueError if it also hands on something that it was given."""
    fresh = {value.name for value in graph[call.name].makes}
    if not fresh.issuperset(call.results.values):
        raise ValueError("a block returns something that it was given")
    return list(dict.fromkeys(call.results.values))


def _noise(spec: TensorSpec, recorded: int, size: int, device: torch.device, seed: int) -> Tensor:
    """Normally distributed numbers of a recorded form, with the first dimension for as many samples."""
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        raise ValueError("a block returns whole numbers")
    shape = (size, *spec.shape[1:]) if spec.shape[:1] == (recorded,) else spec.shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def _copied(leaf: object) -> object:
    """The model may write into its inputs."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
