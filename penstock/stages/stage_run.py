"""One forward of a stage with its backward, and the boundary of the stage in the autograd graph."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.capture import DrawSeed, Recording, has_gradient
from penstock.stages.deferral import ANCHOR, Deferral, Deferred
from penstock.stages.deferred_functions import DEFERRABLE
from penstock.stages.stage import Stage

Gradients = Mapping[str, Tensor | None]
_NO_CONTEXT = nullcontext()

# Before torch.autograd.backward calls the engine, it compares every gradient with its root in Python, which takes as
# long as the backward of a small stage. Here both have the same shape and dtype, those that the stages agreed on, so
# the engine is called directly. Its function is not public: without it, the checks are repeated.
_run_backward: Callable[[tuple[GradientEdge, ...], tuple[Tensor, ...]], object] = torch.autograd.backward
if hasattr(torch.autograd.graph, "_engine_run_backward"):
    _run_backward = partial(
        torch.autograd.graph._engine_run_backward,
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class ForwardRun:
    """One forward of a stage, kept until its backward: `backward`, or `input_grad` and then `weight_grad`.

    The constructor runs the forward. `outputs` are the values that leave the stage, until `take_outputs`; after that
    the run keeps only their positions in the autograd graph, so that they can be freed. The gradients passed to
    `input_grad` must not be changed until `weight_grad`.
    """

    def __init__(
        self,
        forward: Callable[[dict[str, Any]], dict[str, Any]],
        incoming: Mapping[str, Any],
        accumulate_deferred: Callable[[list[Deferred]], None],
        *,
        written: Collection[str] = (),
        received: Collection[str] = (),
        splits_backward: bool = False,
        can_defer: bool = True,
    ) -> None:
        """Run `forward` on the `incoming` values of other stages, by name; it returns the outgoing values by name.

        `written`: incoming values that it writes in place. `received`: those that came in messages.
        `splits_backward`: backward will be run as `input_grad` and `weight_grad`; weight gradients are then passed to
        `accumulate_deferred`. If not `can_defer`, `input_grad` computes the weight gradients too.
        """
        self._accumulate = accumulate_deferred
        self._returned: dict[str, Tensor | None] = {}
        values, self._leaves = grad_boundary(incoming, written, received, self._returned)
        # A stage that returns no gradient, such as the first, has no input gradient: all of backward is weight_grad.
        returns_gradients = bool(self._leaves or self._returned)
        self._is_all_weight_grad = splits_backward and not returns_gradients
        self._deferral = Deferral(DEFERRABLE) if splits_backward and returns_gradients and can_defer else None
        if self._deferral is None:
            self.outputs: dict[str, Any] = forward(values)
        else:
            self._deferral.is_forward = True
            with self._deferral:
                self.outputs = forward(values)
            self._deferral.is_forward = False
        self.own_backward: Callable[[Gradients], object] | None = None
        """called with the gradients of the outputs in place of autograd's backward, which it starts itself"""
        self._edges: dict[str, GradientEdge] = {}
        self._pending_gradients: Gradients = {}
        for name, value in self.outputs.items():
            self.add_root(name, value)

    def take_outputs(self) -> dict[str, Any]:
        """Return the values that leave the stage; the run keeps none of them."""
        outputs, self.outputs = self.outputs, {}
        return outputs

    def add_root(self, name: str, value: Any) -> None:
        """Let backward start from another value too, such as a loss: pass its gradient under this name."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return
        node = value.grad_fn
        if node is not None and not isinstance(node, FunctionCtx):
            # What `get_gradient_edge` returns, except for leaves and for nodes of Python functions.
            self._edges[name] = GradientEdge(node, value.output_nr)
        elif has_gradient(value):
            self._edges[name] = get_gradient_edge(value)

    def backward(self, gradients: Gradients) -> dict[str, Tensor | None]:
        """Accumulate the stage's gradients; returns those of the incoming values.

        Gradients that are None, or belong to values that require none, are ignored.
        """
        self._run_autograd(gradients)
        if self._deferral is not None:
            self._accumulate(self._deferral.queue)
        return self._take_returned()

    def input_grad(self, gradients: Gradients) -> dict[str, Tensor | None]:
        """Return the gradients of the incoming values; those of the weights are deferred to `weight_grad`."""
        if self._is_all_weight_grad:
            self._pending_gradients = dict(gradients)
        else:
            self._run_autograd(gradients)
        return self._take_returned()

    def weight_grad(self) -> None:
        """Accumulate the gradients of the parameters that `input_grad` deferred."""
        if self._is_all_weight_grad:
            self._run_autograd(self._pending_gradients)
            self._pending_gradients = {}
        if self._deferral is not None:
            self._accumulate(self._deferral.queue)

    def _run_autograd(self, gradients: Gradients) -> None:
        roots: list[GradientEdge] = []
        root_gradients: list[Tensor] = []
        for name, gradient in gradients.items():
            if gradient is not None and name in self._edges:
                roots.append(self._edges[name])
                root_gradients.append(gradient)
        # An edge keeps its node alive: without this, parts of the graph would outlive the backward that frees them.
        self._edges = {}
        if not roots and self.own_backward is None:
            return
        # A recomputation during backward must save the same tensors as the first forward did, and gradients that hooks
        # take must not be added to those of the weights.
        with self._deferral or _NO_CONTEXT:
            if self.own_backward is None:
                _run_backward(tuple(roots), tuple(root_gradients))
            else:
                self.own_backward(gradients)

    def _take_returned(self) -> dict[str, Tensor | None]:
        returned, self._returned = self._returned, {}
        for name, leaf in self._leaves.items():
            returned[name] = leaf.grad
        self._leaves = {}
        return returned


class StageRun(ForwardRun):
    """One forward of a recorded stage on one microbatch."""

    def __init__(
        self,
        stage: Stage,
        recording: Recording,
        inputs: Mapping[str, Any],
        incoming: Mapping[str, Any],
        splits_backward: bool = False,
        seed: DrawSeed | None = None,
        received: Collection[str] = (),
    ) -> None:
        """Run the forward on the model's `inputs` and the `incoming` values of other stages, both by name.

        `splits_backward`: backward will be run as `input_grad` and `weight_grad`. `seed`: see `Stage.forward`.
        `received`: the incoming values that came in messages.
        """
        super().__init__(
            partial(stage, recording, inputs, seed=seed),
            incoming,
            stage.accumulate_deferred,
            written=recording.graph.written,
            received=received,
            splits_backward=splits_backward,
            # A block that takes gradients inside its forward needs the real weight gradients there.
            can_defer=not splits_backward or not stage.takes_gradients(recording),
        )


class _GradBoundary(Function):
    """Starts a graph with tensors of other stages; backward stores their gradients in a dictionary."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: dict[str, Tensor], returned: dict[str, Tensor | None]) -> Any:
        # anchor requires a gradient: without such an argument autograd makes no node.
        # In a dictionary the tensors are not seen as arguments: autograd would return arguments as views of
        # themselves, and a view of a tensor from outside cannot be written in place.
        ctx.set_materialize_grads(False)
        ctx.names, ctx.returned = tuple(values), returned
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        # Not accumulated into `.grad`: each gradient leaves as autograd computed it.
        ctx.returned.update(zip(ctx.names, gradients, strict=True))
        return None, None, None


