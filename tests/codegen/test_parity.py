"""A generated file, imported and run, gives the outputs, gradients and buffers of the model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.codegen.generated import generated, step_of_file
from tests.parity import WholeModel, assert_identical, difference, one_step
from tests.selection import every_third
from tests.stages.architectures import Architecture
from tests.zoo import ambient

# fmt: off
MODELS = (
    "llama", "gpt2", "mixtral", "mamba2", "bert_masked_lm", "deberta_v2", "t5", "vit", "clip", "resnet50", "unet",
    "transformer", "lstm", "branches", "tied", "weight_used_twice", "batch_norm", "dropout", "custom_function",
    "in_place", "channels_last", "dict_between", "dataclass_between", "model_output_between", "nested_between",
    "long_skips", "lora", "hooked", "autocast_inside", "autocast_around",
)
# fmt: on
# The code of these has the statements of other models only.
SAME_STATEMENTS = {
    *("gpt2", "mixtral", "bert_masked_lm", "vit", "clip", "resnet50", "branches", "tied", "weight_used_twice"),
    *("batch_norm", "dropout", "lora", "hooked"),
}
CASES = [(name, "blocks", "labels") for name in MODELS]
CASES += [(name, "functions", "plain") for name in ("vit", "unet", "lstm", "control_flow")]


@pytest.mark.parametrize(
    ("name", "granularity", "mode"),
    [
        pytest.param(*case, marks=pytest.mark.whole if case[0] in SAME_STATEMENTS and case[1] == "blocks" else ())
        for case in CASES
    ],
)
def test_stages_of_a_file_give_the_outputs_gradients_and_buffers_of_the_model(
    name: str, granularity: str, mode: str, tmp_path: Path, is_whole: bool
) -> None:
    with ambient(name):
        captured, batch = Architecture(name, granularity).captured(mode)
        expected = one_step(WholeModel(captured.model, batch.loss_fn), batch)
        found = {
            stages: difference(step_of_file(generated(captured, stages, tmp_path), captured.model, batch), expected)
            for stages in every_third((2, 3, 4), CASES.index((name, granularity, mode)), is_whole)
        }
    assert {stages: apart for stages, apart in found.items() if apart.size} == {}


@pytest.mark.parametrize("name", ["llama", "t5", "in_place"])
def test_a_file_is_right_for_other_data(name: str, tmp_path: Path) -> None:
    captured, batch = Architecture(name, "blocks").captured("plain")
    other = batch.other()
    found = step_of_file(generated(captured, 3, tmp_path), captured.model, other)
    assert_identical(found, one_step(WholeModel(captured.model, other.loss_fn), other))


@pytest.mark.parametrize("name", ["llama", "lstm", "nested_between"])
def test_a_file_is_laid_out_as_a_formatter_would(name: str, tmp_path: Path) -> None:
    captured, _ = Architecture(name, "blocks").captured("plain")
    generated(captured, 3, tmp_path)
    command = ["ruff", "format", "--isolated", "--line-length", "120", "--diff", str(tmp_path / "stages3.py")]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
