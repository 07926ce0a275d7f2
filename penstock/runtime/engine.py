"""Runs the training and evaluation steps of one plan, and undoes a training step that fails."""

import inspect
import json
import logging
import math
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from penstock.batches import (
    TARGET,
    Batch,
    BatchSplitter,
    Microbatch,
    Split,
    explain_failure,
    microbatch_kinds,
)
from penstock.capture import ARITHMETIC_DTYPES, LruCache, Recording, is_inexact, set_mode
from penstock.errors import CaptureError, PenstockError, PenstockWarning, RunError
from penstock.ir import Plan, leaves, map_leaves
from penstock.launch import one_line
from penstock.runtime.agreement import Agreement, autocast_dtype
from penstock.runtime.batch_comparison import BatchComparison
from penstock.runtime.executor import (
    ActionTimes,
    RankProgram,
    StageRunner,
    action_times,
    exchange_remaining,
    execute,
    execute_local,
    watch_step,
)
from penstock.runtime.host_memory import read_scalars
from penstock.runtime.inputs import BatchSender, has_batch, hinting_at_rank_0_arguments
from penstock.runtime.loss_head import LossHead, StepWarnings
from penstock.runtime.model_part import ModelPart
from penstock.runtime.nonfinite import BUFFER, NONFINITE_HINT, PARAMETER, Extremes, NonfiniteProbe, agree_on_origin
from penstock.runtime.options import RunOptions
from penstock.runtime.outputs import OutputDims, OutputMerger
from penstock.runtime.step import NAMED_LOSSES, NO_LOSS, LossVote, Result, Step, StepSnapshot
from penstock.runtime.step_compiler import CompiledStep, StepCompiler
from penstock.runtime.sync import MAX_CONTENT, RankSync, SyncRequest, SyncResult, SyncVote, raise_on_all_ranks
from penstock.runtime.tensor_parallel import differing_gradients
from penstock.runtime.token_budget import (
    TokenBudget,
    check_losses,
    compared_batches,
    refuse_added_losses,
    token_groups,
)
from penstock.runtime.trace import recorded_trace
from penstock.runtime.transports import make_transport
from penstock.stages import parameter_ranks

_LOG = logging.getLogger(__name__)
_MASK = (1 << 64) - 1
_ENDS = {True: "the end of step", False: "the end of eval"}
"""names of the sync at the end of a step, by whether it trains"""


