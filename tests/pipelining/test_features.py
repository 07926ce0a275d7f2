"""Keyword arguments, evaluation, chunk specs, weight gradients of one's own, CSV orders, custom functions, mistakes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import mse_loss

from penstock.errors import RunError, ScheduleError
from penstock.launch import launch
from penstock.pipelining import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleZBVZeroBubble,
    TensorChunkSpec,
    get_schedule_class,
)
from penstock.pipelining.microbatch import split_args_kwargs_into_chunks
from tests.pipelining import features
from tests.pipelining.runs import PENSTOCK, TORCH, batch, blocks
from tests.process_pool import Pools


@pytest.mark.gloo
def test_steps_evaluations_and_new_shapes_follow_each_other(pools: Pools) -> None:
    first, last = pools[2].run(features.called_otherwise)
    model, (x, y) = blocks(2), batch(8)
    scale = torch.arange(8.0, dtype=torch.float64).reshape(8, 1)
    output = model[1](model[0](x, scale), scale)
    mse_loss(output, y).backward()
    torch.testing.assert_close(last["kwargs"], output.detach())
    losses = [mse_loss(*parts).detach() for parts in zip(output.split(2), y.split(2), strict=True)]
    torch.testing.assert_close(last["losses"], losses)
    for index, found in enumerate((first, last)):
        torch.testing.assert_close(found["first"], features.gradients(model[index]))
    mse_loss(model(x), y).backward()
    for index, found in enumerate((first, last)):
        torch.testing.assert_close(found["accumulated"], features.gradients(model[index]))
    output = model(x).detach()
    for name in ("eval", "after eval", "forward only"):
        torch.testing.assert_close(last[name], output)
        assert first[name] is None
    torch.testing.assert_close(torch.stack(last["eval losses"]).mean(), mse_loss(output, y))
    torch.testing.assert_close(last["longer"], torch.cat([output, output]))
    model.zero_grad()
    mse_loss(model(x), y).backward()
    for index, found in enumerate((first, last)):
        torch.testing.assert_close(found["longer gradients"], features.gradients(model[index]))


@pytest.mark.gloo
def test_chunk_specs_split_and_merge_along_other_dimensions(pools: Pools) -> None:
    nothing, (merged, total, expected, expected_total) = pools[2].run(features.with_specs)
    assert nothing is None
    torch.testing.assert_close(merged, expected)
    torch.testing.assert_close(total, expected_total)


@pytest.mark.gloo
def test_weight_gradients_of_ones_own_run_where_the_schedule_has_them(pools: Pools) -> None:
    found = [pools[2].run(features.own_weight_gradients, library) for library in (PENSTOCK, TORCH)]
    ours, theirs = (dict(pair for rank in ranks for pair in rank) for ranks in found)
    assert sorted(ours) == [0, 1, 2, 3]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.gloo
def test_orders_are_read_from_csv_with_and_without_messages_and_actions_replaced(pools: Pools, tmp_path: Path) -> None:
    found = pools[2].run(features.loaded_orders, str(tmp_path))
    model, (x, y) = blocks(4), batch(8)
    mse_loss(model(x), y).backward()
    for form in ("compute_only", "compute_comms"):
        for rank in found:
            for index, gradients in rank[form].items():
                torch.testing.assert_close(gradients, features.gradients(model[index]))
            assert rank[f"{form} seen"] == [text for text in rank[f"{form} order"] if "F" in text or "W" in text]


@pytest.mark.gloo
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_stages_wrapped_for_data_parallelism_average_gradients_once(pools: Pools, wrapper: str, schedule: str) -> None:
    model, (x, y) = blocks(2 if schedule == "Schedule1F1B" else 4), batch(8)
    mse_loss(model(x), y).backward()
    expected = features.gradients(model)
    found = pools[4].run(features.replicated, wrapper, schedule)
    assert {name for own in found for name in own} == set(expected)
    for own in found:
        torch.testing.assert_close(own, {name: expected[name] for name in own})


@pytest.mark.gloo
def test_no_activation_outlives_a_step(pools: Pools) -> None:
    assert pools[2].run(features.live_tensors) == [0, 0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("target", "the rank of the last stage must pass a target"),
        ("rows", "the target must have the same number of rows for every sample of the inputs"),
        (
            "few",
            "one sample for each microbatch (step: 0, rank: 0, argument: argument 0, samples: 3, microbatches: 4)",
        ),
        ("losses", "losses must be a list"),
        ("no input", "cannot be called with the arguments of this rank: missing a required argument: 'x'"),
        ("keywords", "cannot be called with the arguments of this rank: got an unexpected keyword argument 'factor'"),
        ("loss_kwargs", "loss_fn must take the output, the target and loss_kwargs"),
        ("no dict", "loss_kwargs must be a dict"),
        ("second target", "the same number of rows for every sample of the inputs (step: 0, samples: 8, rows: 6)"),
        ("few targets", "at least one row for each microbatch (step: 0, rank: 1, target: target.1, rows: 2"),
        ("different", "rank 1 called step while rank 0 called eval"),
    ],
)
def test_a_wrong_call_is_the_same_error_on_all_ranks_and_the_next_call_works(
    pools: Pools, kind: str, words: str
) -> None:
    for error in pools[2].run(features.refused, kind):
        assert words in error


def test_microbatches_differ_by_one_sample_at_most_and_can_be_written_in_place() -> None:
    computed = torch.ones(8, 3, requires_grad=True) * 2
    found, _ = split_args_kwargs_into_chunks((computed,), {}, 3)
    assert [len(part.mul_(2)) for (part,) in found] == [3, 3, 2]


def test_masks_of_flex_attention_are_split_by_samples() -> None:
    lengths = torch.tensor([3, 130, 200, 256, 5])

    def is_visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key < lengths[sample])

    whole = create_block_mask(is_visible, 5, 1, 256, 256, device="cpu")
    found, _ = split_args_kwargs_into_chunks((whole,), {}, 2)
    for (part,), (first, count) in zip(found, ((0, 3), (3, 2)), strict=True):
        dense = create_mask(is_visible, 5, 1, 256, 256, device="cpu")[first : first + count]
        assert torch.equal(create_mask(part.mask_mod, count, 1, 256, 256, device="cpu"), dense)
        assert torch.equal(part.to_dense(), whole.to_dense()[first : first + count])
    for_all = create_block_mask(lambda sample, head, query, key: query >= key, None, None, 256, 256, device="cpu")
    assert [part for (part,) in split_args_kwargs_into_chunks((for_all,), {}, 2)[0]] == [for_all, for_all]
    with pytest.raises(RunError, match="a BlockMask must be split along dimension 0"):
        split_args_kwargs_into_chunks((whole,), {}, 2, (TensorChunkSpec(1),))


@pytest.mark.xdist_group("gloo")
def test_the_deadline_of_a_schedule_can_be_set_and_its_error_names_it() -> None:
    with pytest.raises(RunError, match=r"timed out.*\n(.*\n)*.*increase schedule.deadline_seconds.*now 2"):
        launch(features.late_to_a_step, 2)


@pytest.mark.gloo
def test_mistakes_that_a_rank_finds_alone_are_refused_before_any_step(pools: Pools, tmp_path: Path) -> None:
    words = {
        "no orders": "orders must be loaded before they are used",
        "another place": "a rank must have the stages that the schedule places there",
        "too many": "a schedule with one stage per rank must have as many stages as ranks",
        "index": "stage_index must be at least 0 and below num_stages",
        "microbatches": "n_microbatches must be a whole number, 1 or more",
        "message": "computation_type must be a type that custom functions can replace",
        "forwards only": "orders of a step must have backwards",
    }
    for found in pools[2].run(features.misused, str(tmp_path)):
        assert {name: found.get(name, "")[: len(text)] for name, text in words.items()} == words


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("1F1B", Schedule1F1B),
        ("schedule1f1b", Schedule1F1B),
        ("ZBVZeroBubble", ScheduleZBVZeroBubble),
        ("zbv", ScheduleZBVZeroBubble),
        ("PipelineScheduleMulti", PipelineScheduleMulti),
    ],
)
def test_a_schedule_class_is_found_by_the_names_of_torch_and_of_penstock(name: str, member: type) -> None:
    assert get_schedule_class(name) is member


def test_an_unknown_schedule_class_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"unknown schedule.*\ntry: one of 1F1B, Interleaved1F1B"):
        get_schedule_class("2F2B")


def test_a_stage_of_another_class_is_refused_with_its_module() -> None:
    class PipelineStage:
        """As torch's own, which has the same name."""

    with pytest.raises(RunError, match=r"of penstock \(got: .*test_features.*PipelineStage.*\ntry: from penstock"):
        Schedule1F1B(PipelineStage(), 4)  # type: ignore[arg-type]
