"""Pipeline: trains a model with a plan, with exactly the gradients of the unsplit model."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.api.arguments import (
    LossFn,
    agree_on_plan,
    check_choices,
    check_execution,
    check_loss_fn,
    check_model_and_plan,
    check_split,
    check_staleness,
    shown,
)
from penstock.api.forward_pass import ForwardPass, pull_back
from penstock.api.rank_parameters import RankParameters, StepGradients, WatchedParameters
from penstock.batches import Batch, BatchSplitter, Microbatch, Split
from penstock.capture import Granularity, shard_vocabulary, sharded_head
from penstock.checkpoint import CheckpointOptions, FitProgress, Loaded, Loader, LoadTargets, RunState, Saver
from penstock.errors import CheckpointError, PenstockError, PlanError, RunError
from penstock.ir import Plan, Trace, as_int, counted, is_finite
from penstock.launch import ErrorPrinter
from penstock.loss import LossWeights, has_parameters, loss_module
from penstock.planner import staleness_lines, with_microbatches
from penstock.runtime import (
    MAX_REDUCED,
    Agreement,
    AsyncEngine,
    Engine,
    GradScaler,
    LossHead,
    ModelPart,
    OutputDims,
    ProcessGroups,
    RankSync,
    Result,
    RunOptions,
    StaleWeights,
    SyncRequest,
    SyncVote,
    balanced_shares,
    check_clipping,
    check_output_dims,
    check_structure,
    check_tied_weights,
    clip,
    gather_tensors,
    global_norm,
    make_optimizer,
)
from penstock.views import Cuts as CutsView

_CALLS = (
    "pipe.step(x, target=y).loss for forward and backward, pipe.evaluate(x, return_outputs=True).outputs for a forward"
)
_UNSCALED = float("1.0")
"""default of `scale`: an object of its own, so that a given 1.0, which may be meant for the model, differs from it"""


class Pipeline:
    """This rank's stages of a model; `step` trains on a whole batch, with the gradients of the unsplit model.

    Under torch.distributed every process is one rank. With `local=True` all ranks run inside this process, and
    gradients accumulate in the model's own parameters. The constructor is a collective call.

    With `staleness` the pipeline is asynchronous: it is not flushed between steps, and each stage updates its weights
    as soon as it can. The numbers are then not those of the unsplit model; docs/asynchronous.md defines them.

    Args:
        model: the whole model, which may be on the meta device; each rank keeps its own stages
        plan: the plan, the same on every rank
        loss_fn: `loss_fn(output, target)` returns the loss; None: the model returns its loss itself
        mesh: a DeviceMesh with the axis "pp", "dp" if there are replicas, and "tp" if `parallelize_fn` splits tensors
            over ranks, which are all given the batch of their replica; None: all processes are one pipeline
        local: run all ranks inside this process: for debugging, tests and notebooks
        parallelize_fn: `parallelize_fn(stage)` or `parallelize_fn(stage, mesh)` is called for every stage of this rank,
            such as to apply `fully_shard` or `parallelize_module`
        reduction: "mean" over samples, "tokens" (mean over labels that are not ignored) or "sum"; None: detected
        inputs: "all" if every rank is given the batch, "first" if only rank 0 is, which sends it to the others
        split: by argument name, the dimension that holds the samples, None to pass the argument whole to every
            microbatch, "samples", "items", a Rows or a Ragged; other arguments are split by their shape
        output_dims: by output name, how the outputs of microbatches are merged: a dimension, None for a value that is
            the same for all samples, "mean", "sum", or "list" for one value per microbatch; others are detected
        scaler: scales the losses of float16 training
        staleness: None, or the kind of asynchronous pipeline: "stash", "2bw" or "predict"
        optimizer: with `staleness`, a function that is given parameters and returns their optimizer
        options: seed, timeouts and the handling of NaN and Inf
        depth: as in `penstock.capture`, for the batches that this Pipeline records; None: as in the plan
        basic_blocks: as in `penstock.capture`, for the batches that this Pipeline records

    Raises:
        RunError: if ranks were given different models, plans or options, or an option does not fit the others
        CaptureError: if the model cannot be recorded
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
        split: Split | None = None,
        output_dims: OutputDims = None,
        scaler: GradScaler | None = None,
        staleness: str | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        options: RunOptions = RunOptions(),  # noqa: B008
        depth: int | None = None,
        basic_blocks: Sequence[str | type] = (),
    ) -> None:
        granularity = Granularity(depth, basic_blocks)
        check_model_and_plan(model, plan)
        check_loss_fn(model, loss_fn)
        check_execution(mesh, local, parallelize_fn)
        check_choices(reduction, inputs, scaler, options)
        check_split(split, model)
        check_output_dims(output_dims)
        check_staleness(staleness, optimizer, plan, scaler, inputs, parallelize_fn, options)
        self._inputs, self._split, self._output_dims = inputs, split, output_dims
        self._options, self._staleness = options, staleness
        self.num_steps = 0
        """number of steps taken; part of the seed of random numbers"""
        self._fit_progress = FitProgress()
        """set by `fit`"""

        given_model, self._loss_fn = model, loss_fn
        model, loss_fn = split_model(model, plan, loss_fn)
        is_split = model is not given_model
        if is_split and (parallelize_fn is not None or staleness is not None):
            other = "parallelize_fn" if parallelize_fn is not None else "staleness"
            raise RunError(f"a split output layer does not combine with {other}", hint="vocabulary_shards=None")
        self._has_split_loss = is_split and self._loss_fn is not None
        """whether shards of the output layer compute the loss, so that the loss is the only output"""

        # From here on ranks communicate: every rank must reach the same collective calls.
        groups = _process_groups(plan, mesh, local, options.deadline_seconds)
        if not groups.is_local:
            ErrorPrinter.install(dist.get_rank())
        self._receives_batches = inputs == "first" and not groups.is_local
        """whether ranks other than the first call `step` and `eval` without a batch"""
        self._sync = RankSync(groups)
        scaling = None
        if scaler is not None:
            scaling = scaler.scale, scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval
        choices = {"reduction": reduction, "inputs": inputs, "split": split or {}, "scaler": scaling}
        if staleness is not None:
            choices["staleness"] = staleness
        self.plan = plan = agree_on_plan(model, plan, groups, self._sync, loss_fn, options, **choices)
        parallelize = _parallelize(parallelize_fn, mesh)
        loss_part = loss_module(loss_fn)
        self._part = part = ModelPart(model, plan, groups, parallelize, granularity, loss_part, options.check_model)
        # A process with the whole model trains its weights, and torch's functions see all gradients there.
        is_whole = groups.is_local or groups.num_ranks == 1
        self._stale_weights = None if is_whole else StaleWeights.of(given_model)
        self._rank_parameters = None if is_whole else RankParameters(part.parameters, groups.is_first)
        self._step_gradients = StepGradients(part.parameters)
        self._saver = Saver(part, self._sync)

        loss_weights = LossWeights(part.captured, part.replicas, loss_fn, reduction, part.remote_parameters)
        if scaler is not None:
            scaler.bind(self._sync)
        self._loss_head = LossHead(part.captured, loss_weights, plan.partition, scaler)
        self.optimizer: Optimizer | None = None
        """the optimizer of an asynchronous pipeline, which updates the weights inside `step`"""
        if staleness is not None:
            if groups.peers is not None:
                hint = 'a mesh with the axis "pp" only, or no staleness'
                raise RunError("staleness does not combine with replicas or tensor parallelism", hint=hint)
            self.optimizer = make_optimizer(optimizer, part, plan, staleness)
            self.check_optimizer(self.optimizer)
        self._engine = self._make_engine()
        self._pull_back_engine: Engine | None = None
        """runs the backward of a ForwardPass from given gradients of the outputs, as a vector-Jacobian product
        (`pull_back`); made when it is first needed"""
        self._sync.operation_ended()

    def _make_engine(self) -> Engine:
        part, head, options, split = self._part, self._loss_head, self._options, self._split
        if self.optimizer is None:
            return Engine(part, self.plan, self._sync, head, options, self._inputs, split)
        return AsyncEngine(part, self.plan, self._sync, head, options, self.optimizer, self._staleness, split=split)

    def __repr__(self) -> str:
        part, plan = self._part, self.plan
        held = f"rank {part.groups.rank} with stages {list(part.stages)}"
        return (
            f"Pipeline({type(part.captured.model).__name__}: {counted(plan.num_stages, 'stage')} on "
            f"{counted(plan.num_ranks, 'rank')}, {plan.choices.schedule}, "
            f"{counted(plan.num_microbatches, 'microbatch')}, {'local' if part.groups.is_local else held}, "
            f"{counted(self.num_steps, 'step')} taken)"
        )

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: only `step` and `evaluate` run the stages of all ranks."""
        raise RunError("a Pipeline must not be called like a module", hint=_CALLS)

    def __getattr__(self, name: str) -> NoReturn:
        """Called for attributes that a Pipeline does not have: the error for those of modules names the model."""
        hint = f"\ntry: model.{name}, of the model that the Pipeline was given" if hasattr(nn.Module, name) else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Not supported: a copy would share connections to other ranks."""
        raise RunError("a Pipeline cannot be copied or pickled", hint="pipe.save(directory), or pipe.full_state_dict()")

    # ------------------------------------------------------------------------------------------------------------ steps

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        record: bool = False,
        output_dims: OutputDims = None,
        losses: list[Tensor] | None = None,
        scale: float = _UNSCALED,
        budget_tokens: int | None = None,
        **kwargs: Any,
    ) -> Result:
        """Run forward and backward of one whole batch; gradients accumulate. Every rank makes the same call.

        Args:
            *args: positional arguments of the model, for the whole batch
            target: given to the loss function, and to the model if its forward has a parameter of this name
            return_outputs: whether the result has the model's outputs, which are then sent to all ranks
            record: whether the result has the Trace of this step
            output_dims: as in the constructor, which it overrides by name; by default batch dimensions are found from a
                recording of two microbatches together
            losses: a list that is filled with the losses of the microbatches
            scale: factor of the loss and of the gradients that this step adds: with `1/n` in each of n steps before an
                update they are those of `(loss / n).backward()` in plain PyTorch
            budget_tokens: group the samples by length into microbatches of at most this many padded tokens, as many as
                that takes, in the order that is predicted to be fastest; an attention mask or labels of -100 must show
                the padding, which is cut off. None: the microbatches of the plan
            **kwargs: keyword arguments of the model

        Returns:
            The loss on every rank, and what was asked for.

        Raises:
            RunError: if the step failed on any rank, ranks made different calls, or a loss or gradient is NaN or Inf;
                gradients are then as they were before the step
            CaptureError: if the model cannot be recorded for this batch
        """
        if self._saver.background.error is not None:  # an asynchronous save has failed meanwhile
            self._saver.check(SyncRequest("step", self.num_steps))
        budget = self._checked_options("step", target, return_outputs, output_dims, losses, budget_tokens)
        if not isinstance(record, bool):
            self._refuse_ambiguous("step", "record")
        if scale is not _UNSCALED:
            scale = self._checked_scale(scale)
        if self._loss_head.scaler is not None:
            self._loss_head.scaler.begin()
        batch = Batch(args, kwargs, target)
        dims = self._output_dims if output_dims is None else self._merged_dims(output_dims)
        result = self._engine.train(batch, self.num_steps, bool(return_outputs), bool(record), dims, scale, **budget)
        self.num_steps += 1
        self._mark_model_stale()
        self._step_gradients.are_unscaled = scale <= 1.0  # a larger one may be that of a GradScaler
        if losses is not None:
            losses[:] = result.losses
        return result

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        output_dims: OutputDims = None,
        losses: list[Tensor] | None = None,
        budget_tokens: int | None = None,
        **kwargs: Any,
    ) -> Result:
        """Run the forward of one whole batch in eval mode, without gradients. Every rank makes the same call.

        The mode of the model is as before afterwards. An asynchronous pipeline is drained first.

        Args:
            *args: positional arguments of the model, for the whole batch, which may have any size
            target: given to the loss function; None: no loss is computed, unless the model returns one
            return_outputs: whether the result has the model's outputs, on all ranks
            output_dims: as in `step`
            losses: a list that is filled with the losses of the microbatches
            budget_tokens: as in `step`
            **kwargs: keyword arguments of the model

        Returns:
            The loss if there is one, and the outputs if asked for, on every rank.

        Raises:
            RunError: as in `step`
        """
        budget = self._checked_options("eval", target, return_outputs, output_dims, losses, budget_tokens)
        self.drain()
        dims = self._merged_dims(output_dims)
        batch = Batch(args, kwargs, target)
        result = self._engine.evaluate(batch, self.num_steps, bool(return_outputs), dims, **budget)
        if losses is not None:
            losses[:] = result.losses
        return result

    @overload
    def eval(self) -> Self: ...

    @overload
    def eval(self, *args: Any, **kwargs: Any) -> Result: ...

    def eval(self, *args: Any, **kwargs: Any) -> Result | Self:
        """The same as `evaluate`; without arguments, set the model to eval mode as `nn.Module.eval` does.

        With `inputs="first"`, ranks that are not given the batch call `eval()` to evaluate it; there, `train(False)`
        sets the mode.

        Args:
            *args: as in `evaluate`
            **kwargs: as in `evaluate`

        Returns:
            That of `evaluate`; without arguments, the Pipeline.
        """
        if args or kwargs or self._receives_batches:
            return self.evaluate(*args, **kwargs)
        return self.train(False)

    def forward(self, *args: Any, output_dims: OutputDims = None, **kwargs: Any) -> ForwardPass:
        """Run the forward of one whole batch in training mode; its outputs are on every rank.

        For losses that need the outputs of the whole batch, or outputs of several batches: compute the loss of
        `result.outputs` on every rank, and call `result.backward(gradients of the outputs)`, which runs the forward
        again. Every forward is a step of its own for random numbers. Every rank must make the same calls.

        Args:
            *args: positional arguments of the model
            output_dims: as in `step`
            **kwargs: keyword arguments of the model

        Returns:
            The outputs, the loss if the model returns one, and the method `backward`, which refuses weights that were
            changed since.

        Raises:
            RunError: with a `loss_fn`, `inputs="first"` or `staleness`, and as in `step`
        """
        refused = {
            "an asynchronous pipeline": self._staleness is not None,
            'inputs="first"': self._inputs != "all",
            "a loss_fn": self.has_loss_fn,
        }
        for name, is_given in refused.items():
            if is_given:
                error = RunError(f"forward does not combine with {name}", hint="pipe.step(...), or another Pipeline")
                self._refuse("forward", error)
        number = self.num_steps
        dims = self._merged_dims(output_dims)
        result, sizes = self._engine.forward(Batch(args, kwargs), number, dims)
        self.num_steps += 1
        graph = self.plan.graph
        used = {graph.tensor_of(name) for node in graph.nodes for name in node.parameters}
        parameters = {name: p for name, p in self._part.parameters.items() if graph.tensor_of(name) in used}
        versions = {name: parameter._version for name, parameter in parameters.items()}

        def run(gradients: dict[str, Tensor]) -> None:
            # Backward computes the forward again: with other weights the gradients would not be those of the outputs.
            changed = next((name for name, p in parameters.items() if p._version != versions[name]), None)
            if changed is not None:
                error = RunError(
                    "the weights must be those of the forward, and were changed since",
                    step=number,
                    parameter=changed,
                    hint="backward before optimizer.step(), or another pipe.forward after it",
                )
                self._sync.refuse(SyncRequest("step", number), error)
                raise error
            if self._loss_head.scaler is not None:
                self._loss_head.scaler.begin()
            if self._pull_back_engine is None:
                part = self._part
                weights = LossWeights(part.captured, part.replicas, pull_back, "sum")
                weights.checks_outputs = False  # the loss that a model returns is one of its outputs
                head = LossHead(part.captured, weights, self.plan.partition, self.scaler)
                self._pull_back_engine = Engine(
                    part, self.plan, self._sync, head, self._options, self._inputs, self._split
                )
            batch = Batch(args, kwargs, gradients)
            self._pull_back_engine.train(batch, number, keeps_outputs=False, is_timed=False)
            self._mark_model_stale()
            self._step_gradients.are_unscaled = False  # the gradients of the outputs may be scaled

        return ForwardPass(result, sizes, run)

    def drain(self) -> Trace | None:
        """Finish all batches in flight in an asynchronous pipeline, so that every result is known; a collective call.

        Returns the Trace of all steps since the last drain, if they were called with `record=True`. Any other pipeline
        has no batch in flight.
        """
        return self._engine.drain(self.num_steps) if isinstance(self._engine, AsyncEngine) else None

    def share(self, *args: Any, target: Any = None, budget_tokens: int | None = None, **kwargs: Any) -> Microbatch:
        """This replica's samples of a batch that all replicas have; the whole batch if there is one replica.

        Args:
            *args: positional arguments of the model, for the whole batch
            target: the target of the loss function, for the whole batch
            budget_tokens: that of the step: replicas get samples of about equally many padded tokens, instead of
                equally many samples in the order of the batch
            **kwargs: keyword arguments of the model

        Returns:
            An object with `args`, `kwargs` and `target`, for `step` and `evaluate`

        Raises:
            RunError: if there are fewer samples than replicas
        """
        groups, forward = self._part.groups, self._part.captured.model.forward
        if groups.num_replicas == 1:
            return Microbatch(args, kwargs, target, 0, {})  # nothing is split, so its size is not counted
        splitter, batch = BatchSplitter(forward, self._split, dict(self.plan.split)), Batch(args, kwargs, target)
        if budget_tokens is None:
            shares = splitter.split(batch, groups.num_replicas)
        else:
            shares = balanced_shares(splitter.whole(batch), budget_tokens, groups.num_replicas)
        if len(shares) < groups.num_replicas:
            raise RunError(
                "a batch must have at least one sample for every replica",
                samples=len(shares),
                replicas=groups.num_replicas,
                hint="larger batches, or fewer replicas",
            )
        return shares[groups.replica]

    def train(self, mode: bool = True) -> Self:
        """Set the modules of the model to training mode, or to eval mode, as `nn.Module.train` does.

        A new model is in training mode. `step` runs the model in its mode, `evaluate` in eval mode. Every rank must
        make the same call.

        Args:
            mode: False for eval mode

        Returns:
            The Pipeline.

        Raises:
            RunError: if `mode` is not a bool, or batches are in flight in an asynchronous pipeline
        """
        if not isinstance(mode, bool):
            hint = f"pipe.train() or pipe.train(False) for the mode; {_CALLS}"
            raise RunError("mode must be True or False", got=type(mode).__name__, hint=hint)
        self._check_drained()
        self._part.captured.model.train(mode)
        return self

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._part.captured.model.training

    # ----------------------------------------------------------------------------------------- gradients and parameters

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`. A collective call.

        Gradients that a scaler has scaled and not yet unscaled are measured without their scale.

        Args:
            max_norm: the largest norm allowed
            norm_type: the p of the p-norm; `float("inf")` for the largest entry

        Returns:
            The norm before scaling, the same on every rank.
        """
        if self._staleness is not None:
            raise RunError(
                "an asynchronous pipeline updates each stage by itself, so that the norm over all ranks is not known",
                hint="clipping inside the optimizer's step, for each stage",
            )
        limit, power = check_clipping(max_norm, norm_type)
        request = SyncRequest("clip_grad_norm_", self.num_steps, f"{limit:g}, {power:g}")
        scale = 1.0
        if self._loss_head.scaler is not None:
            try:
                scale = self._loss_head.scaler.scale_of(self.parameters())
            except RunError as error:
                self._sync.refuse(request, error)
                raise
        # A parameter that several ranks have is counted by one of them and scaled by all.
        gradients, copies = self._part.owned_gradients()
        norm = global_norm(self._sync, request, gradients, power, copies) / scale
        clip(self._part.gradients(), norm, limit)
        self._sync.operation_ended()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters, as `nn.Module.zero_grad` does.

        Args:
            set_to_none: False to set them to zero instead of None
        """
        for _, parameter in self.named_parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, tied ones once: for an optimizer.

        `pipe.clip_grad_norm_` clips by the norm over all ranks; torch's `clip_grad_norm_` sees only these parameters,
        and gives a warning once.
        """
        parameters = iter(self._part.parameters.values())
        return parameters if self._rank_parameters is None else WatchedParameters(parameters, self._rank_parameters)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their original names, tied ones once."""
        return iter(self._part.parameters.items())

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise an error, on every rank, if ranks have optimizers of different classes or hyperparameters.

        A collective call. `fit`, `save` and the Hugging Face trainer call it with the optimizer that they are given.
        Hyperparameters of single parameter groups are not compared, as each rank has other parameters.

        Args:
            optimizer: the optimizer of `pipe.parameters()`; None on a rank that has none

        Raises:
            RunError: with the hyperparameter and both ranks
        """
        agreement = None if optimizer is None else Agreement.of_optimizer(optimizer)
        self._sync.compare(SyncRequest("check_optimizer", self.num_steps), agreement)
        self._sync.operation_ended()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers by their original names."""
        self._check_drained()
        return self._part.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's weights from a state dict of the whole model or of this rank.

        Args:
            state: tensors by original name; those of other ranks are not loaded

        Raises:
            RunError: if a tensor of this rank is missing or has another shape
        """
        self._check_drained()
        self._part.load_state_dict(state)
        self._mark_model_stale()

    def full_state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """The whole model's parameters and buffers in host memory. A collective call.

        Args:
            everywhere: whether all ranks get it; otherwise rank 0 does, and the others get an empty dict

        Returns:
            Tensors by original name, for `model.load_state_dict`.
        """
        self.drain()
        request = SyncRequest("full_state_dict", self.num_steps, "everywhere=True" if everywhere else "")
        with self._sync.errors_on_all_ranks(request):
            own = self._part.state_dict()
            if not self._part.groups.is_local:
                check_structure(own)
        self._sync.exchange(request)
        state = gather_tensors(self._part.groups, own, self._part.device, bool(everywhere))
        self._sync.operation_ended()
        return self._part.with_shared_names(self._part.rows.join(state))

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def save(
        self,
        path: str | Path,
        optimizer: Any = None,
        extra: Any = None,
        *,
        scheduler: Any = None,
        position: Any = None,
        keep: int | None = None,
        asynchronous: bool = False,
        step: int | None = None,
    ) -> Path:
        """Write a checkpoint into `path/step-000100`. A collective call.

        The checkpoint holds weights, buffers and random generators, and the state of the scaler. An asynchronous
        pipeline is drained first, and saves its own optimizer.

        Args:
            path: the directory of checkpoints
            optimizer: its state is saved too
            extra: numbers, strings, lists, dicts and tensors to save; those of rank 0 are
            scheduler: a learning-rate scheduler, whose state is saved too
            position: the position in the data, of the same types as `extra`
            keep: the number of newest checkpoints that are kept; None: all
            asynchronous: copy the state and let a thread write it while training continues; an error is raised by the
                next step or save
            step: the number of the checkpoint, for loops in which an update takes several steps; None: the steps taken

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: if any rank cannot write its part
        """
        self.drain()
        optimizer = self._own_optimizer(optimizer)
        try:
            options = CheckpointOptions(path, keep=keep, asynchronous=asynchronous)
        except CheckpointError as error:
            self._refuse("save", error)
        self.check_optimizer(optimizer)
        scaler = self._loss_head.scaler
        scaler_state = None if scaler is None else scaler.state_dict()
        run = RunState(self.num_steps, position, extra, scaler_state, self._fit_progress)
        number = self.num_steps if step is None else step
        return self._saver.save(self.plan, number, optimizer, scheduler, run, options)

    def wait_for_save(self) -> None:
        """Wait for a running asynchronous save; its error is raised on every rank. A collective call."""
        self._saver.wait(self.num_steps)

    def load(
        self, path: str | Path, optimizer: Any = None, *, scheduler: Any = None, random_state: bool = True
    ) -> Loaded:
        """Load a checkpoint of any plan, or a model written by `save_pretrained`. A collective call.

        Each rank reads only its own tensors. A model that was on the meta device has its weights after this call.

        Args:
            path: a checkpoint, or a directory of checkpoints, of which the newest good one is loaded
            optimizer: its state is restored
            scheduler: a learning-rate scheduler, whose state is restored
            random_state: whether the random number generators of torch, numpy and Python are restored

        Returns:
            The step, and `extra` and `position` as they were saved.

        Raises:
            CheckpointError: if there is no checkpoint, or it belongs to another model
            DamagedError: if its files are truncated, missing or changed
        """
        self.drain()
        optimizer = self._own_optimizer(optimizer)
        self._saver.wait(self.num_steps)
        targets = LoadTargets(optimizer, scheduler, self._loss_head.scaler, bool(random_state))
        loaded = Loader(self._part, self._sync, self.plan).load(path, self.num_steps, targets)
        check_tied_weights(self.plan, self._part.tied, self._part.groups)
        if loaded.num_steps is not None:
            self.num_steps, self._fit_progress = loaded.num_steps, loaded.fit_progress
        self._mark_model_stale()
        return loaded

    # ------------------------------------------------------------------------------------------------------- properties

    @property
    def microbatches(self) -> int:
        """The number of microbatches per batch; may be changed between steps, on every rank."""
        return self.plan.num_microbatches

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        self._check_drained()
        self.plan = with_microbatches(self.plan, count)
        self._engine, self._pull_back_engine = self._make_engine(), None

    @property
    def has_loss_fn(self) -> bool:
        """Whether the loss is that of a `loss_fn`, and not returned by the model."""
        return self._loss_fn is not None

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler given to the constructor."""
        return self._loss_head.scaler

    @property
    def device(self) -> torch.device:
        """The device of this rank's stages."""
        return self._part.device

    @property
    def num_replicas(self) -> int:
        """The number of copies of the pipeline, which train on different samples."""
        return self._part.groups.num_replicas

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the first replica, which prints and logs."""
        return self._part.groups.is_first

    def largest(self, *values: float) -> tuple[float, ...]:
        """The maximum of each value over all ranks. A collective call.

        Args:
            *values: numbers, at most 4

        Returns:
            The maxima, the same on every rank.
        """
        if len(values) > MAX_REDUCED:
            hint = "several calls of largest"
            raise RunError(f"largest must be given at most {MAX_REDUCED} values", got=len(values), hint=hint)
        request = SyncRequest("largest", self.num_steps, str(len(values)))
        result = self._sync.exchange(request, SyncVote(maxes=tuple(map(float, values))))
        self._sync.operation_ended()
        return result.maxes[: len(values)]

    def describe(self) -> str:
        """The plan, the tensors that cross each cut, and this rank's stages and parameters, as text."""
        cuts = CutsView()((self.plan.graph, self.plan.partition))
        lines = [str(self.plan), "", cuts, ""]
        part, groups = self._part, self._part.groups
        position = "all ranks inside this process" if groups.is_local else f"rank {groups.rank} of {groups.num_ranks}"
        lines.append(f"{position}, stages {', '.join(map(str, part.stages))}, {len(part.parameters)} parameters")
        if groups.num_replicas > 1:
            lines.append(f"replica {groups.replica} of {groups.num_replicas}")
        if groups.num_tensor_ranks > 1:
            lines.append(f"tensor-parallel rank {groups.tensor_rank} of {groups.num_tensor_ranks}")
        for shared in part.tied.tied:
            ranks = ", ".join(map(str, shared.ranks))
            lines.append(f"{shared.name} is used on ranks {ranks}: its gradients are summed")
        for index, stage in part.stages.items():
            if note := stage.split_backward_note:
                lines.append(f"stage {index} does a full backward where the schedule splits it: {note}")
        lines.append(f"recordings of the model: {part.captured.num_recordings}")
        if self._loss_head.reduction:
            lines.append(f"reduction of the loss: {self._loss_head.reduction}")
        if self._staleness is not None:
            lines += ["", *staleness_lines(self.plan, self._staleness)]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------ checks of arguments and state

    def _checked_scale(self, scale: object) -> float:
        """Convert the scale to a number; raises an error, on every rank, if it is not finite or is ambiguous."""
        self._refuse_ambiguous("step", "scale")
        value = scale.item() if isinstance(scale, Tensor) and scale.numel() == 1 else scale
        if not is_finite(value):
            error = RunError("scale must be a finite number", got=shown(scale), hint="scale=1/n for n steps per update")
            self._refuse("step", error)
        return float(value)

    def _checked_options(
        self,
        call: str,
        target: object,
        return_outputs: object,
        output_dims: object,
        losses: object,
        budget_tokens: object,
    ) -> dict[str, int]:
        """Check the options that `step` and `evaluate` share; raises an error, on every rank, if one is not usable.

        Returns the token budget, if there is one, as an argument of the engine: an AsyncEngine does not take it.
        """
        if return_outputs:
            self._refuse_ambiguous(call, "return_outputs")
        if output_dims is not None:
            self._refuse_ambiguous(call, "output_dims")
        if losses is not None:
            self._refuse_ambiguous(call, "losses")
            if call == "step" and isinstance(self._engine, AsyncEngine):
                problem = "an asynchronous step ends before its losses are known"
                self._refuse(call, RunError(problem, hint="the losses of the result"))
            if not isinstance(losses, list):
                got = type(losses).__name__
                self._refuse(call, RunError("losses must be a list, which is filled", got=got, hint="losses=[]"))
        if self._has_split_loss:
            hint = "a plan with vocabulary_shards=None"
            if return_outputs:
                problem = "a split output layer has no whole logits to return as outputs"
                self._refuse(call, RunError(problem, hint=hint))
            if target is None and self._inputs == "all":
                problem = "a split output layer needs a target, because it computes the loss only"
                self._refuse(call, RunError(problem, hint=hint))
        if budget_tokens is None:
            return {}
        self._refuse_ambiguous(call, "budget_tokens")
        budget = as_int(budget_tokens)
        if budget is None or budget < 1:
            self._refuse(call, RunError("budget_tokens must be a whole number, 1 or more", got=shown(budget_tokens)))
        if return_outputs:
            problem = "budget_tokens does not combine with return_outputs: samples are reordered"
            self._refuse(call, RunError(problem, hint="return_outputs=False, or leave out budget_tokens"))
        if self._staleness is not None:
            self._refuse(
                call, RunError("budget_tokens does not combine with staleness", hint="leave out budget_tokens")
            )
        return {"budget_tokens": budget}

    def _refuse_ambiguous(self, call: str, name: str) -> None:
        """Raise an error, on every rank, if the model's forward also takes an option of `step` or `evaluate`."""
        forward = self._part.captured.model.forward
        parameters = inspect.signature(forward).parameters
        way = "another name for the argument of the model"
        if name in parameters:
            problem = "the model's forward has a parameter of that name"
            if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY:
                way = "pass it to the model by position"
        elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            # `kwargs["scale"]` and `kwargs.get("scale")` have the name as a constant of the function.
            constants = getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_consts", ())
            if name not in constants and all(value.name != name for value in self.plan.graph.inputs):
                return
            problem = "the model's forward takes it in its **kwargs"
        else:
            return
        hint = f"{way}; {name}= of step and evaluate is not usable with this model"
        self._refuse(call, RunError(f"{name} is ambiguous: {problem}", hint=hint))

    def _refuse(self, call: str, error: PenstockError) -> NoReturn:
        """Raise an error of the arguments of a call, on every rank."""
        self._sync.refuse(SyncRequest(call, self.num_steps), error)
        raise error

    def _check_drained(self) -> None:
        """Raise an error if batches are in flight: the ranks may not have made the same number of updates."""
        if isinstance(self._engine, AsyncEngine):
            self._engine.check_usable()
            if not self._engine.is_empty:
                raise RunError("batches are in flight in an asynchronous pipeline", hint="pipe.drain() before")

    def _merged_dims(self, given: OutputDims) -> OutputDims:
        """The `output_dims` of the constructor, with those given in a call in place of the same names."""
        if given is None:
            return self._output_dims
        check_output_dims(given)
        is_both = isinstance(given, Mapping) and isinstance(self._output_dims, Mapping)
        return {**self._output_dims, **given} if is_both else given

    def _own_optimizer(self, given: Any) -> Any:
        """The optimizer to save or load: that of an asynchronous pipeline, which no other may replace."""
        if self.optimizer is not None and given not in (None, self.optimizer):
            raise RunError(
                "optimizer must be that of the asynchronous pipeline", hint="leave out optimizer, or pipe.optimizer"
            )
        return given if self.optimizer is None else self.optimizer

    def _mark_model_stale(self) -> None:
        """Remember that the given model no longer has the weights that the ranks train."""
        if self._stale_weights is not None:
            self._stale_weights.is_stale = True


def _parallelize(parallelize_fn: Callable[..., Any] | None, mesh: Any) -> Callable[[nn.Module], Any] | None:
    """The user's parallelize_fn as a function of one stage; it is passed the mesh if it takes two arguments."""
    if parallelize_fn is None:
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(parallelize_fn).parameters.values()
    required = [
        parameter for parameter in parameters if parameter.kind in kinds and parameter.default is parameter.empty
    ]
    return parallelize_fn if len(required) < 2 else lambda stage: parallelize_fn(stage, mesh)


def _process_groups(plan: Plan, mesh: Any, local: bool, deadline_seconds: float) -> ProcessGroups:
    """The groups of this rank: of the mesh, of all processes, or with `local` none. A collective call."""
    if local:
        return ProcessGroups.local(plan.num_ranks)
    if not dist.is_available() or not dist.is_initialized():
        raise RunError(
            "torch.distributed is not initialised",
            hint="penstock.launch(fn, ranks), torchrun, or Pipeline(..., local=True)",
        )
    if mesh is not None:
        return ProcessGroups.of_mesh(mesh, plan.num_ranks, deadline_seconds)
    return ProcessGroups.of_world(plan.num_ranks, deadline_seconds)


def split_model(model: nn.Module, plan: Plan, loss_fn: LossFn | None) -> tuple[nn.Module, LossFn | None]:
    """The model with its output layer split as in the plan, and the loss function that is not part of it.

    The model and the loss function themselves if the plan does not split the output layer.
    """
    found = sharded_head(plan.graph)
    if found is None:
        return model, loss_fn
    head, num_shards = found
    takes_target = any(value.name == "target" for value in plan.graph.inputs)
    if takes_target != (loss_fn is not None or "target" in inspect.signature(model.forward).parameters):
        raise PlanError(
            "a plan that splits the output layer must be made with the loss_fn of the Pipeline",
            plan="with a loss_fn" if takes_target else "without a loss_fn",
            hint="loss_fn=..., as in the plan" if takes_target else "penstock.plan(..., loss_fn=..., target=...)",
        )
    if has_parameters(loss_fn):
        raise PlanError("the loss of a split output layer must not have parameters", hint="vocabulary_shards=None")
    try:
        return shard_vocabulary(model, head, num_shards, loss_fn), None
    except AttributeError:
        raise PlanError("the plan is for another model", module=head, hint="plan this model") from None
