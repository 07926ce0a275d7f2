"""A stage on its own rank: a module, its index in the pipeline, and its process group."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import RunError
from penstock.ir import as_int
from penstock.runtime import is_fsdp_module


class PipelineStage:
    """One stage of a pipeline, on its own rank; shapes of messages are inferred.

    The first stage is called with the positional arguments of `step`, every other stage with the values that the
    previous one returned: a tensor, or a list or tuple of tensors. Keyword arguments of `step` go to the stages of the
    rank that passes them.

    Args:
        submodule: the module of the stage
        stage_index: its place in the pipeline, from 0
        num_stages: number of stages of the pipeline, on all ranks
        device: of the module and of the messages
        input_args: inputs of one microbatch, whose shapes and dtypes every microbatch must then have
        output_args: outputs of one microbatch, whose shapes and dtypes every microbatch must then have
        output_grads: accepted because torch has it, and not used
        input_grads: accepted because torch has it, and not used
        group: the ranks of the pipeline; None: all ranks
        dw_builder: called after each backward; returns a function that computes the weight gradients, for modules whose
            own backward does not
        get_mesh: accepted because torch has it, and not used

    Raises:
        RunError: if torch.distributed is not initialised, or an argument does not fit
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
        output_grads: Tensor | tuple[Tensor | None, ...] | None = None,
        input_grads: Tensor | tuple[Tensor | None, ...] | None = None,
        group: Any = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Any = None,
    ) -> None:
        if not dist.is_initialized():
            hint = "dist.init_process_group('gloo'), torchrun, or penstock.launch"
            raise RunError("torch.distributed must be initialised before a stage is made", hint=hint)
        if not isinstance(submodule, nn.Module):
            raise RunError("submodule must be a module", got=type(submodule).__name__)
        index, count = as_int(stage_index), as_int(num_stages)
        if index is None or count is None or not 0 <= index < count:
            raise RunError(
                "stage_index must be at least 0 and below num_stages",
                stage_index=repr(stage_index),
                num_stages=repr(num_stages),
            )
        if dw_builder is not None and not callable(dw_builder):
            raise RunError("dw_builder must be a function", got=type(dw_builder).__name__)
        self.submod, self.stage_index, self.num_stages = submodule, index, count
        self.device = torch.device(device)
        self.group = group if group is not None else dist.group.WORLD
        self.group_rank, self.group_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.group_size > count:
            raise RunError(
                "there must be at least one stage per rank", stages=count, ranks=self.group_size, hint="fewer ranks"
            )
        self.dw_builder = dw_builder
        self.input_args, self.output_args = _examples(input_args), _examples(output_args)
        # A stage of `pipeline` checks its arguments, also if it is inside a wrapper.
        traced = (each.check_microbatch for each in submodule.modules() if hasattr(each, "check_microbatch"))
        self._check_traced: Callable[..., None] | None = next(traced, None)
        self.tied: Sequence[tuple[str, nn.Parameter, tuple[int, ...]]] = ()
        """parameters of a recorded model that several stages use: name, parameter and stages"""

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage_index == self.num_stages - 1

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a RunError if the module does not take these arguments, as far as its signature shows.

        All stages but the first are called with one received value or more before the keyword arguments.
        """
        module = self.submod.module if isinstance(self.submod, DistributedDataParallel) else self.submod
        # The hooks of a module may add arguments.
        if type(module).__call__ is not nn.Module.__call__ or (
            module._forward_pre_hooks and not is_fsdp_module(module)
        ):
            return
        try:
            signature = inspect.signature(module.forward)
        except (TypeError, ValueError):
            return
        try:
            _ = signature.bind(*args, **kwargs) if self.is_first else signature.bind_partial(None, **kwargs)
        except TypeError as error:
            raise RunError(
                f"the module of a stage cannot be called with the arguments of this rank: {error}",
                stage=self.stage_index,
                module=type(module).__name__,
                positional=len(args),
                keywords=list(kwargs),
                hint="schedule.step(x) on the rank of the first stage; keyword arguments go to all stages of a rank",
            ) from None

    def check_microbatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a RunError if the first stage cannot take the arguments of a microbatch."""
        self.check_values(args, self.input_args, "inputs")
        if self._check_traced is not None:
            self._check_traced(args, kwargs)

    def check_values(self, values: Sequence[Any], examples: Sequence[Tensor] | None, what: str) -> None:
        """Compare values with the examples that the stage was given."""
        if examples is None:
            return
        found, expected = ([(tuple(each.shape), each.dtype) for each in tensors] for tensors in (values, examples))
        if found != expected:
            raise RunError(
                f"the {what} of a stage must have the shapes and dtypes of its examples",
                stage=self.stage_index,
                found=found,
                examples=expected,
                hint=f"{what[:-1]}_args of one microbatch, or leave them out: shapes are then inferred",
            )


def build_stage(
    stage_module: nn.Module, stage_index: int, pipe_info: Any, device: torch.device | str, group: Any = None
) -> PipelineStage:
    """Make a stage from a module of `Pipe.get_stage_module`, which may be wrapped for data parallelism.

    Args:
        stage_module: the module, or a wrapper of it
        stage_index: index of the stage
        pipe_info: the result of `Pipe.info()`
        device: of the stage and its messages
        group: the ranks of the pipeline; None: all ranks

    Returns:
        The stage, for a schedule.

    Raises:
        RunError: if torch.distributed is not initialised
    """
    stage = PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)
    stage.tied = [entry for entry in pipe_info.tied if stage_index in entry[2]]
    return stage


def _examples(given: Any) -> tuple[Tensor, ...] | None:
    if given is None:
        return None
    examples = (given,) if isinstance(given, Tensor) else tuple(given)
    if not all(isinstance(each, Tensor) for each in examples):
        raise RunError("input_args and output_args must be tensors", got=[type(each).__name__ for each in examples])
    return examples
