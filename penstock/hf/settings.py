"""Refuses versions of transformers and settings of Trainer that PipelineTrainer does not support.

transformers is not imported here before it is known to be installed.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from penstock.errors import RunError
from penstock.runtime import RunOptions

_LIBRARIES = ("transformers", "accelerate")
_METHODS = (
    "create_accelerator_and_postprocess",
    "training_step",
    "prediction_step",
    "create_optimizer",
    "get_decay_parameter_names",
    "save_model",
    "_wrap_model",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_load_best_model",
    "_move_model_to_device",
)
"""methods that PipelineTrainer overrides: a Trainer without one of them would silently train without the Pipeline"""
_PRECISION = "a model in that type: from_pretrained(..., dtype=torch.bfloat16)"
_NO_HUB = "save_model(directory), and upload the directory"
_UNSUPPORTED = {
    "deepspeed": "leave it out: the pipeline distributes the model",
    "fsdp": "penstock.Pipeline(..., mesh=mesh, parallelize_fn=fully_shard) in a loop of your own",
    "parallelism_config": "leave it out: all ranks belong to the pipeline",
    "fp16": "penstock.Pipeline(..., scaler=penstock.GradScaler()) in a loop of your own, or bfloat16",
    "bf16": _PRECISION,
    "fp16_full_eval": _PRECISION,
    "bf16_full_eval": _PRECISION,
    "torch_compile": "leave it out: stages run eagerly",
    "gradient_checkpointing": 'plan=penstock.plan(..., recompute="full")',
    "label_smoothing_factor": "a model whose forward computes its loss",
    "neftune_noise_alpha": "leave it out",
    "use_liger_kernel": "leave it out",
    "auto_find_batch_size": 'plan=penstock.plan(..., memory="8GiB", microbatches="auto")',
    "torch_empty_cache_steps": "leave it out",
    "enable_jit_checkpoint": "save_steps",
    "push_to_hub": _NO_HUB,
    "save_on_each_node": "leave it out: rank 0 saves the whole model",
    "debug": "leave it out: NaN and Inf are reported with their stage",
}
"""settings of TrainingArguments that must be off, with an alternative"""
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")
"""optimizers that update each parameter by itself, so that a rank needs no parameter of another"""
_REFUSED = {
    "model_init": "model=model_init()",
    "compute_loss_func": "a model whose forward computes its loss, or penstock.Pipeline(..., loss_fn=...)",
    "optimizers": "optim= and lr_scheduler_type= of TrainingArguments: each rank creates its own over its parameters",
    "optimizer_cls_and_kwargs": "optim= and optim_args= of TrainingArguments",
}


def check_installed() -> None:
    """Refuse a missing library or an incompatible Trainer."""
    for name in _LIBRARIES:
        if find_spec(name) is None:
            raise RunError(f"penstock.hf needs {name}, which is not installed", hint='pip install "penstock[hf]"')
    trainer = import_module("transformers").Trainer
    lacking = [name for name in _METHODS if not hasattr(trainer, name)]
    if lacking:
        raise RunError(
            "this version of transformers is not supported by penstock.hf",
            installed=version("transformers"),
            lacks=lacking[0],
            hint='pip install "transformers>=5.22"',
        )


def check_settings(args: Any) -> None:
    """Refuse settings that would have no effect or a wrong one."""
    for name, hint in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise RunError(f"PipelineTrainer does not support {name}", got=repr(getattr(args, name)), hint=hint)
    optim = getattr(args.optim, "value", args.optim)
    if optim not in _OPTIMIZERS:
        hint = ", ".join(_OPTIMIZERS)
        raise RunError("PipelineTrainer does not support this optimizer", optim=repr(optim), hint=hint)


def check_arguments(others: dict[str, object]) -> None:
    """Refuse unknown arguments, and arguments of Trainer that PipelineTrainer does not take."""
    for name, value in others.items():
        if name not in _REFUSED:
            raise RunError("PipelineTrainer has no such argument", name=name)
        if value not in (None, (None, None)):
            raise RunError(f"PipelineTrainer does not take {name}", hint=_REFUSED[name])


def check_process_group(local: bool, ranks: int | None, plan: object) -> None:
    """Refuse to run without ranks."""
    if local and ranks is None and plan is None:
        raise RunError("local=True needs the number of ranks", hint="ranks=2, or plan=")
    if not local and not (dist.is_available() and dist.is_initialized()):
        hint = "penstock.launch(fn, ranks), torchrun, or PipelineTrainer(..., local=True)"
        raise RunError("torch.distributed is not initialised", hint=hint)


def check_options(options: RunOptions) -> None:
    """Refuse to skip non-finite steps: Trainer would call the optimizer all the same."""
    if options.nonfinite == "skip":
        raise RunError(
            'PipelineTrainer cannot skip a step: nonfinite="skip"', hint='nonfinite="raise", or "ignore" to continue'
        )
