"""Checks that transformers is installed and that its Trainer has the methods that PipelineTrainer overrides."""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from penstock.errors import RunError

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
"""if Trainer lacked one of them, it would train without the Pipeline, silently wrong"""


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
