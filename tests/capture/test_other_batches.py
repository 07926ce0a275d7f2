"""Batches of other shapes, dtypes or decisions than the example: recorded when they come, once each, and exact."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from penstock.capture import Captured, DrawSeed, capture, without_cache
from penstock.capture.guards import InputGuards
from penstock.partitioners import uniform
from tests.capture.models import Masking, Stack
from tests.parity import Batch, StagedModel, WholeModel, difference, one_step
from tests.selection import some
from tests.zoo import ZOO
from tests.zoo.batch import noise, padded, tokens

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def texts(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(rows, length), "labels": tokens(rows, length, seed=1)}


def encoded(rows: int, length: int) -> dict[str, Tensor]:
    return {**texts(rows, length), "attention_mask": padded(rows, length)}


def translated(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(rows, length), "labels": tokens(rows, length - 3, seed=1)}


def images(rows: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": noise(rows, 3, size, size)}


OTHERS: dict[str, tuple[Callable[[int, int], dict[str, Tensor]], list[tuple[int, int]]]] = {
    "llama": (texts, [(1, 12), (5, 7), (2, 30)]),
    "gpt2": (texts, [(3, 12), (2, 5), (1, 2)]),
    "mistral": (texts, [(1, 3), (2, 40)]),
    "gemma3": (texts, [(1, 3), (2, 40)]),
    "bert_masked_lm": (encoded, [(1, 12), (4, 9)]),
    "t5": (translated, [(1, 12), (3, 8)]),
    "convnext": (images, [(1, 32), (2, 64)]),
    "segformer": (images, [(1, 32), (2, 64)]),
}


def recorded(name: str) -> Captured:
    model, args, kwargs = ZOO[name]()
    return capture(model, args, kwargs)


@pytest.mark.parametrize("name", some(["llama", "gemma3", "t5", "segformer"], OTHERS))
def test_other_batch_sizes_lengths_and_image_sizes_are_exact(name: str) -> None:
    captured = recorded(name)
    partition = uniform(captured.graph, 3)
    make, sizes = OTHERS[name]
    for size in sizes:
        kwargs = make(*size)
        batch = Batch((), without_cache(captured.model, kwargs), "labels" in kwargs)
        expected = one_step(WholeModel(captured.model, batch.loss_fn), batch)
        apart = difference(one_step(StagedModel(captured, partition, batch.loss_fn), batch), expected)
        assert apart.size <= (1e-6 if name == "t5" else 0.0), (size, apart)
    assert captured.num_recordings == 1 + len(sizes)
    for size in sizes:
        # The same form again needs no new recording.
        captured.recording((), make(*size))
    assert captured.num_recordings == 1 + len(sizes)


def test_a_record_without_decisions_on_inputs_is_not_played_to_find_that_it_holds() -> None:
    assert InputGuards(capture(Stack(), (BATCH,)).example_recording, Stack()).always_hold


def test_only_guards_are_replayed_to_check_a_recording() -> None:
    class Shifted(Masking):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x + (x > 0).cumsum(-1), mask)

    model = Shifted()
    guards = InputGuards(capture(model, (BATCH, torch.ones(6))).example_recording, model)
    assert not guards.always_hold
    assert guards.hold({"mask": torch.ones(6)}, DrawSeed(0))
    assert not guards.hold({"mask": torch.zeros(6)}, DrawSeed(0))


def test_conditions_are_prepared_once_for_every_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Counted(InputGuards):
        def __init__(self, *given: object) -> None:
            made.append(given)
            super().__init__(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(import_module("penstock.capture.captured"), "InputGuards", Counted)
    captured = capture(Masking(), (BATCH, torch.ones(6)))
    for _ in range(3):
        captured.recording((BATCH, torch.ones(6)), {})
    assert len(made) == 1


class Speaking(Stack):
    """Has a configuration inside its configuration, as models of several kinds of data do."""

    config = SimpleNamespace(text_config=SimpleNamespace(use_cache=True))

    def forward(self, x: Tensor, use_cache: bool | None = None) -> Tensor:
        return super().forward(x)


def test_a_cache_that_an_inner_configuration_asks_for_is_turned_off() -> None:
    assert without_cache(Speaking(), {}) == {"use_cache": False}
    decoder, model = nn.Identity(), Speaking()
    decoder.config, model.decoder = model.config.text_config, decoder
    model.config = SimpleNamespace(use_cache=False)
    assert without_cache(model, {}) == {"use_cache": False}
    assert without_cache(Speaking(), {"use_cache": True}) == {"use_cache": True}
    assert without_cache(Stack(), {}) == {}
