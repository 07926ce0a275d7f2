"""hf: the door for users of transformers, whose Trainer trains on a Pipeline."""

from penstock.hf.installed import check_installed

check_installed()

from penstock.hf.trainer import PipelineTrainer  # noqa: E402  (transformers must be there)

__all__ = ["PipelineTrainer"]
