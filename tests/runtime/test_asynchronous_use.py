"""Using asynchronous pipelines: results, drains, checkpoints, traces, failures, and what is refused."""

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.planner import STALENESS, plan_staleness
from penstock.runtime import AsyncEngine
from penstock.runtime.weight_versions import predict
from tests.plans import quick_plan
from tests.runtime.stale_replay import StaleReplay
from tests.runtime.test_asynchronous import OPTIMIZERS, Layer, batches, layers, pipeline, plan_of, replayed
from tests.small_models import WIDTH, noise, seeded, tied

SIZES = [6] * 6


def run(pipe: Any, sizes: list[int] = SIZES) -> list[Any]:
    return [pipe.step(x, target=y) for x, y in batches(sizes)]


def test_the_numbers_differ_from_synchronous_training_and_between_modes() -> None:
    states = [replayed(3, 2, mode, "momentum", [SIZES])[0]["0.linear.weight"] for mode in STALENESS]
    model = layers(3)
    pipe = penstock.Pipeline(model, plan_of(3, 2), loss_fn=mse_loss, local=True)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for x, y in batches(SIZES):
        optimizer.zero_grad()
        pipe.step(x, target=y)
        optimizer.step()
    states.append(model.state_dict()["0.linear.weight"])
    assert len({tuple(state.flatten().tolist()) for state in states}) == 4


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_a_stage_keeps_as_many_versions_as_described(ranks: int, microbatches: int, staleness: str) -> None:
    pipe = pipeline(ranks, microbatches, staleness, "momentum")
    run(pipe, [6] * 10)
    engine = pipe._engine
    assert isinstance(engine, AsyncEngine)
    expected = [entry.versions for entry in plan_staleness(pipe.plan, staleness)]
    assert [engine.weights[stage].stashed_versions for stage in range(ranks)] == expected


def test_results_are_known_some_steps_later() -> None:
    pipe = pipeline(3, 2, "stash", "sgd")
    results = run(pipe)
    # Step t is known after step t + 2 + ceil(2 / 2).
    assert [result.is_known for result in results] == [True] * 3 + [False] * 3
    assert "not known yet" in repr(results[-1])
    with pytest.raises(penstock.RunError, match="not known yet"):
        results[-1].loss.item()
    assert pipe.drain() is None
    losses = [result.loss for result in results]
    for result, loss in zip(results, losses, strict=True):
        weighted = sum(w * value for w, value in zip(result.weights, result.losses, strict=True))
        torch.testing.assert_close(loss, weighted)


def test_a_recorded_stream_is_one_trace() -> None:
    pipe = pipeline(3, 2, "stash", "sgd")
    for x, y in batches(SIZES):
        pipe.step(x, target=y, record=True)
    with pytest.raises(penstock.RunError, match="record must be the same"):
        pipe.step(*batches([6])[0])
    trace = pipe.drain()
    assert trace.program.num_microbatches == 2 * len(SIZES)
    penstock.verify(trace.program)


def test_eval_drains() -> None:
    pipe, (x, y) = pipeline(2, 2, "2bw", "sgd"), batches([6])[0]
    results = run(pipe)
    found = pipe.eval(x, target=y, return_outputs=True)
    model = layers(2)
    model.load_state_dict(pipe.state_dict())
    # Not bit by bit: a microbatch of three samples may be multiplied by another kernel than the batch of six.
    torch.testing.assert_close(found.outputs, model(x).detach(), rtol=1e-12, atol=1e-12)
    assert all(result.is_known for result in results)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_checkpoint_continues_the_training(name: str, tmp_path: Path) -> None:
    pipe, more = pipeline(2, 2, "predict", name), batches([6] * 9)[6:]
    run(pipe)
    with pytest.raises(penstock.RunError, match="batches are in flight"):
        pipe.state_dict()
    pipe.save(tmp_path)
    other = pipeline(2, 2, "predict", name)
    other.load(tmp_path)
    for each in (pipe, other):
        for x, y in more:
            each.step(x, target=y)
        each.drain()
    for key, tensor in pipe.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor)


def test_recomputed_blocks_use_the_weights_of_their_forward() -> None:
    model, batch = layers(2), (noise(8, WIDTH),)
    plan = quick_plan(model, batch, ranks=2, microbatches=1, schedule="1f1b", recompute="full")
    assert all(plan.choices.recompute)
    pipe = penstock.Pipeline(
        model, plan, loss_fn=mse_loss, local=True, staleness="stash", optimizer=OPTIMIZERS["momentum"]
    )
    run(pipe)
    pipe.drain()
    for name, tensor in replayed(2, 1, "stash", "momentum", [SIZES])[0].items():
        assert torch.equal(model.state_dict()[name], tensor)


