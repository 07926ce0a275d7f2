"""A PipelineTrainer on two ranks has the numbers of a plain Trainer in one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.hf import runs
from tests.selection import some

pytestmark = pytest.mark.gloo

RUNS = {
    "with clipping": {},
    "with accumulation": {"gradient_accumulation_steps": 2, "max_steps": 4},
    "with decay and warmup": {"weight_decay": 0.3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 4},
    "without clipping": {"max_grad_norm": 0.0, "optim": "sgd", "max_steps": 2},
    "with evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3, "max_steps": 2},
    "with losses only": {"eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True, "max_steps": 2},
}


@pytest.mark.parametrize("name", some(set(RUNS) - {"with clipping", "with losses only"}, RUNS))
def test_a_run_has_the_numbers_of_one_process(name: str, pools: Any, tmp_path: Path) -> None:
    expected = runs.alone(tmp_path, RUNS[name])
    first, second = pools[2].run(runs.piped, runs.the_plan(), str(tmp_path), RUNS[name])
    assert list(runs.differences(expected, first)) == []
    # Every rank knows what was logged; parameters are collected on the first.
    assert list(runs.differences((expected[0], {}), second)) == []