class Engine:
    """Runs training and evaluation steps on this process's stages, together with all other ranks.

    A training step is `_begin_step` (split the batch, agree on the step with all ranks), `_run_training` (run the
    compiled actions, reduce gradients) and `_end_step` (gather losses, find NaN and Inf). If one of them fails,
    gradients and buffers are restored.
    """

    def __init__(
        self,
        model_part: ModelPart,
        plan: Plan,
        sync: RankSync,
        loss_head: LossHead,
        options: RunOptions,
        inputs: str = "all",
        split: Split | None = None,
    ) -> None:
        """`inputs` and `split` are those of `Pipeline`."""
        groups = model_part.groups
        self._model_part, self._plan, self._sync, self._options = model_part, plan, sync, options
        self._groups, self._loss_head = groups, loss_head
        self._runner = StageRunner(model_part, plan.num_stages - 1, loss_head)
        self._transport = make_transport(groups, model_part.device, options.transport)
        self._compiler = StepCompiler(
            plan, model_part, loss_head, self._runner, self._transport, options.max_active_stages
        )
        self._compiled_steps: LruCache[tuple[bool, tuple[Recording, ...]], CompiledStep] = LruCache()
        self._splitter = BatchSplitter(model_part.captured.model.forward, split, dict(plan.split))
        self._num_microbatches = plan.num_microbatches
        is_sent = inputs == "first" and not groups.is_local
        self._sender = BatchSender(model_part, plan, self._split_batch) if is_sent else None
        self._comparison = BatchComparison(model_part.captured.model.forward, options.check_inputs_every)
        self._token_budget = TokenBudget(plan, self._splitter)
        self._parameters = {index: tuple(stage.parameters()) for index, stage in model_part.stages.items()}
        """by stage"""
        self._snapshot = StepSnapshot(
            (*model_part.replicas.parameters, *model_part.tied.parameters, *model_part.rows.parameters),
            model_part.parameters.values(),
            options.restore_gradients,
            model_part.written_buffers,
        )
        self._warnings = StepWarnings(model_part, loss_head)
        self._has_tied = any(len(ranks) > 1 for ranks in parameter_ranks(plan).values())
        """whether a parameter is used on several ranks"""
        self._last_rank = plan.schedule.placement[plan.num_stages - 1]
        self._merger = OutputMerger(model_part, loss_head, sync, self._last_rank)
        self._recovered: tuple[SyncRequest, float] | None = None
        """after a failed pass whose remaining messages were exchanged, so that all ranks can continue: the sync that
        the other ranks are about to join, and time.time() of the failure"""
        self._failure = ""
        """why no more steps can be taken"""

    def check_usable(self) -> None:
        """Raise an error if an earlier step ended in the middle of its messages: they could reach the next step."""
        if self._failure:
            raise RunError(
                "a Pipeline cannot continue after a step that was interrupted or lost contact with another rank",
                failure=self._failure,
                hint="a new Pipeline on every rank; over torch.distributed, start the processes again",
            )

    def train(
        self,
        batch: Batch,
        step_number: int,
        keeps_outputs: bool,
        is_timed: bool,
        output_dims: OutputDims = None,
        scale: float = 1.0,
        budget_tokens: int | None = None,
    ) -> Result:
        """Run forward and backward of a batch as step `step_number`.

        Loss and gradients are multiplied by `scale`. With `budget_tokens` the samples of the batch are
        grouped by length. With `is_timed` the Result has a Trace.
        """
        self.check_usable()
        request = SyncRequest("step", step_number, step_options(keeps_outputs, is_timed, scale, budget_tokens))
        step = self._new_step(step_number, True, keeps_outputs, output_dims, scale, budget_tokens)
        # The token budget learns costs from timed steps.
        times_token_groups = budget_tokens is not None and self._token_budget.times_next_step
        boundary: list[tuple[Tensor, Tensor]] = []
        requiring_grad = tensors_requiring_grad(batch)
        step.leaf_inputs = [value for value in requiring_grad if value.grad_fn is None]
        if len(step.leaf_inputs) < len(requiring_grad):  # some tensors of the batch are results of a computation
            with self._sync.errors_on_all_ranks(request):
                batch, boundary = self._input_boundary(batch)
        if budget_tokens is not None:
            # Before `watch_step`: the evaluations of `_check_padding` are watched themselves.
            batch = self._check_padding(batch, request)
        with watch_step(self._groups.monitor, step_number, True, self._handle_failure):
            compiled = self._begin_step(step, batch, request)
            try:
                times = self._run_training(step, compiled, is_timed or times_token_groups)
                result = self._end_step(step, compiled, times)
                # Continue backward into the graph that computed the batch.
                input_gradients = [(value, leaf.grad) for value, leaf in boundary if leaf.grad is not None]
                if input_gradients and not result.skipped:
                    torch.autograd.backward(*zip(*input_gradients, strict=True))
            except BaseException:
                self._undo()
                raise
            if result.skipped:
                self._undo()
            else:
                self._snapshot.commit()
            if budget_tokens is None:
                return result
            groups = token_groups(step.microbatches)
            self._token_budget.record_step(groups, result.trace)
            return replace(result, groups=groups, trace=result.trace if is_timed else None)

    def _input_boundary(self, batch: Batch) -> tuple[Batch, list[tuple[Tensor, Tensor]]]:
        """Detach tensors of a batch from their graphs; returns each with the leaf that collects its gradient.

        Every microbatch runs a backward of its own, but the first one through a graph frees it. Only with all ranks in
        this process: elsewhere the ranks that do not read a value would have no gradient for it, and the modules that
        compute the batch would be trained differently on every rank.
        """
        if not self._groups.is_local:
            raise RunError(
                "a batch must not be the result of a computation that needs gradients",
                hint="x.detach(), the computation as a part of the model, or local=True",
            )
        boundary: list[tuple[Tensor, Tensor]] = []

        def detached(value: object) -> object:
            if not isinstance(value, Tensor) or value.grad_fn is None:
                return value
            leaf = value.detach().requires_grad_()
            boundary.append((value, leaf))
            return leaf.clone()  # the model may write into it

        return map_leaves(batch, detached), boundary

    def evaluate(
        self,
        batch: Batch,
        step_number: int,
        keeps_outputs: bool,
        output_dims: OutputDims = None,
        budget_tokens: int | None = None,
    ) -> Result:
        """Run the forward of one batch in eval mode, without gradients."""
        self.check_usable()
        request = SyncRequest("eval", step_number, step_options(keeps_outputs, False, 1.0, budget_tokens))
        step = self._new_step(step_number, False, keeps_outputs, output_dims, budget_tokens=budget_tokens)
        if budget_tokens is not None:
            batch = self._check_padding(batch, request)
        watched = watch_step(self._groups.monitor, step_number, False, self._handle_failure)
        with watched, torch.no_grad(), set_mode(self._model_part.captured.model, is_training=False):
            compiled = self._begin_step(step, batch, request)
            self._model_part.fsdp.begin_evaluation()
            self._execute(step, compiled, False)
            result = self._end_step(step, compiled, None)
            return replace(result, groups=token_groups(step.microbatches)) if budget_tokens is not None else result

    def forward(self, batch: Batch, step_number: int, output_dims: OutputDims = None) -> tuple[Result, tuple[int, ...]]:
        """Run the forward of one batch in training mode, without gradients; returns also the microbatch sizes.

        Buffers are restored: the backward of these outputs runs the forward again, with the same random numbers.
        """
        self.check_usable()
        buffers = StepSnapshot((), (), True, self._model_part.written_buffers)
        step = self._new_step(step_number, False, True, output_dims)
        with watch_step(self._groups.monitor, step_number, False, self._handle_failure), torch.no_grad():
            compiled = self._begin_step(step, batch, SyncRequest("forward", step_number))
            buffers.take()
            self._model_part.fsdp.begin_evaluation()
            try:
                self._execute(step, compiled, False)
            finally:
                buffers.restore()
            return self._end_step(step, compiled, None), tuple(microbatch.size for microbatch in step.microbatches)

    def _check_padding(self, batch: Batch, request: SyncRequest) -> Batch:
        """Check once for each kind of padding that the loss does not depend on it, so that it can be cut off.

        All ranks evaluate a few samples with and without padding. Returns the batch with its target among the keyword
        arguments if the model's forward takes it.
        """
        groups = self._groups
        # Other replicas have other batches, and with inputs="first" other ranks have none: they agree on the check.
        must_agree = groups.peers is not None or self._sender is not None
        vote_request = SyncRequest(f"the padding of {request.name}", request.step)
        pair, kind = None, None
        with self._sync.errors_on_all_ranks(vote_request if must_agree else request):
            if self._model_part.replicas_share_parameters or groups.num_tensor_ranks > 1:
                hint = "leave out budget_tokens: every forward of a microbatch would need one of equal shape elsewhere"
                raise RunError("budget_tokens does not combine with parameters that replicas or ranks share", hint=hint)
            if (self._sender is None or groups.rank == 0) and has_batch(batch):
                batch = self._target_as_argument(batch)
                padding = self._token_budget.padding(batch)
                if padding.kind not in self._token_budget.checked:
                    pair, kind = compared_batches(padding), padding.kind
        is_new = pair is not None
        if must_agree:
            is_new = self._sync.exchange(vote_request, SyncVote(maxes=(float(is_new),))).maxes[0] > 0
        if not is_new:
            return batch
        cut, whole = pair or (batch, batch)
        # In full precision, so that a small difference is not taken for rounding.
        with torch.autocast(self._model_part.device.type, enabled=False):
            losses = [self.evaluate(each, request.step, False).loss for each in (cut, whole)]
        if losses[0] is not None and losses[1] is not None:
            dtypes = {p.dtype for p in self._model_part.captured.model.parameters() if is_inexact(p)}
            if check_losses(losses[0], losses[1], dtypes) and kind is not None:
                self._token_budget.checked.add(kind)
        return batch

    def _new_step(
        self,
        number: int,
        is_training: bool,
        keeps_outputs: bool = False,
        output_dims: OutputDims = None,
        scale: float = 1.0,
        budget_tokens: int | None = None,
    ) -> Step:
        scaler = self._loss_head.scaler
        return Step(
            is_training=is_training,
            number=number,
            seed=mix_seed(self._options.seed, number, self._groups.replica),
            keeps_outputs=keeps_outputs,
            output_dims=output_dims,
            scale=scale,
            gradient_scale=scale if scaler is None else scale * scaler.scale,
            budget_tokens=budget_tokens,
        )

    def _begin_step(self, step: Step, batch: Batch, request: SyncRequest) -> CompiledStep:
        """Split the batch and agree with all ranks on the step; raises the same error on every rank if one cannot."""
        if self._groups.num_tensor_ranks > 1:
            self._comparison.compare_tensor_ranks(batch, request, self._sync, self._groups)
        if self._model_part.replicas_share_parameters:
            self._agree_on_recording(step, batch, request)
        if self._sender is None:
            return self._begin_with_own_batch(step, batch, request)
        return self._begin_with_sent_batch(self._sender, step, batch, request)

    def _target_as_argument(self, batch: Batch) -> Batch:
        """The batch with its target among the keyword arguments, if the model's forward has a parameter `target`."""
        args, kwargs, target = batch
        if target is None or self._loss_head.has_loss_fn:
            return batch
        if TARGET not in inspect.signature(self._model_part.captured.model.forward).parameters:
            hint = "Pipeline(..., loss_fn=...), or no target if the model computes its loss from its arguments"
            raise RunError("a target needs a loss function or a model whose forward takes it", hint=hint)
        return Batch(args, {**kwargs, TARGET: target})

    def _microbatches(self, batch: Batch, budget_tokens: int | None) -> tuple[Microbatch, ...]:
        """The microbatches of a batch; raises an error if the stages cannot run."""
        if not self._model_part.has_weights or self._model_part.weights_error is not None:
            self._model_part.check_weights()
        for stage in self._model_part.stages.values():
            stage.check_state()
        if budget_tokens is not None:
            return self._token_budget.microbatches(batch, budget_tokens)
        return self._splitter.split(batch, self._num_microbatches)

    def _split_batch(self, batch: Batch, step: Step, recordings: tuple[Recording, ...] | None = None) -> None:
        """Fill a step with the microbatches of a batch, and with their recordings, which are found unless given."""
        microbatches, captured = self._microbatches(batch, step.budget_tokens), self._model_part.captured
        arguments = [(microbatch.args, microbatch.kwargs) for microbatch in microbatches]
        min_recordings, step.min_recordings = step.min_recordings, 0
        step.microbatches = microbatches
        if recordings is not None:
            captured.record_again(arguments[0], step.seed, min_recordings)
            step.recordings, step.inputs = recordings, tuple(captured.inputs(*each) for each in arguments)
            return
        try:
            pairs = captured.recordings(arguments, step.seed, min_recordings, microbatch_kinds(microbatches))
        except CaptureError as error:
            raise explain_failure(error, captured.model.forward, microbatches) from error.__cause__
        step.recordings, step.inputs = zip(*pairs, strict=True)
        if step.budget_tokens is not None:
            refuse_added_losses(step.recordings)

    def _agree_on_recording(self, step: Step, batch: Batch, request: SyncRequest) -> None:
        """Agree with all ranks on how often they record the model for this step: a batch may be new to some replicas.

        The model communicates with other replicas, for example to gather parameters, so none may record it alone.
        """
        counts = SyncRequest(f"the recordings of {request.name}", request.step)
        with self._sync.errors_on_all_ranks(counts):
            num_new, count, is_given = 0, 0, self._sender is None or self._groups.rank == 0
            if is_given and has_batch(batch):
                microbatches = self._microbatches(self._target_as_argument(batch), step.budget_tokens)
                arguments = [(microbatch.args, microbatch.kwargs) for microbatch in microbatches]
                num_new, count = self._model_part.captured.num_new(arguments, step.seed), len(microbatches)
        # Each number also negated, so that the maximum over the ranks gives the minimum.
        vote = SyncVote(maxes=(float(num_new), -float(num_new), float(count), -float(count)) if is_given else ())
        most, negated_fewest, most_microbatches, negated_microbatches = self._sync.exchange(counts, vote).maxes
        if not step.is_training and most_microbatches != -negated_microbatches:
            # Every forward gathers parameters.
            raise RunError(
                "replicas that share parameters must have the same number of microbatches in an evaluation",
                fewest=int(-negated_microbatches),
                most=int(most_microbatches),
                hint="at least one sample for each microbatch on every replica",
            ).on_all_ranks()
        # Without rules, the batch dimensions of the outputs are found by another recording, after the step.
        if step.keeps_outputs and step.output_dims is None and most != -negated_fewest:
            raise RunError(
                "replicas that share parameters cannot find the batch dimensions of outputs for shapes that are new "
                "to some of them only",
                hint="output_dims=0, or another rule of docs/training.md",
            ).on_all_ranks()
        step.min_recordings = int(most)
        if step.min_recordings and self._groups.monitor is not None:
            self._groups.monitor.preparing()

    def _begin_with_own_batch(self, step: Step, batch: Batch, request: SyncRequest) -> CompiledStep:
        """Begin a step whose batch every rank was given; the ranks compare the steps that they derive from it."""
        groups = self._groups
        with self._sync.errors_on_all_ranks(request):
            if not groups.is_local and not has_batch(batch):
                hint = (
                    "the same call with the whole batch on every rank; to pass the batch on rank 0 only, and the "
                    'target there or on the rank of the last stage, use inputs="first"'
                )
                raise RunError("every rank must be given the batch", hint=hint)
            batch = self._target_as_argument(batch)
            self._split_batch(batch, step)
            compiled = self._compiled(step)
            batch_checksum, batch_leaves = (0, {}) if groups.is_local else self._comparison.checksum(batch, request)
        size, has_loss = self._size_and_loss(step, compiled)
        # Of this pipeline alone; with replicas the mean over all pipelines replaces it below.
        step.mean_size = size
        # Only rank 0 of each pipeline contributes, so that the sum over all ranks is a sum over the pipelines.
        own_sums = (size, has_loss) if groups.rank == 0 else (0.0, 0.0)
        trained = 0.0 if groups.peers is None else self._trained_checksum(step)
        sums = (*own_sums, self._tied_balance(step) if self._has_tied else 0.0, trained)
        vote = SyncVote(compiled.agreement, batch_checksum, sums, batch=batch_leaves)
        if groups.peers is not None:
            # Replicas exchange collectives before the first message, so they wait now.
            result = self._sync.exchange(request, vote)
            self._check_trained(result)
            total_size, num_with_loss, balance, _ = result.sums
            self._check_tied(balance)
            step.mean_size = self._mean_size(total_size, num_with_loss)
        elif groups.is_local:
            self._sync.exchange(request, vote)
        else:
            self._sync.start(request, vote)
            # The first stage computes while votes are in transit: only the first message waits for the result.
            self._transport.begin_step(self._finish_sync_with_tied if self._has_tied else self._sync.finish)
        return compiled

    def _begin_with_sent_batch(
        self, sender: BatchSender, step: Step, batch: Batch, request: SyncRequest
    ) -> CompiledStep:
        """Begin a step whose batch only rank 0 was given; the ranks sync first, then receive the tensors they need.

        The rank of the last stage may have the target instead.
        """
        # All ranks must have the same list of signatures, or they would wait for tensors that are not sent.
        # For a known shape the other ranks find recordings by their number, whatever their own autocast is.
        agreement = Agreement.of_options(
            {
                "microbatches": self._plan.num_microbatches,
                "number of batch shapes so far": sender.num_signatures,
                "autocast": autocast_dtype(self._model_part.device.type),
            }
        )
        groups, has_loss_fn = self._groups, self._loss_head.has_loss_fn
        # Each rank votes with what it was given; rank 0 also with the index of the signature of its batch.
        target_checksum = float(self._comparison.target_checksum(batch, request))
        given = (sender.argument_mask(batch), target_checksum, self._tied_balance(step))
        trained = 0.0 if groups.peers is None else self._trained_checksum(step)
        outgoing, own_target = None, batch.target if groups.rank == self._last_rank and has_loss_fn else None
        if groups.rank == 0:
            with self._sync.errors_on_all_ranks(request), hinting_at_rank_0_arguments():
                if not has_batch(batch):
                    hint = "step(x, target=y) on rank 0; the target may be passed on the rank of the last stage"
                    raise RunError('with inputs="first" rank 0 must be given the batch', hint=hint)
                outgoing = sender.prepare(self._target_as_argument(batch), step)
                size, has_loss = self._size_and_loss(step, self._compiled(step))
            index = outgoing.signature_index
            is_unknown = not sender.is_agreed(index, step.is_training)
            content = (*given, float(index))
            vote = SyncVote(agreement, sums=(size, has_loss, 0.0, trained), maxes=(float(is_unknown),), content=content)
        else:
            has_loss = float(own_target is not None)
            vote = SyncVote(agreement, sums=(0.0, 0.0, has_loss, trained), maxes=(0.0,), content=given)
        result = self._sync.exchange(request, vote)
        self._check_trained(result)
        contents = [result.content(rank) for rank in range(groups.num_ranks)]
        masks, checksums, balances = zip(*(content[:3] for content in contents), strict=True)
        self._check_tied(sum(balances))
        sender.check_arguments(masks, has_loss_fn)
        if len({checksums[0], checksums[self._last_rank]} - {0.0}) > 1:
            problem = "rank 0 and the rank of the last stage must be given the same target"
            raise RunError(problem, hint="one target").on_all_ranks()
        index, is_new = int(contents[0][3]), result.maxes[0] > 0
        # If the signature is new to at least one replica, all ranks agree on the step that they derive from it.
        new = SyncRequest("the shapes of a batch", request.step)
        if is_new and groups.monitor is not None:
            groups.monitor.preparing()
        with self._sync.errors_on_all_ranks(new) if is_new else nullcontext():
            if outgoing is None:
                sender.receive(index, step, own_target)
            else:
                sender.send(outgoing, step)
            compiled = self._compiled(step)
        if is_new:
            self._sync.exchange(new, SyncVote(compiled.agreement))
            sender.commit(index, step.is_training)
        total_size, *num_with_loss, _ = result.sums
        # The target is that of rank 0 or of the rank of the last stage.
        step.mean_size = self._mean_size(total_size, max(num_with_loss))
        return compiled

    def _compiled(self, step: Step) -> CompiledStep:
        """The compiled step for the recordings of a batch; compiled now if it is the first with these recordings."""
        kind = step.is_training, step.recordings
        return self._compiled_steps.get_or_make(kind, lambda: self._compiler.compile(*kind))

    def _size_and_loss(self, step: Step, compiled: CompiledStep) -> tuple[float, float]:
        """The number of samples of this pipeline's batch, and whether it has a loss (1 or 0)."""
        has_target = step.is_training or step.microbatches[0].target is not None
        has_loss = has_target if self._loss_head.has_loss_fn else compiled.has_roots
        return float(sum([microbatch.size for microbatch in step.microbatches])), float(has_loss)

    def _trained_checksum(self, step: Step) -> float:
        """A checksum of which parameters of this rank a step trains, below 2**32; 0 for an evaluation.

        It depends on the rank, so that the sum over a pipeline shows which rank trains which parameters.
        """
        if not step.is_training:
            return 0.0
        flags = bytes(parameter.requires_grad for parameter in self._model_part.parameters.values())
        return float(zlib.crc32(flags, self._groups.rank))

    def _check_trained(self, result: SyncResult) -> None:
        """Raise an error on all ranks if pipelines train different parameters: their gradients would be mixed."""
        # The last of the sums is that of `_trained_checksum`.
        if len({sums[-1] for sums in result.sums_by_pipeline}) < 2:
            return
        groups, parameters = self._groups, self._model_part.parameters
        texts = groups.gather_texts_of_all(json.dumps([name for name, p in parameters.items() if p.requires_grad]))
        trained = [set(json.loads(text)) for text in texts]
        first = trained[: groups.num_ranks]
        for rank, names in enumerate(trained):
            if differing := names ^ first[rank % groups.num_ranks]:
                raise RunError(
                    "requires_grad must be the same on all replicas and tensor-parallel ranks",
                    parameter=min(differing),
                    pipelines=(0, rank // groups.num_ranks),
                    hint="the same parameters frozen on every rank",
                ).on_all_ranks()

    def _tied_balance(self, step: Step) -> float:
        """The part of this rank in the sum that `_check_tied` is given."""
        return self._model_part.tied.trained_balance if step.is_training else 0.0

    def _check_tied(self, balance: float) -> None:
        """Raise an error on all ranks if some freeze a tied parameter: the others would wait for its gradients."""
        if not balance:
            return
        groups, tied = self._groups, self._model_part.tied.tied
        texts = groups.gather_texts_of_all(json.dumps({entry.name: entry.parameter.requires_grad for entry in tied}))
        # Of the first pipeline: all pipelines train the same parameters.
        trained = [json.loads(text) for text in texts[: groups.num_ranks]]
        for name in sorted({name for flags in trained for name in flags}):
            ranks = {
                is_trained: [rank for rank, flags in enumerate(trained) if flags.get(name) is is_trained]
                for is_trained in (True, False)
            }
            if ranks[True] and ranks[False]:
                raise RunError(
                    "requires_grad of a parameter that several stages use must be the same on all of their ranks",
                    parameter=name,
                    trained_on=ranks[True],
                    frozen_on=ranks[False],
                    hint="the same parameters frozen on every rank",
                ).on_all_ranks()

    def _finish_sync_with_tied(self) -> None:
        """Finish the sync at the start of a step of a pipeline with tied parameters."""
        _, _, balance, _ = self._sync.finish().sums
        self._check_tied(balance)

    def _mean_size(self, total_size: float, num_with_loss: float) -> float:
        """The number of samples, averaged over the replicas; raises an error if only some replicas have a loss.

        Both arguments are sums over all pipelines.
        """
        count = self._groups.num_pipelines
        if num_with_loss not in (0.0, count):
            raise RunError(
                "either all replicas or none must have a target or labels",
                with_loss=int(num_with_loss) // self._groups.num_tensor_ranks,
                replicas=self._groups.num_replicas,
                hint="give a target, or labels, on the same rank of every replica or on none",
            ).on_all_ranks()
        return total_size / count

    def _run_training(self, step: Step, compiled: CompiledStep, is_timed: bool) -> list[ActionTimes] | None:
        """Run forward and backward, and reduce the gradients."""
        self._snapshot.take(step.leaf_inputs)
        if self._model_part.fsdp.modules:
            self._model_part.fsdp.begin_step(len(step.microbatches))
        times = self._execute(step, compiled, is_timed)
        for reducer in self._model_part.reducers:
            reducer.finish()
        # Losses are weighted so that gradients are means over the replicas, but each replica has inputs of its own.
        for value in step.leaf_inputs if self._groups.num_replicas > 1 else ():
            if value.grad is not None:
                value.grad.div_(self._groups.num_replicas)
        return times

    def _undo(self) -> None:
        """Restore gradients and buffers to their values before the step."""
        self._model_part.replicas.clear()
        self._model_part.fsdp.clear()
        self._snapshot.restore()

    def _execute(self, step: Step, compiled: CompiledStep, is_timed: bool) -> list[ActionTimes] | None:
        """Run the compiled actions of this process's ranks; returns when each action ran if the step `is_timed`."""
        times = [action_times(self._model_part.device) for _ in compiled.rank_programs] if is_timed else None
        monitor = self._groups.monitor
        self._runner.step, self._recovered = step, None
        try:
            with generators_restored():
                if self._groups.is_local:
                    execute_local(compiled.rank_programs, times)
                else:
                    (program,) = compiled.rank_programs
                    execute(program, monitor.action_reporter, times[0] if times else None, self._recover_messages)
                for program in compiled.rank_programs:
                    for slot in program.send_slots:
                        slot.finish()
                if not self._groups.is_local:
                    # A rank without any message has not checked yet that all ranks take the same step.
                    self._transport.run_check()
        except BaseException as error:
            compiled.clear()
            if self._recovered is None:
                self._transport.clear()
            if self._transport.problem is not None:
                # The ranks disagree about the step: the action that ran the check did not cause that.
                raise self._transport.problem from None
            # A loss function may fail because it was given None.
            lacks_target = self._loss_head.has_loss_fn and step.microbatches[0].target is None
            is_call_error = isinstance(error.__cause__, TypeError | AttributeError)
            if lacks_target and is_call_error and isinstance(error, RunError) and not error.hint:
                hint = "pipe.step(x, target=y); a loss function that needs no target is called with None"
                raise error.with_hint(hint) from error.__cause__
            raise
        finally:
            self._runner.step = None
        return times

    def _recover_messages(self, program: RankProgram, code: int) -> None:
        """Exchange the messages of the step that follow a failed action, so that all ranks can take another step."""
        # Wall-clock time: it is compared between hosts.
        failed_at, model_part, monitor = time.time(), self._model_part, self._groups.monitor
        # If the ranks disagree about the step, nothing was sent; a lost rank would never answer. The second run that
        # looks for NaN comes after the sync at the end of the step, in which `_handle_failure` would have to refuse.
        if self._transport.problem is not None or monitor.has_lost_contact or self._runner.probe is not None:
            return
        if self._groups.num_pipelines > 1 or model_part.fsdp.modules:
            # Passes and losses communicate with other pipelines.
            return
        try:
            exchange_remaining(program, code)
            self._transport.run_check()
            if self._runner.step.is_training:
                for reducer in model_part.reducers:
                    reducer.finish()
        except Exception as error:
            _LOG.warning("the messages of a failed step could not be exchanged: %s", error)
        else:
            step = self._runner.step
            self._recovered = SyncRequest(_ENDS[step.is_training], step.number), failed_at

    def _handle_failure(self, error: BaseException) -> None:
        """Raise the error on all ranks if possible, so that training can continue; otherwise refuse further steps."""
        monitor = self._groups.monitor
        if self._groups.is_local or (isinstance(error, PenstockError) and error.is_shared):
            return
        recovered, self._recovered = self._recovered, None
        if isinstance(error, RunError) and recovered is not None:
            request, failed_at = recovered
            self._sync.refuse(request, error, failed_at)
            if not monitor.has_lost_contact:
                error.on_all_ranks()
                return
        self._failure = one_line(error)
        self._transport.clear()

    def _end_step(self, step: Step, compiled: CompiledStep, times: Sequence[ActionTimes] | None) -> Result:
        """Gather losses on every rank, and check losses and gradients for NaN and Inf."""
        groups, own = self._groups, LossVote.of(step)
        # NaN spreads to later stages in forward and to earlier ones in backward, so the first bad output and the last
        # bad gradient are nearest to the cause. An infinite index means that this process found none or did not look.
        first_bad_output, last_bad_gradient = math.inf, -math.inf
        if step.is_training and self._options.nonfinite != "ignore" and self._loss_head.scaler is None:
            for index, parameters in self._parameters.items():
                step.extremes.add(index, [parameter.grad for parameter in parameters], is_gradient=True)
            bad_outputs, bad_gradients = step.extremes.nonfinite_stages()
            first_bad_output = min(bad_outputs, default=math.inf)
            last_bad_gradient = max(bad_gradients, default=-math.inf)
        every, difference = self._options.check_inputs_every, None
        if step.is_training and groups.num_tensor_ranks > 1 and every and step.number % every == 0:
            difference = differing_gradients(groups, self._model_part.parameters)
        new_warnings = self._warnings.find_new(step)
        vote = SyncVote(
            sums=(own.total, own.added, len(new_warnings), float(difference is not None)),
            # The first stage is negated, so that the maximum over the ranks gives the minimum.
            maxes=(own.kind, own.dtype, -first_bad_output, last_bad_gradient),
            content=own.content if len(own.content) <= MAX_CONTENT else (),
        )
        result = self._sync.exchange(SyncRequest(_ENDS[step.is_training], step.number), vote)
        # From here on, these values are those of all ranks.
        total, added, num_warnings, num_differing = result.sums
        kind, dtype, negated_output, last_bad_gradient = result.maxes
        first_bad_output = -negated_output
        if num_warnings:
            self._warnings.issue(new_warnings, step.is_training)
        losses_and_weights = own.content
        if kind > NO_LOSS and not groups.is_local:
            losses_and_weights = result.content(self._last_rank)
            if not losses_and_weights:
                # More microbatches than fit into a vote.
                values = torch.tensor(own.content or [0.0] * 2 * len(step.microbatches), dtype=torch.float64)
                losses_and_weights = tuple(groups.broadcast(values, self._last_rank).tolist())
        by_name = self._share_named_losses(step) if kind == NAMED_LOSSES else {}
        outputs = self._merger.merge(step) if step.keeps_outputs else None
        trace = None if times is None else recorded_trace(compiled.program, self._plan.costs, groups, times)
        skipped = ""
        if math.isfinite(first_bad_output) or math.isfinite(last_bad_gradient):
            skipped = self._handle_nonfinite(step, compiled, first_bad_output, last_bad_gradient)
        elif num_differing:
            raise_on_all_ranks(groups, difference)
        count, loss_dtype = len(step.microbatches), ARITHMETIC_DTYPES[int(dtype)] if kind > NO_LOSS else torch.float64
        return Result(
            loss=torch.tensor((total + added) / groups.num_pipelines, dtype=loss_dtype) if kind > NO_LOSS else None,
            losses=tuple(torch.tensor(losses_and_weights[:count], dtype=loss_dtype).unbind()),
            weights=tuple(losses_and_weights[count:]),
            outputs=outputs,
            trace=trace,
            skipped=skipped,
            losses_by_name={name: torch.tensor(loss, dtype=loss_dtype) for name, (loss, _) in by_name.items()},
            weights_by_name={name: tuple(weights) for name, (_, weights) in by_name.items()},
            seed=step.seed,
        )

    def _share_named_losses(self, step: Step) -> dict[str, tuple[float, Sequence[float]]]:
        """By name each of several losses, averaged over the replicas, and its weights; the same on every rank."""
        text = ""
        if step.weights_by_loss:
            weights = {
                name: [weight * step.scale for weight in own.weights or ()]
                for name, own in step.weights_by_loss.items()
            }
            # In the same order on every replica. A loss of weight 0 does not count, even if it is NaN.
            totals = []
            for name in sorted(weights):
                values = read_scalars([losses[name] for losses in step.named_losses.values()])
                pairs = zip((weights[name][index] for index in step.named_losses), values, strict=True)
                totals.append(sum(weight * value for weight, value in pairs if weight))
            means = self._model_part.replicas.sum(torch.tensor(totals, dtype=torch.float64)) / self._groups.num_replicas
            means_by_name = dict(zip(sorted(weights), means.tolist(), strict=True))
            text = json.dumps({name: (means_by_name[name], weights[name]) for name in weights})
        return json.loads(self._groups.broadcast_text(text, self._last_rank))

    def _handle_nonfinite(
        self, step: Step, compiled: CompiledStep, first_bad_output: float, last_bad_gradient: float
    ) -> str:
        """Raise an error about NaN or Inf; with nonfinite="skip", warn and return why the step is skipped.

        `first_bad_output` is the first stage whose forward produced such a value, `last_bad_gradient` the last one with
        such a gradient; infinite if there is none.
        """
        is_forward = math.isfinite(first_bad_output)
        stage = int(first_bad_output if is_forward else last_bad_gradient)
        probe = self._run_again(step, compiled)
        origin = agree_on_origin(self._groups, probe.origin(stage if is_forward else None))
        nodes = self._plan.partition.stages[stage]
        if self._options.restore_gradients:
            effect = "the step was dropped, and gradients, weights and buffers were restored"
        else:
            effect = "the step and all accumulated gradients were dropped"
        hint = origin.hint if origin else NONFINITE_HINT
        # If weights are NaN or Inf, the next batches would be skipped too.
        if self._options.nonfinite == "raise" and not (origin and origin.kind in (PARAMETER, BUFFER)):
            hint += '; or nonfinite="skip" in RunOptions, to continue without this batch'
        error = RunError(
            f"loss or gradient is NaN or Inf; {effect}",
            step=step.number,
            stage=origin.stage if origin else stage,
            during="forward" if is_forward else "backward",
            **(origin.error_values if origin else {"nodes": f"{nodes[0]} to {nodes[-1]}"}),
            hint=hint,
        )
        if self._options.nonfinite == "raise":
            raise error.on_all_ranks()
        if self._groups.is_first:
            # Points at the user's call of step.
            warnings.warn(str(error), PenstockWarning, stacklevel=5)
        return str(error)

    def _run_again(self, step: Step, compiled: CompiledStep) -> NonfiniteProbe:
        """Run a step once more, on every rank, to find where NaN or Inf came from; the caller undoes it."""
        self._undo()
        # The weights are reused: a loss function that keeps state could give other weights in a second run.
        again = replace(
            step, keeps_outputs=False, losses={}, named_losses={}, added_losses={}, outputs={}, extremes=Extremes()
        )
        with NonfiniteProbe(self._model_part.stages).active() as probe:
            self._runner.probe = probe
            try:
                self._run_training(again, compiled, False)
            finally:
                self._runner.probe = None
        return probe


def tensors_requiring_grad(batch: Batch) -> list[Tensor]:
    """The tensors of the batch that require gradients; those with a `grad_fn` are the results of computations."""
    return list(dict.fromkeys(value for value in leaves(batch) if isinstance(value, Tensor) and value.requires_grad))


def step_options(keeps_outputs: bool, is_timed: bool, scale: float, budget_tokens: int | None = None) -> str:
    """The options of a step that all ranks must share, as a user would write them."""
    flags = {"return_outputs": keeps_outputs, "record": is_timed}
    texts = [f"{name}=True" for name, is_on in flags.items() if is_on]
    if budget_tokens is not None:
        texts.append(f"budget_tokens={budget_tokens}")
    return ", ".join([*texts, f"scale={scale!r}"] if scale != 1.0 else texts)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore torch's generators at exit: replay seeds them, and a step must not change the user's random numbers."""
    host = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)


def mix_seed(*numbers: int) -> int:
    """A 63-bit seed in which every bit depends on all numbers and their order.

    Multiplies by the constants of splitmix64's finalizer. Its shifts differ, and stay: with others every model would
    draw other numbers for the same seed.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 29) * 0x94D049BB133111EB & _MASK
        state ^= state >> 32
    return state >> 1