class Recurrent(nn.Module):
    """An LSTM, which keeps its parameters in a list of its own, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return self.lstm(x.unsqueeze(1))[0].squeeze(1) * self.scale


def test_modules_that_keep_their_own_references_to_parameters() -> None:
    models = [seeded(nn.Sequential(Recurrent(), Layer(), Recurrent())) for _ in range(2)]
    plan = quick_plan(models[0], (noise(8, WIDTH),), ranks=3, microbatches=1, schedule="1f1b")
    pipe = penstock.Pipeline(
        models[0], plan, loss_fn=mse_loss, local=True, staleness="stash", optimizer=OPTIMIZERS["momentum"]
    )
    run(pipe)
    pipe.drain()
    StaleReplay(list(models[1].children()), OPTIMIZERS["momentum"], mse_loss, 1, "stash").run(batches(SIZES))
    for name, tensor in models[1].state_dict().items():
        assert torch.equal(models[0].state_dict()[name], tensor)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_prediction_is_that_of_updates_without_gradient(name: str) -> None:
    parameter = nn.Parameter(noise(WIDTH))
    optimizer = OPTIMIZERS[name]([parameter])
    for step in range(3):
        parameter.grad = noise(WIDTH, seed=step)
        optimizer.step()
    (found,) = predict(optimizer, [parameter], [parameter.detach().clone()], 2)
    other = nn.Parameter(parameter.detach().clone())
    again = OPTIMIZERS[name]([other])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        other.grad = torch.zeros(WIDTH, dtype=torch.float64)
        if name == "adamw":
            # The second moment is predicted to stay, and would decay with a gradient of 0.
            again.state[other]["exp_avg_sq"] /= again.param_groups[0]["betas"][1]
        again.step()
    torch.testing.assert_close(found, other.detach(), rtol=1e-12, atol=0.0)
    assert not torch.equal(found, parameter)


class Failing(Layer):
    """A layer that fails in one of its forwards."""

    left = 0

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        Failing.left -= 1
        if Failing.left == 0:
            raise ValueError("not today")
        return super().forward(x)


def test_a_failed_step_ends_the_stream() -> None:
    model = seeded(nn.Sequential(Layer(), Failing()))
    pipe = pipeline(2, 1, "stash", "momentum", model=model)
    run(pipe, [6] * 3)
    Failing.left = 2
    with pytest.raises(penstock.RunError, match="not today"):
        run(pipe)
    for call in (lambda: run(pipe), pipe.drain, pipe.state_dict, lambda: pipe.eval(noise(6, WIDTH))):
        with pytest.raises(penstock.RunError, match="cannot continue after a failed step"):
            call()


def test_nan_is_not_applied() -> None:
    pipe = pipeline(2, 1, "stash", "sgd")
    run(pipe)
    with pytest.raises(penstock.RunError, match="is NaN or Inf"):
        pipe.step(torch.full((6, WIDTH), torch.nan, dtype=torch.float64), target=noise(6, WIDTH))
    assert all(parameter.isfinite().all() for parameter in pipe.parameters())


def test_a_bad_batch_leaves_the_stream_as_it_was() -> None:
    pipe, x = pipeline(2, 2, "stash", "momentum"), noise(6, WIDTH)
    with pytest.raises(penstock.PenstockError):
        pipe.step(x, target=noise(5, WIDTH))
    found = []
    for index, (x, y) in enumerate(batches(SIZES)):
        if index == 3:
            with pytest.raises(penstock.PenstockError):
                pipe.step(x, target=noise(5, WIDTH))
        found.append(pipe.step(x, target=y))
    pipe.drain()
    state, losses = replayed(2, 2, "stash", "momentum", [SIZES])
    assert all(torch.equal(pipe.state_dict()[name], tensor) for name, tensor in state.items())
    assert [result.number for result in found] == list(range(len(SIZES)))
    torch.testing.assert_close(torch.stack([result.loss for result in found]), torch.stack(losses))


def zero_grad(pipe: penstock.Pipeline) -> None:
    assert pipe.optimizer is not None
    pipe.optimizer.zero_grad()


def clip(pipe: penstock.Pipeline) -> None:
    nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3)


@pytest.mark.parametrize("change", [zero_grad, clip])
@pytest.mark.parametrize("call", ["step", "drain"])
def test_gradients_of_batches_in_flight_must_not_be_changed(change: Callable[..., None], call: str) -> None:
    pipe = pipeline(2, 2, "stash", "momentum")
    run(pipe, [6] * 2)
    change(pipe)
    with pytest.raises(penstock.RunError, match="gradients of batches in flight were changed"):
        _ = run(pipe) if call == "step" else pipe.drain()


def test_a_loop_that_steps_the_optimizer_itself_is_refused_and_can_go_on() -> None:
    found = {}
    for steps_itself in (False, True):
        pipe = pipeline(2, 2, "stash", "momentum")
        run(pipe, [6] * 2)
        if steps_itself:
            assert pipe.optimizer is not None
            with pytest.raises(penstock.RunError, match=r"must not be stepped outside of pipe\.step"):
                pipe.optimizer.step()
        run(pipe, [6])
        pipe.drain()
        zero_grad(pipe)
        found[steps_itself] = pipe.state_dict()
    assert all(torch.equal(found[True][name], tensor) for name, tensor in found[False].items())


def test_a_short_batch_within_a_2bw_stream_is_refused() -> None:
    pipe = pipeline(4, 3, "2bw", "sgd")
    run(pipe, [6, 1])
    with pytest.raises(penstock.RunError, match="at least ranks - 1 microbatches"):
        run(pipe, [6])
    pipe.drain()
    run(pipe, [6])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no optimizer": ({"optimizer": None}, "needs an optimizer"),
    "a class": ({"optimizer": torch.optim.SGD}, "must be a function"),
    "no result": ({"optimizer": lambda params: None}, "must return an optimizer"),
    "scaler": ({"scaler": penstock.GradScaler()}, "does not combine with a scaler"),
    "inputs": ({"inputs": "first"}, "does not combine with inputs"),
    "parallelize_fn": ({"parallelize_fn": lambda stage: None}, "does not combine with parallelize_fn"),
    "skip": ({"options": penstock.RunOptions(nonfinite="skip")}, "does not combine with nonfinite"),
    "unknown": ({"staleness": "fresh"}, "staleness must be one of"),
    "no name": ({"staleness": 3}, "staleness must be one of"),
    "no staleness": ({"staleness": None}, "only an asynchronous pipeline takes an optimizer"),
    "foreign": ({"optimizer": lambda params: torch.optim.SGD(layers(2).parameters())}, "parameters of this rank only"),
    "momentum": ({"staleness": "predict"}, "SGD must have momentum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_combine_is_refused(case: str) -> None:
    given, message = REFUSED[case]
    given = {"staleness": "stash", "name": "sgd", **given}
    with pytest.raises(penstock.PenstockError, match=message):
        pipeline(2, 2, **given)


def test_tied_parameters_are_refused() -> None:
    model = tied()
    plan = quick_plan(model, (torch.zeros(4, 3, dtype=torch.long),), ranks=2, microbatches=2, schedule="1f1b")
    with pytest.raises(penstock.RunError, match="must be used by one stage only"):
        penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True, staleness="stash", optimizer=OPTIMIZERS["sgd"])


def test_calls_that_need_a_flush_are_refused() -> None:
    pipe, (x, y) = pipeline(2, 2, "stash", "sgd"), batches([6])[0]
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: pipe.step(x, target=y, return_outputs=True), "return_outputs must be False"),
        (lambda: pipe.clip_grad_norm_(1.0), "the norm over all ranks is not known"),
        (lambda: pipe.save("unused", torch.optim.SGD(pipe.parameters())), "must be that of the asynchronous pipeline"),
    ]
    for call, message in calls:
        with pytest.raises(penstock.RunError, match=message):
            call()
    run(pipe, [6])
    with pytest.raises(penstock.RunError, match="batches are in flight"):
        pipe.microbatches = 3
    pipe.drain()
    pipe.microbatches = 3
    run(pipe, [6])
    assert pipe.plan.num_microbatches == 3


def test_staleness_and_bytes_are_described() -> None:
    lines = pipeline(3, 1, "stash", "sgd").describe().splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["0", "0", "2", "2.00", "2", "320", "B"],
        ["1", "1", "1", "1.00", "1", "160", "B"],
        ["2", "2", "0", "0.00", "0", "0", "B"],
    ]
    assert "<h2>Without flushes</h2>" in penstock.report(plan_of(3, 1), staleness="stash")
    assert "<h2>Without flushes</h2>" not in penstock.report(plan_of(3, 1))


def failing_rank(where: int) -> None:
    """Train until the stage of one rank fails."""
    model = seeded(nn.Sequential(*(Failing() if index == where else Layer() for index in range(2))))
    Failing.left = 0
    pipe = pipeline(2, 1, "stash", "sgd", False, model=model)
    run(pipe)
    pipe.drain()
    Failing.left = 3
    run(pipe)
    pipe.drain()


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_fails_stops_the_others(where: int) -> None:
    with pytest.raises(penstock.RunError, match="not today"):
        penstock.launch(failing_rank, 2, where)


def a_new_pipeline_after_nan() -> list[float]:
    """The losses of a Pipeline that fails afterwards; checks that those of a new one are equal."""
    os.environ["PENSTOCK_WATCH"] = "0"
    options, (x, y) = penstock.RunOptions(deadline_seconds=5.0), batches([6])[0]

    def losses() -> tuple[Any, list[float]]:
        pipe = pipeline(2, 2, "stash", "sgd", local=False, options=options)
        results = run(pipe)
        pipe.drain()
        return pipe, [float(result.loss) for result in results]

    def run_until_nan(pipe: Any) -> None:
        pipe.step(x, target=y * torch.nan)
        pipe.drain()

    pipe, before = losses()
    with pytest.raises(penstock.RunError, match="is NaN or Inf"):
        run_until_nan(pipe)
    assert losses()[1] == before
    return before


@pytest.mark.xdist_group("gloo")
def test_a_new_pipeline_does_not_take_the_messages_of_a_failed_one() -> None:
    first, second = penstock.launch(a_new_pipeline_after_nan, 2)
    assert first == second


def different_calls(drained_rank: int) -> None:
    """Drain on one rank, and take another step on the other."""
    pipe = pipeline(2, 1, "stash", "sgd", False)
    run(pipe)
    if torch.distributed.get_rank() == drained_rank:
        pipe.drain()
    else:
        run(pipe)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("drained_rank", [0, 1])
def test_different_calls_raise_an_error(drained_rank: int) -> None:
    with pytest.raises(penstock.RunError, match="called drain"):
        penstock.launch(different_calls, 2, drained_rank)


def autocast_on_one_rank() -> str:
    """Train with autocast on all ranks, and then on rank 0 only; returns the error."""
    os.environ["PENSTOCK_WATCH"] = "0"
    pipe = pipeline(2, 1, "stash", "sgd", False, options=penstock.RunOptions(deadline_seconds=5.0))
    with torch.autocast("cpu", torch.bfloat16):
        run(pipe)
    pipe.drain()
    is_on = dist.get_rank() == 0
    with torch.autocast("cpu", torch.bfloat16, enabled=is_on), pytest.raises(penstock.RunError) as refused:
        run(pipe)
    return str(refused.value)


@pytest.mark.xdist_group("gloo")
def test_autocast_on_one_rank_is_explained_on_all() -> None:
    """Also on a rank that loses contact with the other, which has seen the difference first."""
    for error in penstock.launch(autocast_on_one_rank, 2):
        assert "rank 1 called step while rank 0 called step(autocast=torch.bfloat16)" in error


def failing_after_a_refused_evaluation() -> float:
    """Seconds until this rank raises the error of an asynchronous step that fails on the rank of the last stage."""
    os.environ["PENSTOCK_WATCH"] = "0"
    fails = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ValueError("not today")
        return mse_loss(output, target)

    options = penstock.RunOptions(deadline_seconds=30.0, transport="shared")
    pipe, (x, y) = pipeline(2, 2, "stash", "sgd", local=False, loss_fn=loss_fn, options=options), batches([6])[0]
    pipe.step(x, target=y)
    rows = 6 - 2 * dist.get_rank()
    with pytest.raises(penstock.RunError, match="the ranks were given different batches"):
        pipe.eval(x[:rows], target=y[:rows])
    fails.append(True)
    start = time.monotonic()
    with pytest.raises(penstock.RunError):
        run(pipe, [6] * 4)
    return time.monotonic() - start


@pytest.mark.xdist_group("gloo")
def test_a_refused_evaluation_does_not_delay_the_error_of_a_later_step() -> None:
    """The failed step ends the messages, so that the other rank does not wait for them until the deadline."""
    assert max(penstock.launch(failing_after_a_refused_evaluation, 2)) < 15.0
