"""PipelineTrainer: the Trainer of transformers, whose steps, evaluations, clipping and saving run on a Pipeline."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from penstock.api.pipeline import Pipeline
from penstock.api.plans import plan as planned
from penstock.errors import CheckpointError, RunError
from penstock.hf.arguments import check_arguments, check_options, check_place, check_settings
from penstock.hf.example import example_of, unnoticed
from penstock.hf.piped_model import PipedModel
from penstock.hf.seat import alone, first, seated
from penstock.ir import Plan
from penstock.runtime import RunOptions

_LOGGER = logging.getLogger(__name__)


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose processes are the ranks of one pipeline: losses, gradients and metrics are those of one process.

    Every rank makes the same one and calls the same methods. Without a `plan` one is searched for, for a batch of the
    first training samples. Batch sizes are those of the pipeline as a whole. `trainer.pipe` is the Pipeline; of
    `trainer.model` a rank has only its own stages up to date.
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
        **refused: object,
    ) -> None:
        """`local` runs all ranks of the plan inside this process; `options` are those of a Pipeline."""
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(refused)
        check_settings(args)
        self._check_own_methods()
        options = options or RunOptions(seed=args.seed)
        check_options(options)
        self._is_local = local
        check_place(local, ranks, plan)
        own = seated(args, local)
        if args.save_strategy != "no" and not args.save_only_model and own.should_save:
            _LOGGER.warning(
                "checkpoints of a PipelineTrainer hold the model only: training cannot be resumed from them"
            )
        super().__init__(
            model,
            own,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            callbacks=callbacks,
        )
        self.model.train()
        if plan is None:
            plan = self._plan(ranks or dist.get_world_size(), microbatches, schedule)
        self.pipe = Pipeline(self.model, plan, local=local, options=options)
        self._piped = PipedModel(self.pipe, self.model)

    def _check_own_methods(self) -> None:
        if type(self).compute_loss is not Trainer.compute_loss:
            raise RunError(
                "compute_loss is not called: the loss is made in the last stage",
                type=type(self).__name__,
                hint="a model whose forward computes its loss",
            )

    def _plan(self, ranks: int, microbatches: int | str, schedule: str) -> Plan:
        """A plan for batches like the first one."""
        with unnoticed():
            is_training = self.train_dataset is not None
            loader = self.get_train_dataloader() if is_training else self.get_eval_dataloader()
            size = self.args.train_batch_size if is_training else self.args.eval_batch_size
            batch = example_of(loader, size)
            batch = self._with_items(
                self._prepare_inputs(batch), self._get_num_items_in_batch([batch], self.args.device)
            )
            return planned(self.model, kwargs=batch, ranks=ranks, microbatches=microbatches, schedule=schedule)

    # ------------------------------------------------------------------------------------------ one process to Trainer

    def create_accelerator_and_postprocess(self) -> None:
        """As for one process: accelerate neither shares batches out nor gathers what every rank has."""
        with alone(self.args.device):
            super().create_accelerator_and_postprocess()

    def get_train_dataloader(self) -> Any:
        """The same batches on every rank."""
        with first(self.args):
            return super().get_train_dataloader()

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._piped

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    # ----------------------------------------------------------------------------------------------------------- steps

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one batch by all ranks; the loss of all of it, divided as Trainer divides."""
        model.train()
        loss = self.pipe.step(**self._with_items(self._prepare_inputs(inputs), num_items_in_batch)).loss
        if loss is None:
            raise RunError("the model returned no loss", given=", ".join(inputs), hint="labels in the batch")
        if not self._is_divided(num_items_in_batch):
            loss = loss / self.current_gradient_accumulation_steps
            self._divide_gradients()
        return loss.detach().to(self.args.device)

    def _with_items(self, inputs: dict[str, Any], num_items_in_batch: Any) -> dict[str, Any]:
        """A model that can is told by how many tokens, of all batches that accumulate, its loss is to be divided."""
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            return inputs
        return {**inputs, "num_items_in_batch": num_items_in_batch}

    def _is_divided(self, num_items_in_batch: Any) -> bool:
        """Whether the loss is that of all batches that accumulate, and not the mean of one."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return bool(self.model_accepts_loss_kwargs) and num_items_in_batch is not None

    def _divide_gradients(self) -> None:
        """Once all batches have accumulated, which is the same as each by itself."""
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
        """As Trainer does it, with outputs sent to all ranks only if somebody asks for them."""
        self._piped.keeps_outputs = not prediction_loss_only
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------------------- optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Over this rank's parameters, in the groups that they would have in the whole model."""
        return super().create_optimizer(self._piped)  # type: ignore[no-any-return]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Those of the whole model."""
        return super().get_decay_parameter_names(self.model)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------------- saving, loading

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer does it; there is nothing to resume from."""
        if resume_from_checkpoint:
            raise RunError(
                "a PipelineTrainer cannot resume: its checkpoints hold the model, and not the state of the optimizers",
                given=resume_from_checkpoint,
                hint="trainer.pipe.load(checkpoint) takes over the model; then train() begins anew",
            )
        return super().train(None, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model for `from_pretrained`; called on every rank, of which the first writes."""
        state = self.pipe.full_state_dict()
        if self.args.should_save:
            self._save(output_dir, state_dict=self._tied(state))
        if not self._is_local:
            dist.barrier()

    def _tied(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Names of one parameter have one tensor, as transformers expects it, or are left out."""
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
            # Transformers writes some tensors under other names than the model has, and knows how to undo that.
            self.pipe.load_state_dict(type(self.model).from_pretrained(best, dtype=self.model.dtype).state_dict())
