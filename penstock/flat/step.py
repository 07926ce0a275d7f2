"""forward_backward: one batch through the pipeline, with the caller's own forward and backward functions."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from penstock.batches import microbatch_sizes, split_tensor
from penstock.capture import dtype_name, spec_of
from penstock.errors import PenstockWarning, RunError
from penstock.flat.topology import DATA, TENSOR, FlatPipeline, topology
from penstock.ir import Program, as_int
from penstock.passes import lower
from penstock.runtime import (
    ReplicaReducer,
    StageOutput,
    SyncRequest,
    SyncVote,
    UserStage,
    check_clipping,
    clip,
    global_norm,
    merge,
    sent_values,
)
from penstock.schedules import build

ForwardFn = Callable[[Any], Any]
BackwardFn = Callable[[Any, Any], object]
Inputs = Tensor | Sequence[Tensor] | None


def forward_backward(
    optimizer: optim.Optimizer | None,
    fwd_fn: ForwardFn,
    bwd_fn: BackwardFn | None,
    inputs: Inputs,
    num_microbatches: int = 1,
    forward_only: bool = False,
    *,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
    schedule: str = "1f1b",
) -> Any:
    """Run one batch through the pipeline: forward and, unless `forward_only`, backward. Collective over the pipeline.

    The optimizer's gradients are zeroed first; gradients are summed over microbatches, not averaged.

    Args:
        optimizer: its gradients are zeroed; None: none are
        fwd_fn: called with the output of the previous stage and this rank's part of `inputs`, a tensor if there is one,
            else a list; on the last rank it returns the loss
        bwd_fn: `bwd_fn(output, gradient)` replaces the backward; on the last rank the gradient is None
        inputs: tensors of the whole batch, on any rank, for example targets; they are split along their first dimension
        num_microbatches: number of microbatches
        forward_only: whether to leave out the backward
        dtype: the expected dtype of values between stages; a different one gives a warning and is not converted, so
            that the results equal the unsplit model
        scatter_gather_tensors: no effect without tensor ranks, and refused with them
        schedule: one with a single stage per rank: "gpipe", "1f1b", "zb_h1" or "zb_h2"

    Returns:
        The merged results of `fwd_fn` on the last rank: tensors concatenated along their first dimension, scalars such
        as losses summed; None on other ranks.
    """
    pipeline = topology.pipeline
    if scatter_gather_tensors and topology.is_mode_inited(TENSOR):
        raise RunError(
            "scatter_gather_tensors over several tensor ranks is not supported",
            tensor_ranks=topology.get_tp_size(),
            hint="scatter_gather_tensors=False",
        )
    is_training = not forward_only
    groups = pipeline.groups
    with pipeline.call(is_training) as number:
        options = f"num_microbatches={num_microbatches}" + (", forward_only=True" if forward_only else "")
        options += f", schedule={schedule!r}" if schedule != "1f1b" else ""
        request = SyncRequest("forward_backward", number, options)
        sizes, parts = _split_inputs(pipeline, request, inputs, num_microbatches)
        if optimizer is not None and is_training:
            optimizer.zero_grad()
        stage = _FunctionStage(fwd_fn, bwd_fn, dtype, parts, pipeline.is_last)
        program = _program(schedule, groups.num_ranks, len(sizes), is_training)
        with torch.set_grad_enabled(is_training):
            # The caller's functions may differ in every call, so every message describes its content.
            pipeline.engine.runner.stages = {groups.rank: stage}
            pipeline.engine.execute(program, (schedule, len(sizes), is_training), number, is_training)
        for module in list(pipeline.replicated or ()):
            module.reduce_gradients()
        if not pipeline.is_last:
            return None
        results = [stage.results[microbatch] for microbatch in range(len(sizes))]
        return merge(results, sizes, [1.0] * len(results)).output


def forward_eval(fwd_fn: ForwardFn, inputs: Inputs, dtype: torch.dtype | None = None) -> Any:
    """Forward of a whole batch without gradients; returns the result of the last stage, on the last rank.

    Args:
        fwd_fn: as in `forward_backward`
        inputs: as in `forward_backward`
        dtype: as in `forward_backward`
    """
    return forward_backward(None, fwd_fn, None, inputs, forward_only=True, dtype=dtype)


@lru_cache(maxsize=64)
def _program(schedule: str, ranks: int, microbatches: int, is_training: bool) -> Program:
    """The orders of all ranks with messages, for one stage per rank."""
    built = build(schedule, ranks, microbatches, stages_per_rank=1)
    return lower(built) if is_training else lower(built.forwards(), passes=("add_transfers", "hoist_receives"))


def _split_inputs(
    pipeline: FlatPipeline, request: SyncRequest, inputs: Inputs, num_microbatches: int
) -> tuple[tuple[int, ...], list[tuple[Tensor, ...]]]:
    """The number of samples of every microbatch, and its part of this rank's inputs.

    Collective: if one rank cannot split its inputs, all raise the same error.
    """
    with pipeline.engine.sync.errors_on_all_ranks(request):
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
        size = _batch_size(pipeline, given, num_microbatches)
    # A rank without inputs has no size: minus infinity never is the largest.
    maxes = (-math.inf, -math.inf) if size is None else (float(size), -float(size))
    largest, smallest = pipeline.engine.sync.exchange(request, SyncVote(maxes=maxes)).maxes[:2]
    if largest != -smallest:
        sizes = int(-smallest), int(largest)
        raise RunError("all ranks must have batches of the same size", sizes=sizes).on_all_ranks()
    sizes = microbatch_sizes(int(largest), num_microbatches)
    columns = [split_tensor(tensor, sizes) for tensor in given]
    return sizes, [tuple(column[index] for column in columns) for index in range(len(sizes))]


def _batch_size(pipeline: FlatPipeline, given: Sequence[Any], num_microbatches: int) -> int | None:
    """The samples in this rank's inputs; None without inputs."""
    count = as_int(num_microbatches)
    if count is None or count < 1:
        raise RunError("num_microbatches must be a whole number, 1 or more", got=repr(num_microbatches))
    if not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in given):
        types = [type(entry).__name__ for entry in given]
        raise RunError("inputs must be tensors with the batch as their first dimension", got=types)
    if pipeline.is_first and not given:
        raise RunError("the first rank of the pipeline must be given inputs", hint="inputs=[samples]")
    sizes = {tensor.shape[0] for tensor in given}
    if len(sizes) > 1:
        raise RunError("the inputs of a rank must have the same number of samples", got=sorted(sizes))
    if sizes and min(sizes) < count:
        hint = f"num_microbatches={min(sizes)} on every rank" if min(sizes) else "leave out empty batches"
        problem = "inputs must have at least one sample for each microbatch"
        raise RunError(problem, samples=min(sizes), microbatches=count, hint=hint)
    return sizes.pop() if sizes else None


