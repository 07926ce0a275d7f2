"""forward_backward with the caller's functions, against the same computed in one process."""

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import RunError
from tests.flat import stages
from tests.flat.stages import batch, gradients, stage_of
from tests.process_pool import Pools


def assert_gradients(found: list[list[Tensor]], models: list[nn.Module]) -> None:
    for own, model in zip(found, models, strict=True):
        torch.testing.assert_close(own, gradients(model), rtol=1e-12, atol=1e-14)


@pytest.mark.gloo
@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (2, "gpipe"), (3, "1f1b"), (3, "zb_h1")])
def test_a_backward_of_ones_own_is_given_the_output_and_its_gradient(pools: Pools, ranks: int, schedule: str) -> None:
    found = pools[ranks].run(stages.own_backward, ranks, schedule)
    models = [stage_of(rank) for rank in range(ranks)]
    for part in batch(6).split(2):
        (8 * nn.Sequential(*models)(part).square().mean()).backward()
    assert_gradients([own for own, _ in found], models)
    assert [seen for _, seen in found] == [[True] * 3] * (ranks - 1) + [[False] * 3]


@pytest.mark.gloo
def test_several_values_cross_and_every_stage_may_have_inputs_of_its_own(pools: Pools) -> None:
    found = pools[3].run(stages.two_values_and_extras)
    models = [stage_of(rank) for rank in range(3)]
    losses = []
    for x, second, third in zip(*(batch(5, seed=rank).split([3, 2]) for rank in range(3)), strict=True):
        middle = models[1](2 * models[0](x)) * second
        losses.append((models[2](2 * middle) * third + x.abs()).square().mean())
        losses[-1].backward()
    assert_gradients([own for own, _ in found], models)
    assert float(found[2][1]) == pytest.approx(sum(loss.item() for loss in losses), rel=1e-12)


@pytest.mark.gloo
def test_a_stage_without_anything_to_train_gets_no_gradients(pools: Pools) -> None:
    first, second = pools[2].run(stages.frozen)
    models = [stage_of(0).requires_grad_(False), stage_of(1)]
    nn.Sequential(*models)(batch(4)).sum().backward()
    assert first == []
    assert_gradients([second], models[1:])


@pytest.mark.gloo
def test_an_evaluation_answers_for_all_samples_without_gradients(pools: Pools) -> None:
    (nothing, none, _), (whole, parts, wants) = pools[2].run(stages.evaluated)
    expected = nn.Sequential(stage_of(0), stage_of(1))(batch(7)).detach()
    assert nothing is None
    assert none is None
    assert not wants
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(parts, expected)


@pytest.mark.gloo
def test_values_are_not_converted_and_another_dtype_is_warned_of(pools: Pools) -> None:
    (warning,), nothing = pools[2].run(stages.of_another_type)
    assert warning == "values are sent to the next stage as float64, not as torch.bfloat16: dtype does not convert them"
    assert nothing == []


@pytest.mark.gloo
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (1.0, 7.0), (float("inf"), 4.0)])
def test_norms_of_3_and_4_are_5_together(pools: Pools, norm_type: float, norm: float) -> None:
    for rank, (found, (clipped,)) in enumerate(pools[2].run(stages.three_and_four, norm_type)):
        assert found == pytest.approx(norm)
        assert float(clipped) == pytest.approx((3 + rank) / norm, rel=1e-5)


@pytest.mark.gloo
def test_gradients_of_replicas_are_averaged_over_all_microbatches(pools: Pools) -> None:
    found = pools[4].run(stages.replicated)
    models = [stage_of(0), stage_of(1)]
    for seed in range(2):
        for part in batch(4, seed).split(2):
            (nn.Sequential(*models)(part).square().mean() / 2).backward()
    for stage, own, parameters in found:
        assert_gradients([own], [models[stage]])
        assert all(map(torch.equal, parameters, models[stage].parameters()))


@pytest.mark.gloo
def test_gradients_that_nobody_would_average_are_refused(pools: Pools) -> None:
    assert all("would not be averaged over replicas" in error for error in pools[2].run(stages.outside))


@pytest.mark.gloo
def test_the_wrapper_of_torch_is_refused_unless_it_averages_nothing(pools: Pools) -> None:
    for replica, (training, evaluation, found) in enumerate(pools[2].run(stages.torch_wrapper)):
        assert "DistributedDataParallel would average the gradients of one microbatch only" in training
        assert "try: penstock.flat.DDP(model)" in training
        assert evaluation == ""
        model = stage_of(0)
        for part in batch(4, seed=replica).split(2):
            model(part).square().mean().backward()
        assert_gradients([found], [model])


@pytest.mark.gloo
@pytest.mark.parametrize("samples", [8, 9])
def test_outputs_of_even_and_uneven_batches_are_concatenated(pools: Pools, samples: int) -> None:
    nothing, found = pools[2].run(stages.classes_of_tokens, samples)
    assert nothing is None
    assert torch.equal(found, (2 * batch(samples)).repeat_interleave(3, 0))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("microbatches", "rank 1 called forward_backward(num_microbatches=3) while rank 0 called forward_backward("),
        ("only", "forward_only=True"),
        ("sizes", "all ranks must have batches of the same size (step: 0, sizes: (4, 6))"),
        ("ragged", "the inputs of a rank must have the same number of samples (step: 0, rank: 1, got: [3, 4])"),
        ("few", "samples: 4, microbatches: 9)\ntry: num_microbatches=4 on every rank"),
        ("nothing", "the first rank of the pipeline must be given inputs (step: 0, rank: 0)"),
    ],
)
def test_a_mistake_of_one_rank_is_an_error_on_all_and_the_next_call_works(pools: Pools, kind: str, words: str) -> None:
    for (error,) in pools[2].run(stages.refused, kind):
        assert words in error


@pytest.mark.parametrize(
    ("rank", "kind", "words"),
    [
        (0, "dict", "must return a tensor, or a list or tuple of tensors"),
        (1, "vector", "the forward of the last stage must return a scalar loss"),
        (1, "raise", "KeyError: 'boom'"),
    ],
)
def test_a_stage_that_fails_is_named_with_its_microbatch(rank: int, kind: str, words: str) -> None:
    with pytest.raises(RunError) as caught:
        penstock.launch(stages.broken, 2, rank, kind, timeout=240.0)
    assert words in str(caught.value)
    assert f"rank: {rank}" in str(caught.value)
    assert "microbatch: 0" in str(caught.value)


@pytest.mark.parametrize(
    ("fate", "words"), [("hang", "rank 1: no progress, working on 1F1"), ("kill", "a rank was killed (rank: 1")]
)
def test_a_rank_that_hangs_or_dies_ends_the_run_soon_and_is_named(fate: str, words: str) -> None:
    with pytest.raises(RunError) as caught:
        penstock.launch(stages.fateful, 2, fate, timeout=240.0)
    assert words in str(caught.value)


@pytest.mark.gloo
def test_a_pipeline_of_one_rank_needs_no_messages(pools: Pools) -> None:
    for own, _ in pools[1].run(stages.own_backward, 1):
        model = stage_of(0)
        for part in batch(6).split(2):
            (8 * model(part).square().mean()).backward()
        assert_gradients([own], [model])
