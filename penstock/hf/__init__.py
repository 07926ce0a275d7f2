"""PipelineTrainer: the Trainer of transformers on a Pipeline."""

from penstock.hf.settings import check_installed

check_installed()

from penstock.hf.trainer import PipelineMixin, PipelineTrainer, pipelined  # noqa: E402  (imports transformers)

__all__ = ["PipelineMixin", "PipelineTrainer", "pipelined"]