class _FunctionStage(UserStage):
    """Runs the caller's functions; `results` are the returned values of the last stage by microbatch."""

    def __init__(
        self,
        forward: ForwardFn,
        backward: BackwardFn | None,
        dtype: torch.dtype | None,
        inputs: Sequence[Sequence[Tensor]],
        is_last: bool,
    ) -> None:
        self._forward, self._backward, self._dtype = forward, backward, dtype
        self._inputs, self._is_last = inputs, is_last
        self.results: dict[int, Any] = {}

    def forward(self, microbatch: int, received: list[Tensor]) -> StageOutput:
        """Run the caller's forward on received values and own inputs."""
        inputs = [*received, *self._inputs[microbatch]]
        output = self._forward(inputs[0] if len(inputs) == 1 else inputs)
        own = self._backward
        if not self._is_last:
            values = self._values_to_send(output)
            return StageOutput(values, backward=None if own is None else partial(_call_backward, own, output, values))
        self.results[microbatch] = _detached(output)
        if not torch.is_grad_enabled():
            return StageOutput(())
        if own is not None:
            return StageOutput((), backward=lambda _: own(output, None))
        return StageOutput((), loss=partial(_loss, output))

    def _values_to_send(self, output: Any) -> list[Tensor]:
        values = sent_values(output)
        expected = self._dtype
        unexpected = {value.dtype for value in values if value.is_floating_point()} - {expected}
        if expected is not None and unexpected:
            names = ", ".join(sorted(dtype_name(dtype) for dtype in unexpected))
            message = f"values are sent to the next stage as {names}, not as {expected}: dtype does not convert them"
            warnings.warn(message, PenstockWarning, stacklevel=2)
        return values


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return type(output)(map(_detached, output)) if type(output) in (list, tuple) else output


