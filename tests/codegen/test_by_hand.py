"""The stages of a generated file are modules that can be run one by one, following their tables."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import penstock
from penstock.partitioners import cut_before, uniform
from tests.capture.models import Masking, Parametric, Stack
from tests.codegen.generated import generated, imported

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Skipping(nn.Module):
    """A value that skips a stage, a tied weight, and a parameter that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        first = self.layers[0](x) * self.scale
        second = torch.tanh(self.layers[1](first))
        third = torch.tanh(self.layers[2](second))
        return self.layers[3](third + first)


def skipping(directory: Path) -> tuple[Skipping, torch.Tensor, ModuleType]:
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(4, 8)
    captured = penstock.capture(model, (x,))
    cut = cut_before(captured.graph, ["layers.1", "layers.2"])
    return model, x, imported(penstock.generate_code(captured, cut, directory / "stages.py"))


def test_tables_name_the_sending_and_receiving_stages(tmp_path):
    _, _, file = skipping(tmp_path)
    assert [stage.RECEIVES for stage in file.STAGES] == [{}, {"mul": 0}, {"mul": 0, "tanh": 1}]
    assert [stage.SENDS for stage in file.STAGES] == [{"mul": (1, 2)}, {"tanh": (2,)}, {}]
    assert file.PLACEMENT == (0, 1, 2)
    assert file.TIED == (("layers.0.weight", "layers.3.weight"),)


def test_docstrings_list_the_values_that_cross(tmp_path):
    _, _, file = skipping(tmp_path)
    assert file.Stage1.__doc__.split("\n") == [
        "Stage 1 of 3, on rank 1.",
        "",
        "    In: mul, float32[4, 8], from stage 0",
        "    Out: tanh, float32[4, 8], to stage 2",
        "    ",
    ]


def test_detached_stages_run_backward_by_hand_give_the_gradients_of_the_model(tmp_path):
    model, x, file = skipping(tmp_path)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    mul = file.Stage0(model)(x)
    mul_in = mul.detach().requires_grad_()
    tanh = file.Stage1(model)(mul_in)
    tanh_in = tanh.detach().requires_grad_()
    file.Stage2(model)(mul_in, tanh_in).square().sum().backward()
    tanh.backward(tanh_in.grad)
    mul.backward(mul_in.grad)
    for found, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.grad, wanted, rtol=1e-6, atol=1e-7)


def test_the_state_dicts_of_all_stages_have_the_models_keys_and_tensors(tmp_path):
    model, _, file = skipping(tmp_path)
    found = {name: tensor for stage in file.STAGES for name, tensor in stage(model).state_dict(keep_vars=True).items()}
    whole = model.state_dict(keep_vars=True)
    assert found.keys() == whole.keys()
    assert all(found[name] is whole[name] for name in whole)


@pytest.mark.parametrize("kind", [Stack, Parametric])
def test_an_unused_part_of_the_model_is_in_a_stage_too(kind, tmp_path):
    model = kind()
    model.spare, model.free = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    file = generated(penstock.capture(model, (BATCH,)), 3, tmp_path)
    found = [name for stage in file.STAGES for name in stage(model).state_dict()]
    assert sorted(found) == sorted(model.state_dict())


def test_a_file_runs_another_model_of_the_same_class(tmp_path):
    file = generated(penstock.capture(Stack().eval(), (BATCH,)), 3, tmp_path)
    other = Stack().eval()
    assert torch.equal(file.run(other, BATCH), other(BATCH))


def test_a_file_generated_on_the_meta_device_runs_a_model_with_weights(tmp_path):
    with torch.device("meta"):
        bare = Stack().eval()
    file = generated(penstock.capture(bare, (torch.empty(6, 4, device="meta"),)), 3, tmp_path)
    model = Stack().eval()
    assert torch.equal(file.run(model, BATCH), model(BATCH))


