"""All ranks make the same calls in the same order; otherwise each of them reports who called what, and all continue."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import penstock
from penstock.runtime import ProcessGroups
from penstock.runtime.agreement import Agreement
from penstock.runtime.sync import RankSync, SyncRequest, SyncVote
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

pytestmark = pytest.mark.gloo

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
Call = Callable[[Any], Any]


def pipe_of(ranks: int = 2, model: nn.Module | None = None, **given: Any) -> Any:
    model = chain(4) if model is None else model
    plan = quick_plan(model, (X,), ranks=ranks, microbatches=3, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=mse_loss, **given)


def clip(pipe: Any) -> Any:
    return pipe.clip_grad_norm_(1.0)


def clip_to_less(pipe: Any) -> Any:
    return pipe.clip_grad_norm_(0.5)


def clip_by_the_largest(pipe: Any) -> Any:
    return pipe.clip_grad_norm_(1.0, float("inf"))


def step(pipe: Any) -> Any:
    return pipe.step(X, target=TARGET)


def recorded_step(pipe: Any) -> Any:
    return pipe.step(X, target=TARGET, record=True)


def step_with_outputs(pipe: Any) -> Any:
    return pipe.step(X, target=TARGET, return_outputs=True)


def evaluation(pipe: Any) -> Any:
    return pipe.eval(X, target=TARGET)


def evaluation_with_outputs(pipe: Any) -> Any:
    return pipe.eval(X, target=TARGET, return_outputs=True)


def state(pipe: Any) -> Any:
    return pipe.full_state_dict()


def state_everywhere(pipe: Any) -> Any:
    return pipe.full_state_dict(everywhere=True)


def error_of(call: Call, pipe: Any) -> str:
    """The message of the error that a call raises."""
    try:
        call(pipe)
    except penstock.RunError as error:
        return str(error)
    return "not refused"


MIXED = [
    (step, clip, "rank 1 called clip_grad_norm_(1, 2) while rank 0 called step"),
    (step, recorded_step, "rank 1 called step(record=True) while rank 0 called step"),
    (step_with_outputs, step, "rank 1 called step while rank 0 called step(return_outputs=True)"),
    (step, evaluation, "rank 1 called eval while rank 0 called step"),
    (evaluation, evaluation_with_outputs, "rank 1 called eval(return_outputs=True) while rank 0 called eval"),
    (state, step, "rank 1 called step while rank 0 called full_state_dict"),
    (state, clip, "rank 1 called clip_grad_norm_(1, 2) while rank 0 called full_state_dict"),
    (state, state_everywhere, "rank 1 called full_state_dict(everywhere=True) while rank 0 called full_state_dict"),
    (clip, clip_to_less, "rank 1 called clip_grad_norm_(0.5, 2) while rank 0 called clip_grad_norm_(1, 2)"),
    (clip, clip_by_the_largest, "rank 1 called clip_grad_norm_(1, inf) while rank 0 called clip_grad_norm_(1, 2)"),
]


def mixed_calls(pairs: list[tuple[Call, Call]]) -> list[tuple[str, float, float]]:
    """The errors of pairs of calls, one for each rank, and the loss and norm of correct calls after them."""
    pipe, found = pipe_of(), []
    pipe.step(X, target=TARGET)
    for pair in pairs:
        words = error_of(pair[dist.get_rank()], pipe)
        for parameter in pipe.parameters():
            parameter.grad = None
        found.append((words, float(step(pipe).loss), float(clip(pipe))))
    return found


def test_different_calls_are_refused_on_all_ranks_with_the_calls_named(pools: Pools) -> None:
    first, second = pools[2].run(mixed_calls, [(one, other) for one, other, _ in MIXED])
    assert first == second
    for (words, loss, norm), (_, _, expected) in zip(first, MIXED, strict=True):
        assert words.split(" (step: ")[0].split("\n")[0] == expected
        assert "try: the same calls in the same order" in words
        assert (loss, norm) == first[0][1:]


def one_of_three() -> str:
    pipe = pipe_of(3)
    return error_of(evaluation if dist.get_rank() == 1 else step, pipe)


def test_of_many_ranks_the_one_that_differs_is_named(pools: Pools) -> None:
    (words,) = set(pools[3].run(one_of_three))
    assert words.startswith("rank 1 called eval while rank 0 called step (")
    assert "rank 0: step, rank 1: eval, rank 2: step" in words


def other_pipelines() -> str:
    first, second = pipe_of(), pipe_of()
    return error_of(step, second if dist.get_rank() else first)


def test_a_step_of_another_pipeline_is_another_call(pools: Pools) -> None:
    (words,) = set(pools[2].run(other_pipelines))
    assert "of another Pipeline" in words


def scaled_and_clipped() -> str:
    scaler = penstock.GradScaler(8.0)
    pipe = pipe_of(scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    step(pipe)
    return error_of(clip if dist.get_rank() else lambda _: scaler.unscale_(optimizer), pipe)


def test_a_scaler_meets_all_ranks_too(pools: Pools) -> None:
    (words,) = set(pools[2].run(scaled_and_clipped))
    assert words.startswith("rank 1 called clip_grad_norm_(1, 2) while rank 0 called unscale_")


def one_bad_batch() -> tuple[str, float]:
    """Rank 1 is given a batch that it cannot cut; the error, and the loss of a correct step after it."""
    pipe = pipe_of()
    target = TARGET[:5] if dist.get_rank() else TARGET
    return error_of(lambda pipe: pipe.step(X, target=target), pipe), float(step(pipe).loss)


def test_a_batch_that_one_rank_refuses_is_refused_by_all_in_its_words(pools: Pools) -> None:
    first, second = pools[2].run(one_bad_batch)
    assert first == second
    assert first[0].startswith("the first dimension of a target must be the batch (step: 0, rank: 1,")


# -------------------------------------------------------------------------------------------------- options of ranks


def options_of(rank: int) -> list[dict[str, Any]]:
    """For each option that ranks could be given differently, what the rank gets."""
    run = penstock.RunOptions
    return [
        {"reduction": "sum" if rank else "mean"},
        {"inputs": "first" if rank else "all"},
        {"split": {"input": 0} if rank else None},
        {"options": run(seed=rank)},
        {"options": run(nonfinite="skip" if rank else "raise")},
        {"options": run(check_inputs_every=rank)},
        {"options": run(restore_gradients=not rank)},
        {"scaler": penstock.GradScaler(2.0 + rank)},
        {"scaler": penstock.GradScaler(2.0) if rank else None},
    ]


WORDS = [
    "reduction must be the same on every rank (rank 0: 'mean', rank 1: 'sum')",
    "inputs must be the same on every rank (rank 0: 'all', rank 1: 'first')",
    "split must be the same on every rank (rank 0: {}, rank 1: {'input': 0})",
    "seed must be the same on every rank (rank 0: 0, rank 1: 1)",
    "nonfinite must be the same on every rank (rank 0: raise, rank 1: skip)",
    "check_inputs_every must be the same on every rank (rank 0: 0, rank 1: 1)",
    "restore_gradients must be the same on every rank (rank 0: True, rank 1: False)",
    "scaler must be the same on every rank (rank 0: (2.0, 2.0, 0.5, 2000), rank 1: (3.0, 2.0, 0.5, 2000))",
    "scaler must be the same on every rank (rank 0: None, rank 1: (2.0, 2.0, 0.5, 2000))",
]


def differently_built() -> list[str]:
    return [error_of(lambda _, given=given: pipe_of(**given), None) for given in options_of(dist.get_rank())]


def test_ranks_with_different_options_are_refused_with_both_values(pools: Pools) -> None:
    first, second = pools[2].run(differently_built)
    assert first == second
    for found, expected in zip(first, WORDS, strict=True):
        assert found.split("\n")[0] == expected


def other_plans() -> list[str]:
    """The errors of ranks with another schedule, another number of microbatches, other cuts, another loss."""
    rank, model = dist.get_rank(), chain(4)

    def built(loss_fn: Any = mse_loss, microbatches: int = 3, schedule: str = "1f1b", cuts: Any = "uniform") -> Any:
        plan = quick_plan(model, (X,), ranks=2, microbatches=microbatches, schedule=schedule, partitioner=cuts)
        return penstock.Pipeline(model, plan, loss_fn=loss_fn)

    cases = [
        {"schedule": "gpipe" if rank else "1f1b"},
        {"microbatches": 3 + rank},
        {"cuts": [["0"], ["1", "2", "3"]] if rank else [["0", "1"], ["2", "3"]]},
        {"loss_fn": mse_loss if rank else None},
    ]
    return [error_of(lambda _, case=case: built(**case), None) for case in cases]


def test_ranks_with_different_plans_are_refused(pools: Pools) -> None:
    first, second = pools[2].run(other_plans)
    assert first == second
    for found, name in zip(first, ("schedule", "number of microbatches", "stages", "loss_fn"), strict=True):
        assert found.startswith(f"{name} must be the same on every rank (rank 0: ")


def each_its_own_plan(axes: tuple[int, ...]) -> tuple[list[list[str]], float]:
    """Ranks that asked for the same and found different cuts: the stages that they follow, and their loss."""
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("dp", "pp")) if len(axes) > 1 else None
    model, cut = chain(4), 1 + dist.get_rank() % 3
    names = [str(block) for block in range(4)]
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b", partitioner=[names[:cut], names[cut:]])
    plan = replace(plan, search=replace(plan.search, asked=(("schedule", "auto"),)))
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, mesh=mesh)
    return [list(stage) for stage in pipe.plan.partition.stages], float(pipe.step(X, target=X).loss)


@pytest.mark.parametrize("axes", [(2,), (2, 2)])
def test_ranks_that_searched_for_the_same_follow_the_plan_of_the_first(pools: Pools, axes: tuple[int, ...]) -> None:
    found = pools[math.prod(axes)].run(each_its_own_plan, axes)
    assert [len(stage) for stage in found[0][0]] == [1, 3]
    assert all(each == found[0] for each in found)


# --------------------------------------------------------------------------------------------------------- replicas


def mixed_replicas() -> tuple[str, str, float]:
    """One replica evaluates while the other trains; one is built with another seed; then all goes well."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    pipe = pipe_of(mesh=mesh)
    calls = error_of(evaluation if replica else step, pipe)
    seeds = error_of(lambda _: pipe_of(mesh=mesh, options=penstock.RunOptions(seed=replica)), None)
    return calls, seeds, float(step(pipe).loss)