def _call_backward(
    own_backward: BackwardFn, output: Any, values: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> None:
    """Call the caller's backward; the gradient of a value that the loss does not depend on is zero."""
    pairs = zip(gradients, values, strict=True)
    matched = [
        torch.zeros_like(value) if gradient is None and value.requires_grad else gradient for gradient, value in pairs
    ]
    own_backward(output, matched[0] if isinstance(output, Tensor) else tuple(matched))


def _loss(output: Any) -> tuple[Tensor, float]:
    """The loss that the last stage returned, and the factor of its gradient."""
    if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
        return output, 1.0
    raise RunError(
        "the forward of the last stage must return a scalar loss with a gradient",
        got=spec_of(output) if isinstance(output, Tensor) else type(output).__name__,
        hint="a bwd_fn of your own, or forward_only=True",
    )


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of all stages so that their total norm is at most `max_norm`; returns the original norm.

    Collective: every rank of the pipeline passes its own parameters and gets the same norm.

    Args:
        parameters: those of this rank
        max_norm: the largest norm allowed
        norm_type: the p of the p-norm
        error_if_nonfinite: whether to raise an error if the norm is NaN or infinite
    """
    limit, power = check_clipping(max_norm, norm_type)
    if topology.is_mode_inited(TENSOR):
        raise RunError(
            "clip_grad_norm_ cannot distinguish sharded and replicated parameters of tensor ranks",
            tensor_ranks=topology.get_tp_size(),
            hint="clip by a norm of your own over topology.get_group('model')",
        )
    pipeline = topology.pipeline
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in dict.fromkeys(given) if parameter.grad is not None]
    request = SyncRequest("clip_grad_norm_", pipeline.num_calls, f"{limit:g}, {power:g}")
    norm = global_norm(pipeline.engine.sync, request, gradients, power)
    pipeline.engine.sync.operation_ended()
    if error_if_nonfinite and not norm.isfinite():
        raise RunError("the gradient norm is not finite", norm=float(norm), norm_type=power)
    clip(gradients, norm, limit)
    return norm


class DDP(nn.Module):
    """A stage with replicas along the dimension "data"; without that dimension, the stage itself.

    All replicas start with the parameters and buffers of the first. Buffers are not synchronised afterwards: batch norm
    statistics are those of a replica's own samples. Gradients are averaged once per forward_backward.

    Args:
        module: the stage
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._groups = topology.pipeline.groups
        if topology.is_mode_inited(DATA):
            group = topology.get_group(DATA)
            for tensor in (*module.parameters(), *module.buffers()):
                content = tensor.detach().contiguous()
                self._groups.run(dist.broadcast, content, group=group, group_src=0, async_op=True)
                tensor.detach().copy_(content)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._groups.replicas is not None:
            if topology.pipeline.replicated is None:
                raise RunError(
                    "gradients computed outside of forward_backward would not be averaged over replicas",
                    hint="torch.no_grad() to evaluate, or torch's DistributedDataParallel without a pipeline",
                )
            topology.pipeline.replicated[self] = None
        return self.module(*args, **kwargs)

    def reduce_gradients(self) -> None:
        """Average the gradients over all replicas. Collective; forward_backward calls it."""
        averages = ReplicaReducer(self._groups, {0: list(self.module.parameters())})
        averages.start(0)
        averages.finish()


def _refuse_torch_ddp(module: DistributedDataParallel, _: Any) -> None:
    """Refuse a forward with gradients of torch's wrapper in a pipeline."""
    is_in_call = topology.has_pipeline and topology.pipeline.replicated is not None
    if is_in_call and torch.is_grad_enabled() and module.require_backward_grad_sync:
        raise RunError(
            "torch's DistributedDataParallel would average the gradients of one microbatch only",
            hint="penstock.flat.DDP(model); or model.no_sync() in fwd_fn, and average the gradients yourself",
        )


def _watch_torch_ddp(module: nn.Module, _: str, __: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        module.register_forward_pre_hook(_refuse_torch_ddp)


# forward_backward does not see which modules the caller's function calls. A global hook on forwards would see them, but
# makes torch.compile compile again; so wrappers get a hook of their own when they are made.
register_module_module_registration_hook(_watch_torch_ddp)
