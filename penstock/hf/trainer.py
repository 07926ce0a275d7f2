"""PipelineTrainer: the Trainer of transformers, with steps, evaluation, clipping and saving run by a Pipeline."""

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from penstock.api.pipeline import Pipeline
from penstock.api.plan import plan as make_plan
from penstock.batches import Batch, BatchSplitter
from penstock.capture import GeneratorStates, Granularity, sharded_head
from penstock.errors import CheckpointError, NoLossError, PlanError, RunError
from penstock.hf.model import PipelineModel
from penstock.hf.optimizers import AmpScaler, check_optimizer_class, keep_own_parameters
from penstock.hf.settings import check_options, check_plan_choices, check_ranks, check_settings, out_of_memory
from penstock.hf.single_process import as_rank_zero, as_single_process, single_process_accelerate
from penstock.ir import Plan
from penstock.runtime import PIPELINE, REPLICAS, RunOptions, balanced_shares

_STATE = "pipeline"
"""the directory in a checkpoint that holds the state of the training"""
_PLAN_HINT = "plan=penstock.plan(model, kwargs=batch, ranks=..., microbatches=...)"


class PipelineMixin:
    """Makes a Trainer class train on a pipeline: `class PipelineSFTTrainer(PipelineMixin, SFTTrainer)`.

    Every rank constructs the trainer with the same arguments and calls the same methods. All arguments of the Trainer
    class are taken; those of the pipeline are described at `__init__`. Batch sizes are those of the whole pipeline.
    `trainer.pipe` is the Pipeline; in `trainer.model`, only the stages of this rank are up to date.
    """

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """An instance of a subclass that ends with PipelineBase, for a class that does not."""
        return super().__new__(cls if issubclass(cls, PipelineBase) else _make_class(cls.__name__, cls))

    def __init__(
        self,
        *given: Any,
        plan: Plan | None = None,
        ranks: int | None = None,
        microbatches: int | str = "auto",
        schedule: str = "auto",
        replicas: int = 1,
        local: bool = False,
        options: RunOptions | None = None,
        budget_tokens: int | None = None,
        depth: int | None = None,
        basic_blocks: Sequence[str | type] = (),
        **named: Any,
    ) -> None:
        """Construct the trainer and its pipeline; every rank makes the same call.

        Args:
            *given: arguments of the Trainer class
            plan: of the pipeline; None: searched for, with the first training samples as the example batch (those of a
                copy of an iterable dataset)
            ranks: of a pipeline; None: those of the plan, or all processes divided by `replicas`
            microbatches: as in `penstock.plan`; with a `plan`, "auto" or the number in it
            schedule: as in `penstock.plan`; with a `plan`, "auto" or the name in it
            replicas: number of copies of the pipeline, each with a share of every batch
            local: run all ranks inside this process
            options: run options of the Pipeline
            budget_tokens: in training, group the samples of a batch by length into microbatches of at most N
                padded tokens, as in `Pipeline.step`; None: the microbatches of the plan
            depth: how deep modules are opened, as in `penstock.capture`
            basic_blocks: modules that stay whole, as in `penstock.capture`
            **named: arguments of the Trainer class

        Raises:
            RunError: for settings that a pipeline cannot follow, and for ranks that do not fit the processes
            PlanError: if no plan was given, and the data to search for one with cannot be copied or is empty
        """
        args = self._find_arguments(given, named)
        check_settings(args)
        options = options or RunOptions(seed=args.seed)
        check_options(options)
        ranks = check_ranks(local, ranks, plan, replicas)
        check_plan_choices(plan, microbatches, schedule)
        check_optimizer_class(*named.get("optimizer_cls_and_kwargs") or (None,))
        self._is_local, self._replicas = local, replicas
        self._budget = {} if budget_tokens is None else {"budget_tokens": budget_tokens}
        self._is_predicting = False
        self._pipe: Pipeline | None = None
        single = as_single_process(args, local, replicas)
        if len(given) > 1:
            given = (given[0], single, *given[2:])
        else:
            named["args"] = single
        self._scaler = AmpScaler() if args.fp16 else None
        super().__init__(*given, **named)
        granularity: dict[str, Any] = {"depth": depth, "basic_blocks": basic_blocks}
        self._granularity, self._mesh = Granularity(**granularity), None
        if replicas > 1:
            self._mesh = init_device_mesh(args.device.type, (replicas, ranks), mesh_dim_names=(REPLICAS, PIPELINE))
        self._pipe_options = {"local": local, "options": options, "scaler": self._scaler, "mesh": self._mesh}
        self._pipe_options |= granularity
        self._prepare_model()
        self._choices = {"ranks": ranks, "microbatches": microbatches, "schedule": schedule, **granularity}
        if plan is not None:
            self._build_pipe(plan)
        elif self.train_dataset is not None:
            self._build_pipe(self._plan(self._example(self.get_train_dataloader, self.args.train_batch_size)))
        elif self.eval_dataset is not None:
            name = [next(iter(self.eval_dataset))] if isinstance(self.eval_dataset, dict) else []
            loader = partial(self.get_eval_dataloader, *name)
            self._build_pipe(self._plan(self._example(loader, self.args.eval_batch_size)))

    def _find_arguments(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The TrainingArguments among the arguments of the Trainer class; the default ones if they are not given."""
        args = given[1] if len(given) > 1 else named.get("args")
        if args is None:
            parameter = inspect.signature(super().__init__).parameters.get("args")
            annotation = "" if parameter is None else str(parameter.annotation)
            if "Config" in annotation:  # such as SFTConfig, whose defaults TRL computes inside its constructor
                raise RunError(f"{type(self).__name__} needs args", hint=f"args={annotation.split(' ')[0]}(...)")
            args = TrainingArguments(output_dir="tmp_trainer")
        return args

    def _prepare_model(self) -> None:
        """Apply the settings that change how the model computes, so that the plan and recordings include them."""
        self.model.train()
        if self.args.gradient_checkpointing:
            settings = dict(self.args.gradient_checkpointing_kwargs or {})
            own = {name: settings.pop(name) for name in ("every_n_layers", "offload") if name in settings}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings or None, **own)
        if self.args.torch_compile:
            # Compiled as a whole, the model could not be cut.
            blocks = self._granularity.find_blocks(self.model)
            for block in blocks.values():
                block.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)

    @property
    def pipe(self) -> Pipeline:
        """The Pipeline; a trainer without plan and data has it from its first evaluation on."""
        if self._pipe is None:
            raise PlanError("there is no plan, and no data to search for one with", hint=_PLAN_HINT)
        return self._pipe

    def _build_pipe(self, plan: Plan) -> None:
        self._pipe = Pipeline(self.model, plan, **self._pipe_options)
        dtype = torch.float16 if self.args.fp16 else torch.bfloat16 if self.args.bf16 else None
        self._pipeline_model = PipelineModel(self.pipe, self.model, self.args.device.type, dtype)
        if self.optimizer is not None:
            keep_own_parameters(self.optimizer, self.model, self.pipe)

    def _has_own_loss(self) -> bool:
        """Whether the loss is computed from the outputs of the model, instead of being one of them."""
        is_overridden = getattr(type(self), "compute_loss") is not Trainer.compute_loss  # noqa: B009
        return is_overridden or self.label_smoother is not None or self.compute_loss_func is not None

    def _example(self, get_loader: Callable[[], Any], batch_size: int) -> Callable[[], dict[str, Any]]:
        return lambda: _example_batch(get_loader(), batch_size // self._replicas)

    def _plan(self, get_batch: Callable[[], dict[str, Any]]) -> Plan:
        """Search for a plan with the batch that `get_batch` returns; the random state of the training is preserved."""
        with GeneratorStates.of_process():
            batch = get_batch()
            inputs = self._prepare_inputs(batch)
            items = self._get_num_items_in_batch([batch], self.args.device)
            args: tuple[Any, ...] = ()
            if self._has_own_loss():
                args, inputs = self._first_call(inputs, items)
            else:
                inputs = self._with_items(inputs, items)
            return make_plan(self.model, args=args, kwargs=inputs, **self._choices)

    def _first_call(self, inputs: dict[str, Any], items: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which `compute_loss` calls the model first."""
        model = _FirstCall(self.model)
        try:
            self.compute_loss(model, dict(inputs), num_items_in_batch=items)
        except _ModelCalled as called:
            return called.arguments
        raise RunError("compute_loss does not call the model that it is given", type=type(self).__name__)

    # --------------------------------------------------------------------------- every rank appears as a single process

    def create_accelerator_and_postprocess(self) -> None:
        """Set up accelerate for one process, so that it neither shards batches nor gathers outputs."""
        with single_process_accelerate(self.args):
            super().create_accelerator_and_postprocess()
        # The optimizer that accelerate prepares steps with this scaler.
        self.accelerator.scaler = self._scaler
        # Trainer clips through the accelerator: the norm is that of all ranks.
        self.accelerator.clip_grad_norm_ = lambda _, max_norm, *__: self.pipe.clip_grad_norm_(max_norm)
        # An overridden training_step may compute its loss and call this.
        self.accelerator.backward = lambda loss, **kwargs: self._backward(
            loss / self.accelerator.gradient_accumulation_steps, **kwargs
        )

    def get_train_dataloader(self) -> Any:
        """The same batches on every rank."""
        with as_rank_zero(self.args):
            return super().get_train_dataloader()

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        self._follow_model()
        return self._pipeline_model

    def _follow_model(self) -> None:
        """Build the pipeline again if `model_init` has made another model."""
        plan = self.pipe.plan
        if self._pipeline_model.model is not self.model:
            self._prepare_model()
            self._build_pipe(plan)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    # ----------------------------------------------------------------------------------------------------------- steps

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of one batch on all ranks, inside the `training_step` of the Trainer class if any.

        Args:
            model: given by Trainer
            inputs: the batch of the whole pipeline, of all replicas
            num_items_in_batch: number of tokens in all accumulated batches, counted by Trainer

        Returns:
            The loss, divided as Trainer does.

        Raises:
            RunError: if an overridden `training_step` runs no backward through the pipeline
        """
        model = self._pipelined(model, inputs)
        self._pipeline_model.drop_calls()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._pipeline_model.has_calls:
            raise RunError(
                "training_step must run backward for every call of the model, or call it without gradients",
                type=type(self).__name__,
                hint="self.accelerator.backward(loss) in place of loss.backward(), or torch.no_grad()",
            )
        return loss

    def _pipelined(self, model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
        """The model on the pipeline if the model itself is given, which has no pipeline before the first batch."""
        if self._pipe is None:
            self._build_pipe(self._plan(lambda: inputs))
        return self._pipeline_model if model is self.model else model

    def _own_samples(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """This replica's samples; all of them if there are fewer samples than replicas."""
        if self._mesh is None:
            return inputs
        planned = None if self._pipe is None else dict(self.pipe.plan.split)
        splitter, batch = BatchSplitter(self.model.forward, planned=planned), Batch((), inputs)
        if self._budget and not self._is_predicting:
            shares = balanced_shares(splitter.whole(batch), self._budget["budget_tokens"], self._replicas)
        else:
            shares = list(splitter.split(batch, self._replicas))
        return inputs if len(shares) < self._replicas else shares[self._mesh.get_local_rank(REPLICAS)].kwargs

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The tokens of all replicas, or with `average_tokens_across_devices=False` those of this replica.

        In an evaluation, every replica computes the whole batch.
        """
        if not self._is_predicting and not self.args.average_tokens_across_devices:
            batch_samples = [self._own_samples(batch) for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)

    def _step(self, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """Run forward and backward of this replica's samples; returns the loss."""
        if self._has_own_loss():
            if self._budget:
                hint = "a model that returns its loss, without compute_loss, compute_loss_func or label smoothing"
                raise RunError("budget_tokens needs a model that returns its loss: outputs are not kept", hint=hint)
            return self._step_of_own_loss(inputs, num_items_in_batch)
        scale = {} if self._is_divided(num_items_in_batch) else {"scale": 1 / self.current_gradient_accumulation_steps}
        with self._pipeline_model.autocast():
            loss = self.pipe.step(**self._with_items(inputs, num_items_in_batch), **scale, **self._budget).loss
        if loss is None:
            raise NoLossError("the model returned no loss", inputs=", ".join(inputs), hint="labels in the batch")
        return loss.detach().to(self.args.device)

    def _step_of_own_loss(self, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        """Compute the loss from the outputs of the whole batch, on every rank, and run backward from these."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self._pipeline_model, inputs, num_items_in_batch=num_items_in_batch)
        if not self._is_divided(num_items_in_batch):
            loss = loss / self.current_gradient_accumulation_steps
        self._backward(loss)
        loss = loss.detach().to(self.args.device)
        if self._mesh is not None:
            dist.all_reduce(loss, group=self._mesh.get_group(REPLICAS))
            loss /= self._replicas
        return loss

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward of a loss that was computed from outputs of the model."""
        self._check_loss(loss)
        loss.backward(**kwargs)
        self._pipeline_model.backward()

    def _check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that uses parameters otherwise than by a call of the model: a rank has only its own stages."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in found:
                continue
            found.add(node)
            if id(getattr(node, "variable", None)) in names:
                raise RunError(
                    "compute_loss uses a parameter outside of the model's forward: other ranks do not have its value",
                    parameter=names[id(node.variable)],
                    hint="a model whose forward returns what the loss needs, or weight_decay",
                )
            todo += [parent for parent, _ in node.next_functions]

    def _with_items(self, inputs: dict[str, Any], num_items_in_batch: Any) -> dict[str, Any]:
        """Pass the number of tokens in all accumulated batches to a model that divides its loss by it."""
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            return inputs
        return {**inputs, "num_items_in_batch": num_items_in_batch}

    def _is_divided(self, num_items_in_batch: Any) -> bool:
        """Whether the loss is already divided by the tokens of all accumulated batches."""
        if getattr(self, "loss_is_scaled_for_ga", None) is not None:
            return bool(self.loss_is_scaled_for_ga)
        is_counted = bool(self.model_accepts_loss_kwargs) and num_items_in_batch is not None
        return is_counted or self.compute_loss_func is not None

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate one batch like Trainer; outputs are sent to all ranks only if they are needed.

        Args:
            model: given by Trainer
            inputs: the batch
            prediction_loss_only: whether outputs and labels are left out of the result
            ignore_keys: names of outputs to leave out

        Returns:
            Loss, outputs and labels.
        """
        model = self._pipelined(model, inputs)
        if not prediction_loss_only and sharded_head(self.pipe.plan.graph) is not None:
            hint = "prediction_loss_only=True without compute_metrics, or a plan with vocabulary_shards=None"
            raise RunError("a split output layer has no whole logits to predict or to compute metrics of", hint=hint)
        # An overridden prediction_step may use outputs although it returns none.
        is_overridden = not super().prediction_step.__module__.startswith("transformers.")
        self._pipeline_model.keeps_outputs = not prediction_loss_only or is_overridden or self._has_own_loss()
        self._is_predicting = True
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._is_predicting = False

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Like Trainer; outside of training, the model is converted if evaluation is to be in float16 or bfloat16."""
        if self._pipe is None:
            self._build_pipe(self._plan(self._example(lambda: dataloader, self.args.eval_batch_size)))
        dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16 if self.args.bf16_full_eval else None
        if dtype is not None and not self.is_in_train:
            # In place: the pipeline refuses tensors in place of those that it was built with.
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    # ------------------------------------------------------------------------------------------------------- optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer over this rank's parameters, with the parameter groups of the whole model.

        Args:
            model: not used: the parameters are those of the pipeline

        Returns:
            The optimizer.
        """
        if self._pipe is not None:
            self._follow_model()
        # Before there is a pipeline, the optimizer has all parameters; `_build_pipe` then restricts it.
        own = self.model if self._pipe is None else self._pipeline_model
        if inspect.signature(super().create_optimizer).parameters:
            super().create_optimizer(own)
        else:  # transformers 4 takes the parameters of self.model
            whole, self.model = self.model, own
            try:
                super().create_optimizer()
            finally:
                self.model = whole
        if self._scaler is not None:
            # Transformers 4 leaves the optimizer of a wrapped model as it is, which would not unscale gradients.
            self.optimizer = self.accelerator.prepare(self.optimizer)
        if self._pipe is not None:
            self.pipe.check_optimizer(self.optimizer)
        return self.optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Decay names of the whole model."""
        whole = model if self._pipe is None else self._pipeline_model.model
        return super().get_decay_parameter_names(whole)

    # ------------------------------------------------------------------------------------------------- saving, loading

    def _deduplicate(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give tied names the same tensor, as save_pretrained expects; drop duplicates for other models."""
        graph = self.pipe.plan.graph
        if isinstance(self.model, PreTrainedModel):
            return {name: state[graph.tensor_of(name)] for name in state}
        return {name: tensor for name, tensor in state.items() if graph.tensor_of(name) == name}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of the training besides the model files, which from_pretrained reads."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self.pipe.save(Path(output_dir) / _STATE, optimizer, scheduler=self.lr_scheduler)

    def _save_scaler(self, output_dir: str) -> None:
        """Already saved by the pipeline."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Already saved by the pipeline."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not Path(resume_from_checkpoint).is_dir():
            hint = "resume_from_checkpoint=True for the newest one in output_dir"
            raise CheckpointError(f"Can't find a valid checkpoint at {resume_from_checkpoint}", hint=hint)
        self._follow_model()
        self._resumed_random: GeneratorStates | None = None
        if not (Path(resume_from_checkpoint) / _STATE).is_dir():
            if (Path(resume_from_checkpoint) / "optimizer.pt").exists():
                raise CheckpointError(
                    "this checkpoint was written by a Trainer in one process: its optimizer cannot be distributed",
                    path=resume_from_checkpoint,
                    hint="trainer.pipe.load(checkpoint) loads the model; then train() starts again",
                )
            self._load_model(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (state := Path(checkpoint) / _STATE).is_dir():
            return
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        with GeneratorStates.of_process():
            self.pipe.load(state, optimizer, scheduler=self.lr_scheduler)
            self._resumed_random = GeneratorStates.of_process()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Already loaded by the pipeline."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # Trainer calls this when it has skipped the batches that the saved run had used.
        if checkpoint is not None and self._resumed_random is not None:
            self._resumed_random.restore()

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / "adapter_config.json").exists():
            super()._load_best_model()
        else:
            self._load_model(str(best))

    def _load_model(self, directory: str) -> None:
        """Load the model of a directory for from_pretrained."""
        if (Path(directory) / "adapter_config.json").exists():
            super()._load_from_checkpoint(directory)
            return
        try:
            self.pipe.load(directory)
        except CheckpointError:
            if not isinstance(self.model, PreTrainedModel):
                raise
            # Transformers renames some tensors when saving; from_pretrained reverts that.
            self.pipe.load_state_dict(type(self.model).from_pretrained(directory, dtype=self.model.dtype).state_dict())


class PipelineBase(Trainer):
    """The methods that replace those of Trainer, after the Trainer class in the order of methods.

    A subclass of Trainer may override them, and its overrides call these as `super()`. Those of PipelineMixin come
    before the Trainer class, and would replace its overrides.
    """

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """See `PipelineMixin.training_step`."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        own = self._own_samples(inputs)
        if own is not inputs and num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # Replicas average their gradients, so each divides by its share of the tokens.
            num_items_in_batch = num_items_in_batch / self._replicas
        try:
            return self._step(own, num_items_in_batch)
        except RunError as error:
            if self.args.auto_find_batch_size and (reason := out_of_memory(error)):
                # All ranks raise an error of a step, so all of them try the next batch size.
                raise RuntimeError(reason) from error
            raise

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model for `from_pretrained`. Collective: every rank calls it, rank 0 writes.

        Args:
            output_dir: the directory; None: that of the training arguments
            _internal_call: given by Trainer, and not used
        """
        # Without a pipeline, the model is as it was given.
        state = None if self._pipe is None else self._deduplicate(self.pipe.full_state_dict())
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if not self._is_local:
            dist.barrier()


class PipelineTrainer(PipelineMixin, PipelineBase):
    """A Trainer whose processes are the ranks of one pipeline; losses, gradients and metrics equal a single process.

    See `PipelineMixin`, which does the same for subclasses of Trainer.
    """


@cache
def pipelined(trainer: type) -> type:
    """The given Trainer class on a pipeline: `pipelined(SFTTrainer)(model, args, ..., microbatches=4)`.

    Args:
        trainer: a subclass of transformers.Trainer

    Returns:
        A subclass of PipelineMixin and `trainer`, the same in every call.

    Raises:
        RunError: if `trainer` is another class
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        hint = "penstock.hf.pipelined(transformers.Seq2SeqTrainer)"
        raise RunError("trainer must be a subclass of transformers.Trainer", got=repr(trainer), hint=hint)
    if issubclass(trainer, PipelineMixin):
        return trainer
    others = () if trainer is Trainer else (trainer,)
    return _make_class(f"Pipeline{trainer.__name__}", PipelineMixin, *others)


@cache
def _make_class(name: str, *bases: type) -> type:
    """A subclass of `bases` and of PipelineBase; the same in every call."""
    while name in globals():
        name += "_"
    # Found by its name in this module, the class can be pickled, which datasets does with functions that refer to it.
    made = type(name, (*bases, PipelineBase), {"__module__": __name__, "__qualname__": name})
    return globals().setdefault(name, made)


class _ModelCalled(Exception):  # noqa: N818  (not an error: it ends a call of compute_loss at its first model call)
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


class _FirstCall(nn.Module):
    """Ends `compute_loss` at its first call of the model, for the arguments of that call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _ModelCalled(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def _example_batch(loader: Any, batch_size: int) -> dict[str, Any]:
    """Collate the first samples without advancing the loader: of an iterable dataset, those of a copy."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None:  # a loader of the user's own
        batches = list(islice(_deep_copy(loader), 1))
        return dict(batches[0] if batches else _no_samples())
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        samples = list(islice(_deep_copy(dataset), batch_size))
    else:
        samples = [dataset[index] for index in range(min(batch_size, len(dataset)))]
    return dict(loader.collate_fn(samples or _no_samples()))


def _no_samples() -> NoReturn:
    raise PlanError("the dataset is empty: there is no sample to plan with", hint=_PLAN_HINT)


def _deep_copy(data: Any) -> Any:
    try:
        return copy.deepcopy(data)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        problem = "planning would consume samples of this data, which cannot be copied"
        raise PlanError(problem, data=type(data).__name__, reason=reason, hint=_PLAN_HINT) from error