def test_different_calls_of_replicas_are_refused(pools: Pools) -> None:
    results = pools[4].run(mixed_replicas)
    assert len(set(results)) == 1
    calls, seeds, _ = results[0]
    assert calls.startswith("replica 1 called eval while replica 0 called step")
    assert seeds.startswith("seed must be the same on every replica (replica 0: 0, replica 1: 1)")


def one_rank_of_a_replica() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return error_of(evaluation if dist.get_rank() == 3 else step, pipe_of(mesh=mesh))


def test_an_error_in_one_replica_is_raised_in_the_others(pools: Pools) -> None:
    words = pools[4].run(one_rank_of_a_replica)
    assert all("rank 1 called eval while rank 0 called step" in found for found in words)
    assert all("replica: 1" in found for found in words[:2])


def disagreement_beside_a_collective() -> tuple[str, list[int]]:
    """The error of a sync whose ranks disagree, and what rank 0 broadcasts to rank 1 while the sync is open."""
    rank, group = dist.get_rank(), dist.group.WORLD
    sync = RankSync(ProcessGroups(rank, 2, group, group)).concurrent(1)
    values = torch.arange(3) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    sync.start(SyncRequest("step", 0), SyncVote(Agreement([f"of rank {rank}"])))
    # Rank 1 gathers the texts first, rank 0 broadcasts first.
    work = dist.broadcast(values, src=0, async_op=True) if rank == 0 else None
    words = error_of(lambda _: sync.finish(), None)
    if work is None:
        dist.broadcast(values, src=0)
    else:
        work.wait()
    return words, values.tolist()


def test_a_concurrent_sync_is_independent_of_collectives_of_the_user(pools: Pools) -> None:
    (words, sent), (other_words, received) = pools[2].run(disagreement_beside_a_collective)
    assert "of rank 0" in words
    assert words == other_words
    assert sent == received == [0, 1, 2]


def test_an_operation_without_a_monitor_raises_its_own_error() -> None:
    def fail() -> None:
        raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed") as caught:
        ProcessGroups.local(2).start(fail)
    assert caught.value.__cause__ is None


def test_a_copy_of_an_error_keeps_the_facts_about_it() -> None:
    error = penstock.RunError("lost", hint="again", rank=1).on_all_ranks()
    error.is_final, error.rank_summary = True, "ValueError: not today"
    for copied in (error.at(step=3), error.with_hint("later")):
        assert (copied.is_shared, copied.is_final, copied.rank_error_type) == (True, True, "ValueError")
    assert str(error.at(step=3)) == "lost (step: 3, rank: 1)\ntry: again"
    assert str(error.with_hint("later")) == "lost (rank: 1)\ntry: later"