def grad_boundary(
    incoming: Mapping[str, Any],
    written: Collection[str],
    received: Collection[str],
    returned: dict[str, Tensor | None],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Detach values of other stages from their graph and start a new one with them.

    Returns the values under the same names, and those of them that are leaves, in whose `.grad` backward accumulates.
    `returned` gets an entry for every other value that requires a gradient; backward fills in the gradient. Values in
    `written` are copied, as the stage writes into them in place.

    torch forbids in-place writes to leaves that require grad and to some views, so all other values come out of
    `_GradBoundary`. Values that were `received` in messages and that the stage does not write become leaves, which
    costs nothing. The gradient of a leaf gets the layout of the leaf, in which it would be sent anyway; the gradient
    for another stage of this rank must leave as autograd computed it, as in the unsplit model.
    """
    if not incoming:
        return {}, {}
    changed: dict[str, Any] = {}
    differentiable, leaves, grad_enabled = {}, {}, torch.is_grad_enabled()
    for name, value in incoming.items():
        if isinstance(value, Tensor):
            if grad_enabled and value.requires_grad and name in received and name not in written:
                leaves[name] = value
                continue
            # `.data` has a version counter of its own. That of detach() is shared: a write on one side of the boundary
            # would invalidate what the graph on the other side has saved.
            changed[name] = detached = value.detach().clone() if name in written else value.data
            if value.requires_grad:
                differentiable[name] = detached
    if differentiable:
        returned.update(dict.fromkeys(differentiable))
        started = _GradBoundary.apply(ANCHOR, differentiable, returned)
        changed.update(zip(differentiable, started, strict=True))
    return {**incoming, **changed}, leaves