def test_sizes_that_the_model_never_read_may_differ(tmp_path):
    model = Stack().eval()
    file = generated(penstock.capture(model, (BATCH,)), 3, tmp_path)
    assert torch.equal(file.run(model, BATCH[:2]), model(BATCH[:2]))


class Sized(Stack):
    """Reads the size of its input."""

    def forward(self, x):
        return super().forward(x.view(x.shape[0], 4))


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            Sized(),
            lambda file, model: file.run(model, BATCH[:2]),
            "the size of x must be (6, 4) as recorded, got (2, 4)",
        ),
        (
            Stack(),
            lambda file, model: file.run(model, BATCH.double()),
            "the type of x must be torch.float32 as recorded, got torch.float64",
        ),
        (Stack(), lambda file, model: file.run(model.eval(), BATCH), "training must be True as recorded, got False"),
        (
            Stack(),
            lambda file, model: file.run(model, BATCH, 2.0),
            "the list of arguments must be ['x'] as recorded, got ['scale', 'x']",
        ),
    ],
)
def test_sizes_types_modes_and_arguments_must_be_the_recorded_ones(model, change, message, tmp_path):
    file = generated(penstock.capture(model, (BATCH,)), 2, tmp_path)
    with pytest.raises(ValueError) as error:
        change(file, model)
    assert message in str(error.value)


def test_a_different_decision_raises(tmp_path):
    model, mask = Masking().eval(), torch.ones(6)
    file = generated(penstock.capture(model, (BATCH, mask)), 2, tmp_path)
    assert torch.equal(file.run(model, BATCH, mask=mask), model(BATCH, mask))
    mask[3] = 0
    with pytest.raises(ValueError, match="bool must be True as recorded, got False"):
        file.run(model, BATCH, mask)


def test_a_model_set_to_evaluation_after_capture_is_generated_in_evaluation_mode(tmp_path):
    captured = penstock.capture(Stack(), (BATCH,))
    model = captured.model.eval()
    assert torch.equal(generated(captured, 2, tmp_path).run(model, BATCH), model(BATCH))


class Peeking(Stack):
    """Writes its state through a view of it, and leaves a plain tensor behind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x):
        view, self.left = self.table[2:4], x.mean()
        self.table.add_(1)
        view *= 3
        return super().forward(x * view.sum() + self.left), self.table


def test_state_that_is_written_through_views_ends_as_in_the_model(tmp_path):
    ones, others = Peeking().eval(), Peeking().eval()
    others.load_state_dict(ones.state_dict())
    file = generated(penstock.capture(ones, (BATCH,)), 3, tmp_path)
    for _ in range(2):
        assert all(map(torch.equal, file.run(ones, BATCH), others(BATCH)))
    assert torch.equal(ones.table, others.table)


def test_the_input_of_a_sequence_keeps_its_name(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    captured = penstock.capture(model, (BATCH,))
    file = imported(penstock.generate_code(captured, uniform(captured.graph, 1), tmp_path / "stages.py"))
    assert torch.equal(file.Stage0(model)(input=BATCH), model(BATCH))


def test_a_default_argument_may_be_given_or_omitted(tmp_path):
    model = Stack().eval()
    file = generated(penstock.capture(model, (BATCH,), {"scale": 1.0}), 2, tmp_path)
    assert torch.equal(file.run(model, BATCH), file.run(model, BATCH, scale=1.0))


def test_random_numbers_are_drawn_in_the_order_of_the_model(tmp_path):
    model = Stack()
    file = generated(penstock.capture(model, (BATCH,)), 3, tmp_path)
    torch.manual_seed(3)
    expected = model(BATCH)
    torch.manual_seed(3)
    assert torch.equal(file.run(model, BATCH), expected)


def test_generating_twice_gives_the_same_text(tmp_path):
    captured = penstock.capture(Stack(), (BATCH,))
    texts = [penstock.generate_code(captured, uniform(captured.graph, 3), tmp_path / name) for name in ("a.py", "b.py")]
    assert texts[0].read_text() == texts[1].read_text()
