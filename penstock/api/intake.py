"""Intake: makes the load of a step from the batch that a rank was given, or that rank 0 shares with it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.api.holdings import Holdings
from penstock.api.load import Inputs, Load
from penstock.errors import RunError
from penstock.ir.containers import leaves, named_inputs
from penstock.ir.plan import Plan
from penstock.runtime.batch import cut
from penstock.runtime.delivery import Delivery
from penstock.runtime.seeds import mix
from penstock.split.ownership import Ownership

INPUTS = ("all", "first")
_TARGET = "target"
Batch = tuple[Any, Any, Any]


def check_loss(model: nn.Module, loss_fn: object) -> None:
    """Refuse a loss function beside a forward that wants the target itself: who gets it cannot be known."""
    if loss_fn is not None and _TARGET in inspect.signature(model.forward).parameters:
        raise RunError(
            "both a loss_fn and the model's forward take the target",
            model=type(model).__name__,
            hint="leave out loss_fn if the model returns its loss, or rename the parameter of its forward",
        )


class Intake:
    """Cuts batches into microbatches with their recordings."""

    def __init__(self, holdings: Holdings, plan: Plan, inputs: str, split: Mapping[str, int | None], seed: int) -> None:
        if inputs not in INPUTS:
            raise RunError("unknown inputs", given=repr(inputs), choices=INPUTS)
        self._holdings, self._plan, self._split, self._seed = holdings, plan, dict(split), seed
        self._delivery = None
        if inputs == "first" and not holdings.crew.is_alone:
            self._delivery = Delivery(holdings.crew, holdings.device, self._wanted)
        self._known: dict[str, tuple[Any, ...]] = {}

    @property
    def everyone_has_it(self) -> bool:
        """Whether every rank passes the whole batch, so that they can be compared."""
        return self._delivery is None

    def load(self, batch: Batch, is_training: bool, step: int, keeps_outputs: bool) -> Load:
        """The load of one step."""
        header = ""
        if self._delivery is not None:
            header, batch = self._delivery.deliver(batch)
            batch = (tuple(batch[0]), dict(batch[1]), batch[2])
        args, kwargs, target = batch
        if target is not None and _TARGET in inspect.signature(self._holdings.captured.model.forward).parameters:
            kwargs, target = {**kwargs, _TARGET: target}, None
        captured, replicas, crew = self._holdings.captured, self._holdings.replicas, self._holdings.crew
        pieces = cut(captured.model.forward, args, kwargs, target, self._plan.num_microbatches, self._split)
        recordings, named = zip(*captured.met((piece.args, piece.kwargs) for piece in pieces), strict=True)
        if header:
            self._known[header] = (recordings, self._places(batch))
        size = float(sum(piece.size for piece in pieces))
        mean = float(replicas.sum(torch.tensor(size))) / replicas.count
        inputs = Inputs(pieces, recordings, named, mix(self._seed, step, crew.replica), mean)
        return Load(inputs, is_training, keeps_outputs)

    def _wanted(self, header: str, rank: int) -> set[int] | None:
        """The places of the tensors that a rank needs of a batch of a known form; None: the form is new."""
        if header not in self._known:
            return None
        recordings, names = self._known[header]
        read = {name for recording in recordings for name in self._read(recording, rank)}
        is_last = self._plan.schedule.placement[self._plan.num_stages - 1] == rank
        return {place for place, name in enumerate(names) if name in read or (is_last and not name)}

    def _read(self, recording: Any, rank: int) -> set[str]:
        """The inputs that the stages of a rank read, and those by which all ranks decide alike."""
        graph, placement = recording.graph, self._plan.schedule.placement
        runs = Ownership(self._plan.graph, self._plan.partition).fit(graph).runs(graph)
        nodes = [node for stage in placement.stages[rank] for node in runs[stage]]
        is_last = placement[self._plan.num_stages - 1] == rank
        if is_last or recording.has_guards:
            nodes += [node for node in graph.nodes if node.from_inputs]
        returned = graph.outputs if is_last else ()
        return {name for node in nodes for name in node.reads} | set(returned)

    def _places(self, batch: Batch) -> tuple[str, ...]:
        """The name of every tensor of a batch in order; those of the target have none."""
        named = named_inputs(self._holdings.captured.model.forward, batch[0], batch[1])
        names = {id(leaf): name for name, leaf in named.items()}
        return tuple(names.get(id(leaf), "") for leaf in leaves(batch) if isinstance(leaf, Tensor))
