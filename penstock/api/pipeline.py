"""Pipeline: a model and a plan, trained step by step with the numbers of the unsplit model."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.ir.plan import Plan
from penstock.planner import with_microbatches
from penstock.runtime.collect import collect
from penstock.runtime.crew import Crew
from penstock.runtime.norms import clip, global_norm
from penstock.runtime.scaler import GradScaler
from penstock.training.description import describe
from penstock.training.ending import Ending
from penstock.training.engine import Engine
from penstock.training.holdings import Holdings
from penstock.training.intake import Intake, check_loss
from penstock.training.options import RunOptions
from penstock.training.result import Result
from penstock.training.shares import Shares

LossFn = Callable[[Any, Any], Tensor]


class Pipeline:
    """This rank's stages of a model; `step` trains on a whole batch, with the gradients of the unsplit model.

    Under torch.distributed every process is a rank, or a place in `mesh` with an axis "pp" and maybe "dp". With
    `local=True` all ranks run inside this process, and gradients land in the model's own parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss_fn: LossFn | None = None,
        mesh: Any = None,
        local: bool = False,
        parallelize_fn: Callable[..., Any] | None = None,
        reduction: str | None = None,
        inputs: str = "all",
        split: Mapping[str, int | None] | None = None,
        scaler: GradScaler | None = None,
        options: RunOptions = RunOptions(),  # noqa: B008
    ) -> None:
        self.plan = plan
        self.num_steps = 0
        """how many steps were taken; part of what seeds random numbers"""
        check_loss(model, loss_fn)
        crew = _crew(plan, mesh, local, options.deadline_seconds)
        self._holdings = Holdings(model, plan, crew, _parallelize(parallelize_fn, mesh))
        self._shares = Shares(self._holdings.captured, loss_fn, reduction, self._holdings.replicas)
        if scaler is not None:
            scaler.bind(crew)
        ending = Ending(self._holdings.captured, loss_fn, self._shares, scaler)

        def engine(plan: Plan) -> Engine:
            intake = Intake(self._holdings, plan, inputs, split or {}, options.seed)
            return Engine(plan, self._holdings, ending, intake, options)

        self._engine_of = engine
        self._engine = engine(plan)

    def step(
        self, *args: Any, target: Any = None, return_outputs: bool = False, record: bool = False, **kwargs: Any
    ) -> Result:
        """Forward and backward of one whole batch, the same call on every rank; gradients add to those there."""
        result = self._engine.train((args, kwargs, target), self.num_steps, return_outputs, record)
        self.num_steps += 1
        return result

    def eval(self, *args: Any, target: Any = None, return_outputs: bool = False, **kwargs: Any) -> Result:
        """Forward of one whole batch in eval mode, without gradients; nothing is changed by it."""
        return self._engine.evaluate((args, kwargs, target), self.num_steps, return_outputs)

    @property
    def microbatches(self) -> int:
        """Into how many microbatches a batch is cut; may be changed between steps, on every rank alike."""
        return self.plan.num_microbatches

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        self.plan = with_microbatches(self.plan, count)
        self._engine = self._engine_of(self.plan)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before."""
        # A parameter that several ranks have is counted by one of them and scaled by all.
        norm = global_norm(self._holdings.crew, self._holdings.gradients(counted=True), norm_type)
        clip(self._holdings.gradients(), norm, max_norm)
        return norm

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, tied ones once."""
        return iter(self._holdings.parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their original names, tied ones once."""
        return iter(self._holdings.parameters.items())

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers by their original names."""
        return self._holdings.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this rank's numbers from a state dict of the whole model or of this rank."""
        self._holdings.load_state_dict(state)

    def full_state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """The whole model's parameters and buffers in host memory, on rank 0 or everywhere; elsewhere empty."""
        return collect(self._holdings.crew, self._holdings.state_dict(), everywhere)

    def describe(self) -> str:
        """Stages, parameters, what crosses, schedule, prediction, and everything worth knowing about this run."""
        return describe(self.plan, self._holdings, self._shares.rule)


def _parallelize(given: Callable[..., Any] | None, mesh: Any) -> Callable[[nn.Module], Any] | None:
    """The user's function as a function of one stage; it is given the mesh if it takes two arguments."""
    if given is None:
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in inspect.signature(given).parameters.values() if p.kind in kinds and p.default is p.empty]
    return given if len(required) < 2 else lambda stage: given(stage, mesh)


def _crew(plan: Plan, mesh: Any, local: bool, deadline_seconds: float) -> Crew:
    if local:
        if mesh is not None:
            raise RunError("a local pipeline has no mesh", hint="leave out mesh or local")
        return Crew.inside(plan.num_ranks)
    if not dist.is_available() or not dist.is_initialized():
        raise RunError(
            "torch.distributed is not initialised",
            hint="penstock.launch(fn, ranks), torchrun, or Pipeline(..., local=True)",
        )
    if mesh is not None:
        return Crew.of_mesh(mesh, plan.num_ranks, deadline_seconds)
    return Crew.of_world(plan.num_ranks, deadline_seconds)
