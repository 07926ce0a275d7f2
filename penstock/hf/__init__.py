"""PipelineTrainer: the Trainer of transformers on a Pipeline.

trainer.py           PipelineMixin: the methods of Trainer that run the pipeline
model.py             the model that Trainer sees
optimizers.py        optimizers over the parameters of one rank
single_process.py    makes a rank look like a single process to Trainer and accelerate
settings.py          versions and settings that are refused
export.py            a checkpoint as a directory for from_pretrained
"""

from penstock.hf.settings import check_installed

check_installed()

from penstock.hf.trainer import PipelineMixin, PipelineTrainer, pipelined  # noqa: E402  (imports transformers)

__all__ = ["PipelineMixin", "PipelineTrainer", "pipelined"]
