"""PipelineTrainer: the Trainer of transformers, with steps, evaluation, clipping and saving run by a Pipeline."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from penstock.api.pipeline import Pipeline
from penstock.api.plan import plan as make_plan
from penstock.capture import GeneratorStates, python_generators, torch_generators
from penstock.errors import CheckpointError, NoLossError, PlanError, RunError
from penstock.hf.settings import check_arguments, check_options, check_process_group, check_settings
from penstock.hf.single_process import as_rank_zero, as_single_process, single_process_accelerate
from penstock.ir import Plan
from penstock.runtime import RunOptions

_LOGGER = logging.getLogger(__name__)
_PLAN_HINT = "plan=penstock.plan(model, kwargs=batch, ranks=..., microbatches=...)"


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose processes are the ranks of one pipeline; losses, gradients and metrics equal a single process.

    Every rank constructs it with the same arguments and calls the same methods. Without a `plan`, searches for one with
    the first training samples as the example batch. Batch sizes are those of the whole pipeline. `trainer.pipe` is the
    Pipeline; in `trainer.model`, only the stages of this rank are up to date.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_metrics: Callable[..., Any] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        callbacks: list[Any] | None = None,
        plan: Plan | None = None,
        ranks: int | None = None,
        microbatches: int | str = "auto",
        schedule: str = "auto",
        local: bool = False,
        options: RunOptions | None = None,
        depth: int | None = None,
        basic_blocks: Sequence[str | type] = (),
        **refused: object,
    ) -> None:
        """`local` runs all ranks inside this process; `options` are the run options of the Pipeline.

        `depth` and `basic_blocks` are those of `penstock.capture`: how deep modules are opened, and which stay whole.
        """
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(refused)
        check_settings(args)
        self._check_own_methods()
        options = options or RunOptions(seed=args.seed)
        check_options(options)
        self._is_local = local
        check_process_group(local, ranks, plan)
        single = as_single_process(args, local)
        if args.save_strategy != "no" and not args.save_only_model and single.should_save:
            _LOGGER.warning("checkpoints of a PipelineTrainer contain the model only: training cannot resume from them")
        super().__init__(
            model,
            single,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            callbacks=callbacks,
        )
        self.model.train()
        granularity: dict[str, Any] = {"depth": depth, "basic_blocks": basic_blocks}
        if plan is None:
            choices = {"microbatches": microbatches, "schedule": schedule, **granularity}
            plan = self._plan(ranks=ranks or dist.get_world_size(), **choices)
        self.pipe = Pipeline(self.model, plan, local=local, options=options, **granularity)
        self._pipeline_model = PipelineModel(self.pipe, self.model)

    def _check_own_methods(self) -> None:
        if type(self).compute_loss is not Trainer.compute_loss:
            raise RunError(
                "compute_loss must not be overridden: the last stage computes the loss",
                type=type(self).__name__,
                hint="a model whose forward computes its loss",
            )

    def _plan(self, **choices: Any) -> Plan:
        """Search for a plan with the first samples as the example batch."""
        with _preserve_random_state():
            is_training = self.train_dataset is not None
            loader = self.get_train_dataloader() if is_training else self.get_eval_dataloader()
            size = self.args.train_batch_size if is_training else self.args.eval_batch_size
            batch = _example_batch(loader, size)
            batch = self._with_items(
                self._prepare_inputs(batch), self._get_num_items_in_batch([batch], self.args.device)
            )
            return make_plan(self.model, kwargs=batch, **choices)

    # --------------------------------------------------------------------------- every rank appears as a single process

    def create_accelerator_and_postprocess(self) -> None:
        """Set up accelerate for one process, so that it neither shards batches nor gathers outputs."""
        with single_process_accelerate(self.args.device):
            super().create_accelerator_and_postprocess()

    def get_train_dataloader(self) -> Any:
        """The same batches on every rank."""
        with as_rank_zero(self.args):
            return super().get_train_dataloader()

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._pipeline_model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    # ----------------------------------------------------------------------------------------------------------- steps

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one batch on all ranks; returns the loss, divided as Trainer does."""
        model.train()
        loss = self.pipe.step(**self._with_items(self._prepare_inputs(inputs), num_items_in_batch)).loss
        if loss is None:
            raise NoLossError("the model returned no loss", inputs=", ".join(inputs), hint="labels in the batch")
        if not self._is_divided(num_items_in_batch):
            loss = loss / self.current_gradient_accumulation_steps
            self._divide_gradients()
        return loss.detach().to(self.args.device)

    def _with_items(self, inputs: dict[str, Any], num_items_in_batch: Any) -> dict[str, Any]:
        """Pass the number of tokens in all accumulated batches to a model that divides its loss by it."""
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            return inputs
        return {**inputs, "num_items_in_batch": num_items_in_batch}

    def _is_divided(self, num_items_in_batch: Any) -> bool:
        """Whether the model divides its loss by the tokens of all accumulated batches."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return bool(self.model_accepts_loss_kwargs) and num_items_in_batch is not None

    def _divide_gradients(self) -> None:
        """Divide once after the last accumulated batch, which equals dividing each batch's gradients."""
        if self.accelerator.sync_gradients and self.current_gradient_accumulation_steps > 1:
            for parameter in self.pipe.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.current_gradient_accumulation_steps)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Like Trainer; outputs are sent to all ranks only if they are needed."""
        self._pipeline_model.keeps_outputs = not prediction_loss_only
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------------------- optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer over this rank's parameters, with the parameter groups of the whole model."""
        return super().create_optimizer(self._pipeline_model)  # type: ignore[no-any-return]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Decay names of the whole model."""
        return super().get_decay_parameter_names(self.model)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------------- saving, loading

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; resuming is refused, because checkpoints have no optimizer state."""
        if resume_from_checkpoint:
            raise RunError(
                "a PipelineTrainer cannot resume: its checkpoints have no optimizer state",
                got=resume_from_checkpoint,
                hint="trainer.pipe.load(checkpoint) loads the model; then train() starts again",
            )
        return super().train(None, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model for `from_pretrained`. Collective: every rank calls it, rank 0 writes."""
        state = self.pipe.full_state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=self._deduplicate(state))
        if not self._is_local:
            dist.barrier()

    def _deduplicate(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give tied names the same tensor, as save_pretrained expects; drop duplicates for other models."""
        graph = self.pipe.plan.graph
        if isinstance(self.model, PreTrainedModel):
            return {name: state[graph.tensor_of(name)] for name in state}
        return {name: tensor for name, tensor in state.items() if graph.tensor_of(name) == name}

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        try:
            self.pipe.load(best)
        except CheckpointError:
            if not isinstance(self.model, PreTrainedModel):
                raise
            # Transformers renames some tensors when saving; from_pretrained reverts that.
            self.pipe.load_state_dict(type(self.model).from_pretrained(best, dtype=self.model.dtype).state_dict())


class PipelineModel(nn.Module):
    """The model that Trainer sees in place of its wrapped model.

    A call evaluates the batch on all ranks; `named_parameters` are this rank's, with the names of the whole model.
    """

    def __init__(self, pipe: Pipeline, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._pipe = (pipe,)  # in a tuple, so that nn.Module does not treat it as a submodule
        self.keeps_outputs = True
        """whether a call returns outputs besides the loss"""

    def forward(self, **inputs: Any) -> Any:
        """The outputs of the model for the whole batch, on every rank."""
        result = self._pipe[0].eval(**inputs, return_outputs=self.keeps_outputs)
        if result.outputs is None:
            return {"loss": result.loss}
        if not hasattr(result.outputs, "items"):
            return result.outputs if result.loss is None else (result.loss, *result.outputs[1:])
        outputs = {name: value for name, value in result.outputs.items() if name != "loss" and value is not None}
        return outputs if result.loss is None else {"loss": result.loss, **outputs}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters; a tied one by its first name, as in the whole model."""
        graph = self._pipe[0].plan.graph
        return ((graph.tensor_of(name), parameter) for name, parameter in self._pipe[0].named_parameters())


def _example_batch(loader: Any, batch_size: int) -> dict[str, Any]:
    """Collate the first samples without advancing the loader."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise PlanError("planning would consume samples of an iterable dataset", hint=_PLAN_HINT)
    if len(dataset) == 0:
        raise PlanError("the dataset is empty: there is no sample to plan with", hint=_PLAN_HINT)
    return dict(loader.collate_fn([dataset[index] for index in range(min(batch_size, len(dataset)))]))


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restore all random generators afterwards, so that planning does not change the training."""
    states = GeneratorStates([*python_generators(), *torch_generators(torch.cuda.is_initialized())])  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        states.restore()
