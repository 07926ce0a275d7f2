"""measure, measure_speed and measure_links work as API.md writes them."""

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from tests.measure.subjects import Block, batch, chain


def captured(device: str = "cpu") -> "penstock.Captured":
    with torch.device(device):
        return penstock.capture(chain(Block(), Block(1)), (batch().to(device),))


def test_a_captured_model_is_measured(tmp_path: Path):
    profile = penstock.measure(captured(), iterations=1, cache=tmp_path)
    assert isinstance(profile, penstock.Profile)
    assert [cost.node for cost in profile.costs] == ["0", "1"]


def test_a_profile_makes_a_plan(tmp_path: Path):
    model = chain(Block(), Block(1))
    profile = penstock.measure(penstock.capture(model, (batch(),)), iterations=1, cache=tmp_path)
    plan = penstock.plan(
        model, (batch().repeat(2, 1),), ranks=2, microbatches=2, schedule="1f1b", partitioner="uniform", profile=profile
    )
    assert plan.costs.forward == tuple(cost.forward for cost in profile.costs)


def test_a_second_measurement_comes_from_the_cache(tmp_path: Path):
    first, second = (penstock.measure(captured(), iterations=1, cache=tmp_path) for _ in range(2))
    assert first == second
    assert penstock.clear_profiles(tmp_path) == 1


@pytest.mark.parametrize("cache", [False, None])
def test_the_cache_can_be_switched_off(cache: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    penstock.measure(captured(), iterations=1, cache=cache)
    assert list(tmp_path.iterdir()) == []


def test_by_default_the_users_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    penstock.measure(captured(), iterations=1)
    assert penstock.clear_profiles() == 1


def test_on_the_meta_device_seconds_are_estimated():
    profile = penstock.measure(captured("meta"))
    assert profile.device.startswith("estimated for")
    assert profile["1"].memory == penstock.measure(captured(), iterations=1, cache=False)["1"].memory


def test_with_a_speed_nothing_is_timed():
    speed = penstock.DeviceSpeed(1e12, 1e11)
    assert penstock.measure(captured(), speed=speed) == penstock.measure(captured(), speed=speed)


def test_with_a_loss_function_gradients_of_all_outputs_return():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x).sum(), self.second(x)

    both, speed = penstock.capture(Two(), (batch(),)), penstock.DeviceSpeed(1e12, 1e11)
    assert penstock.measure(both, speed=speed)["second.linear"].backward == 0.0
    assert penstock.measure(both, speed=speed, loss_fn=nn.functional.mse_loss)["second.linear"].backward > 0.0


def test_a_model_that_is_not_captured_is_refused_with_a_hint():
    with pytest.raises(penstock.CaptureError, match=r"must be a captured model[^\n]*\ntry: penstock.measure\("):
        penstock.measure(chain())


@pytest.mark.parametrize("options", [{"iterations": 0}, {"iterations": 1.5}, {"budget": -1}, {"budget": float("nan")}])
def test_figures_that_make_no_sense_are_refused(options: dict[str, float]):
    with pytest.raises(penstock.CostError, match=next(iter(options))):
        penstock.measure(captured(), **options)


def test_links_need_a_group():
    with pytest.raises(penstock.RunError, match="process group"):
        penstock.measure_links()


@pytest.mark.parametrize("options", [{"cache": 5}, {"speed": 5}, {"loss_fn": 5}, {"loss_fn": nn.MSELoss}])
def test_arguments_of_another_type_are_refused_with_a_hint(options: dict[str, object]):
    with pytest.raises(penstock.PenstockError, match="try: "):
        penstock.measure(captured(), **options)
