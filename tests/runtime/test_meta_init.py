"""Models on the meta device: allocated parameters, placeholders, and buffers that are computed or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, RunError
from penstock.runtime.meta_init import is_meta, materialize
from tests.plans import quick_plan

WIDTH = 4
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))


class Scaled(nn.Module):
    """A layer with a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.register_buffer("count", torch.zeros(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(WIDTH, device=self.table.device) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.table + self.count


class SetByConstructor(Scaled):
    """A buffer that only the constructor sets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.full((WIDTH,), 2.0)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Random(SetByConstructor):
    """A buffer with random values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)


def chain(kind: type[nn.Module] = Scaled) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4)))


def on_meta(kind: type[nn.Module] = Scaled) -> nn.Module:
    with torch.device("meta"):
        return chain(kind)


def piped(model: nn.Module) -> penstock.Pipeline:
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="gpipe", loss_fn=nn.functional.mse_loss)
    return penstock.Pipeline(model, plan, local=True, loss_fn=nn.functional.mse_loss)


def test_a_meta_model_trains_as_usual_once_it_is_loaded(tmp_path: Path) -> None:
    whole = chain()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    pipe = piped(on_meta())
    pipe.load(tmp_path)
    found = pipe.step(X, target=X).loss
    expected = nn.functional.mse_loss(whole(X), X)
    expected.backward()
    torch.testing.assert_close(found, expected)
    own = dict(whole.named_parameters())
    assert all(torch.allclose(p.grad, own[name].grad) for name, p in pipe.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("call", ["step", "eval", "state_dict", "full_state_dict"])
def test_nothing_is_computed_before_the_weights_are_loaded(call: str) -> None:
    pipe = piped(on_meta())
    given: dict[str, Any] = {"target": X} if call in ("step", "eval") else {}
    with pytest.raises(RunError, match=r"pipe\.load"):
        getattr(pipe, call)(*((X,) if given else ()), **given)


def test_weights_may_come_from_a_state_dict() -> None:
    pipe = piped(on_meta())
    pipe.load_state_dict(chain().state_dict())
    torch.testing.assert_close(pipe.eval(X, return_outputs=True).outputs, chain()(X))


@pytest.mark.parametrize("kind", [SetByConstructor, Random])
def test_a_buffer_that_initialisation_does_not_determine_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(RunError, match=r"module: 0, buffers: table\)\ntry: .*reset_parameters"):
        materialize(on_meta(kind), ["0.weight"], torch.device("cpu"))


def test_a_meta_tensor_that_is_an_ordinary_attribute_is_refused() -> None:
    model = on_meta()
    model[1].extra = torch.empty(3, device="meta")
    with pytest.raises(RunError, match="name: extra"):
        materialize(model, [], torch.device("cpu"))


def test_parameters_of_other_ranks_take_no_memory_and_are_nan() -> None:
    model = on_meta()
    model[3].weight = model[0].weight
    materialize(model, ["0.weight"], torch.device("cpu"))
    assert [p.untyped_storage().nbytes() for p in model.parameters()] == [4 * WIDTH * WIDTH, 4, 4]
    assert model[3].weight is model[0].weight
    assert model[1].weight.isnan().all()
    assert model[2].table.tolist() == [1, 2, 3, 4]


def test_a_buffer_that_has_values_keeps_them() -> None:
    model = on_meta(SetByConstructor)
    for layer in model:
        layer.table = torch.full((WIDTH,), 3.0)
    assert is_meta(model)
    materialize(model, [], torch.device("cpu"))
    assert model[1].table.tolist() == [3, 3, 3, 3]


def test_a_model_that_is_partly_on_the_meta_device_is_refused() -> None:
    model = chain()
    model[2].to("meta")
    with pytest.raises(RunError, match=r"2\.weight"):
        is_meta(model)


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(WIDTH, WIDTH)}, tmp_path / "model.safetensors")
    pipe = piped(model := chain())
    with pytest.raises(CheckpointError, match=r"missing: 0\.count"):
        pipe.load(tmp_path)
    assert torch.equal(model[0].weight, chain()[0].weight)


def test_a_hugging_face_directory_has_no_optimizer_state(tmp_path: Path) -> None:
    save_file(chain().state_dict(), tmp_path / "model.safetensors")
    pipe = piped(chain())
    with pytest.raises(CheckpointError, match="a Hugging Face directory has no optimizer state"):
        pipe.load(tmp_path, torch.optim.SGD(pipe.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Gemma2ForCausalLM", "BertForMaskedLM"])
def test_transformers_models_compute_their_non_persistent_buffers(kind: str) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    config = getattr(hf, kind).config_class(**sizes, num_attention_heads=2, num_key_value_heads=1)
    whole = getattr(hf, kind)(config)
    with torch.device("meta"):
        model = getattr(hf, kind)(config)
    materialize(model, [], torch.device("cpu"))
    made = dict(model.named_buffers())
    assert made
    assert all(torch.equal(buffer, made[name]) for name, buffer in whole.named_buffers())
