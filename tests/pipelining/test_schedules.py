"""A script for torch.distributed.pipelining, with the import changed, trains as the unsplit model and as torch does."""

import pytest
import torch

from tests.pipelining.runs import PENSTOCK, TORCH, Script, Trained, train, whole
from tests.process_pool import Pools

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
VEE = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def scripts_of(ranks: int) -> list[Script]:
    """Every schedule, with as many microbatches as torch accepts for it."""
    single = [Script(name, ranks, max(4, ranks), 8) for name in SINGLE]
    return single + [Script(name, 2 * ranks, 2 * ranks, 4 * ranks) for name in (*LOOPED, *VEE)]


def together(found: list[Trained]) -> Trained:
    """The results of all ranks: the gradients of all stages, and the losses and output of the last."""
    gradients = {name: gradient for each in found for name, gradient in each.gradients.items()}
    last = next(each for each in found if each.output is not None)
    return Trained(gradients, last.losses, last.output)


def assert_equal(found: Trained, expected: Trained) -> None:
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-12, atol=1e-13)


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_schedule_trains_hand_made_stages_like_the_unsplit_model(pools: Pools, ranks: int) -> None:
    scripts = scripts_of(ranks)
    for script, found in zip(scripts, zip(*pools[ranks].run(train, PENSTOCK, scripts), strict=True), strict=True):
        assert_equal(together(list(found)), whole(script))


@pytest.mark.gloo
def test_every_schedule_gives_the_gradients_that_torch_gives(pools: Pools) -> None:
    scripts = scripts_of(2)
    ours, theirs = (pools[2].run(train, library, scripts) for library in (PENSTOCK, TORCH))
    for own, other in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert_equal(together(list(own)), together(list(other)))


@pytest.mark.gloo
def test_sums_of_losses_are_not_scaled_with_scale_grads_false_and_divided_otherwise(pools: Pools) -> None:
    scripts = [Script(reduction="sum", scale_grads=False), Script(reduction="sum", scale_grads=True)]
    unscaled, scaled = zip(*pools[2].run(train, PENSTOCK, scripts), strict=True)
    expected = whole(scripts[0])
    assert_equal(together(list(unscaled)), expected)
    fourth = {name: gradient / 4 for name, gradient in expected.gradients.items()}
    assert_equal(together(list(scaled)), expected._replace(gradients=fourth))


@pytest.mark.gloo
def test_microbatches_of_unequal_size_give_the_gradients_of_the_batch(pools: Pools) -> None:
    scripts = [Script(name, 2, 4, 10) for name in SINGLE] + [Script("ScheduleZBVZeroBubble", 4, 3, 7)]
    for script, found in zip(scripts, zip(*pools[2].run(train, PENSTOCK, scripts), strict=True), strict=True):
        assert_equal(together(list(found)), whole(script))
