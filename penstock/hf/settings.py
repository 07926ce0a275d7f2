"""Refuses versions of transformers and settings of Trainer that PipelineTrainer does not support.

transformers is not imported here before it is known to be installed.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from penstock.errors import RunError
from penstock.ir import Plan, as_int
from penstock.runtime import RunOptions
from penstock.schedules import SCHEDULES, find

_LIBRARIES = ("transformers", "accelerate")
_METHODS = (
    "create_accelerator_and_postprocess",
    "training_step",
    "prediction_step",
    "create_optimizer",
    "get_decay_parameter_names",
    "save_model",
    "_wrap_model",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_rng_state",
    "_get_num_items_in_batch",
    "_load_best_model",
    "_move_model_to_device",
)
"""methods that PipelineTrainer overrides: a Trainer without one of them would silently train without the Pipeline"""
_NO_HUB = "save_model(directory), and upload the directory"
_UNSUPPORTED = {
    "deepspeed": "leave it out: the pipeline distributes the model",
    "fsdp": "penstock.Pipeline(..., mesh=mesh, parallelize_fn=fully_shard) in a loop of your own",
    "parallelism_config": "leave it out: all ranks belong to the pipeline",
    "use_liger_kernel": "leave it out: it replaces the model's forward during training",
    "activation_offloading": "gradient_checkpointing=True",
    "enable_jit_checkpoint": "save_steps",
    "push_to_hub": _NO_HUB,
    "save_on_each_node": "leave it out: rank 0 saves the whole model",
    "debug": "leave it out: NaN and Inf are reported with their stage",
}
"""settings of TrainingArguments that must be off, with an alternative"""
_OPTIMIZERS = ("lomo", "adalomo", "galore", "apollo", "layerwise")
"""parts of the names of optimizers that look at the whole model or update inside backward"""
_OUT_OF_MEMORY = (" out of memory.", "MPS backend out of memory", "DefaultCPUAllocator: can't allocate memory")
"""parts of the errors after which accelerate tries a smaller batch"""


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
            hint='pip install "transformers>=4.57"',
        )


def check_settings(args: Any) -> None:
    """Refuse settings that would have no effect or a wrong one."""
    for name, hint in _UNSUPPORTED.items():
        if getattr(args, name, None):
            raise RunError(f"PipelineTrainer does not support {name}", got=repr(getattr(args, name)), hint=hint)
    optim = str(getattr(args.optim, "value", args.optim))
    if any(name in optim for name in _OPTIMIZERS):
        reason = "it needs the whole model, or updates inside backward"
        hint = "adamw_torch, adafactor, sgd, or another that updates each parameter by its gradient"
        raise RunError(f"PipelineTrainer does not support this optimizer: {reason}", optim=repr(optim), hint=hint)


def check_ranks(local: bool, ranks: int | None, plan: Plan | None, replicas: int) -> int:
    """The number of ranks of a pipeline; refuses to run without ranks, or with another number than there are."""
    if as_int(replicas) is None or replicas < 1:
        raise RunError("replicas must be a whole number, 1 or more", got=repr(replicas), hint="replicas=2")
    if plan is not None and ranks not in (None, plan.num_ranks):
        hint = f"ranks={plan.num_ranks}, or leave it out"
        raise RunError("ranks must be the number of ranks of the plan", got=repr(ranks), plan=plan.num_ranks, hint=hint)
    known = ranks if plan is None else plan.num_ranks
    if local:
        if known is None:
            raise RunError("local=True needs the number of ranks", hint="ranks=2, or plan=")
        if replicas > 1:
            raise RunError("replicas need processes", got=f"local=True, replicas={replicas}", hint="penstock.launch")
        return known
    if not (dist.is_available() and dist.is_initialized()):
        hint = "penstock.launch(fn, ranks), torchrun, or PipelineTrainer(..., local=True)"
        raise RunError("torch.distributed is not initialised", hint=hint)
    processes = dist.get_world_size()
    known = processes // replicas if known is None else known
    if known * replicas != processes:
        got = {"ranks": known, "replicas": replicas, "processes": processes}
        raise RunError("ranks times replicas must be the number of processes", **got, hint="replicas=, or ranks=")
    return known


def check_plan_choices(plan: Plan | None, microbatches: object, schedule: object) -> None:
    """Refuse choices for the search of a plan beside a plan that was made with others."""
    if plan is None:
        return
    planned_schedule = plan.choices.schedule
    if isinstance(schedule, str) and schedule != "auto" and find(schedule) is SCHEDULES.get(planned_schedule):
        schedule = planned_schedule  # case and punctuation of the name do not matter
    for name, given, planned in (
        ("microbatches", microbatches, plan.num_microbatches),
        ("schedule", schedule, planned_schedule),
    ):
        if given not in ("auto", planned):
            hint = f"penstock.plan(..., {name}={given!r}), or leave {name} out"
            raise RunError(f"{name} must be that of the plan", got=repr(given), plan=planned, hint=hint)


def check_options(options: RunOptions) -> None:
    """Refuse to skip non-finite steps: Trainer would still call the optimizer."""
    if options.nonfinite == "skip":
        raise RunError(
            'PipelineTrainer cannot skip a step: nonfinite="skip"', hint='nonfinite="raise", or "ignore" to continue'
        )


def out_of_memory(error: BaseException) -> str:
    """The message of the first out-of-memory error among the causes of an error, else empty."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return next((text for text in texts if any(part in text for part in _OUT_OF_MEMORY)), "")
