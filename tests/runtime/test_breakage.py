"""When a rank of a pipeline fails, every rank stops, and the error names the rank, the action and the cause."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import penstock
from penstock.errors import RunError
from penstock.runtime import groups
from tests.leftovers import nothing_left
from tests.plans import quick_plan

RANKS, MICROBATCHES, FAULTY_CALL = 4, 4, 6
X, Y = torch.randn(8, 8), torch.randn(8, 8)
pytestmark = [pytest.mark.usefixtures("tidy"), pytest.mark.xdist_group("gloo")]


class FaultyBlock(nn.Module):
    """A block with a fault that occurs at a certain call, once ranks are processes."""

    def __init__(self, fault=None):
        super().__init__()
        self.linear, self.fault, self.calls = nn.Linear(8, 8), fault, 0

    def forward(self, x):
        """A layer."""
        self.calls += dist.is_initialized()
        if self.fault and self.calls == FAULTY_CALL:
            self.fault()
        return torch.tanh(self.linear(x))


def boom():
    raise KeyError("boom")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def endless():
    while True:
        time.sleep(0.01)


def greedy():
    torch.empty(1 << 60)


class Gone:
    """The handle of a message that is never sent."""

    def wait(self, deadline=None):
        """At once."""


def losing():
    """Drop all further messages of the stages of this rank."""
    send = dist.ProcessGroup.send
    dist.ProcessGroup.send = lambda group, tensors, peer, tag: (
        send(group, tensors, peer, tag) if tag == groups.SYNC_TAG else Gone()
    )


def train(fault, place=2, faulty_call=FAULTY_CALL):
    blocks = [FaultyBlock(fault if index == place else None) for index in range(RANKS)]
    model = nn.Sequential(*blocks)
    plan = quick_plan(model, (X,), ranks=RANKS, microbatches=MICROBATCHES, schedule="1f1b")
    # Short only where the deadline is what ends the step: on a busy machine ordinary waits may take seconds.
    deadline = 4.0 if fault in (stopped, endless, losing) else 60.0
    # Messages can be lost on a network only.
    options = penstock.RunOptions(deadline_seconds=deadline, transport="distributed" if fault is losing else "auto")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, options=options)
    for block in blocks:
        block.calls = FAULTY_CALL - faulty_call
    for _ in range(4):
        pipe.step(X, target=Y)


def broken(fault, *places):
    with pytest.raises(RunError) as caught:
        penstock.launch(train, RANKS, fault, *places)
    return str(caught.value)


class Outcome(NamedTuple):
    """The results or the error of a launch, and how long it took."""

    results: list[Any]
    error: str
    seconds: float


def outcome(fn, ranks, *args):
    start, results, error = time.monotonic(), [], ""
    try:
        results = penstock.launch(fn, ranks, *args, timeout=200)
    except RunError as raised:
        error = str(raised)
    return Outcome(results, error, time.monotonic() - start)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcomes of launches that sleep or wait for a deadline most of the time: four run at once."""
    launches = {fn: (fn, 2) for fn in (slow_to_record, sleeps_between_steps, fails_before_its_first_step)}
    launches |= {fault: (train, RANKS, fault) for fault in (stopped, endless, losing)}
    launches |= {fn: (fn, 2) for fn in (refused_and_going_on, leaves_early)}
    with nothing_left(tmp_path_factory.mktemp("launches") / "temporary"), ThreadPoolExecutor(4) as threads:
        futures = {key: threads.submit(outcome, *launch) for key, launch in launches.items()}
        return {key: future.result() for key, future in futures.items()}


def test_an_exception_shows_the_failing_rank_first_and_one_line_for_each_other():
    text = broken(boom)
    first, *_ = text.splitlines()
    assert first == "a rank failed (rank: 2, step: 1, stage: 2, microbatch: 1, action: 2F1)"
    assert "KeyError: 'boom'" in text
    for rank in (0, 1, 3):
        assert sum(line.startswith(f"rank {rank}: ") for line in text.splitlines()) == 1


def test_a_rank_that_fails_before_its_first_message_is_reported():
    first, *_ = broken(boom, 0, MICROBATCHES + 1).splitlines()
    assert first == "a rank failed (rank: 0, step: 1, stage: 0, microbatch: 0, action: 0F0)"


def test_a_killed_rank_is_named_with_its_signal():
    text = broken(killed)
    assert text.startswith("a rank was killed (rank: 2, signal: SIGKILL, step: 1, action: 2F1)")


@pytest.mark.parametrize(("fault", "words"), [(stopped, "its process is stopped"), (endless, "working on 2F1")])
def test_a_rank_that_hangs_is_found_at_the_deadline(outcomes, fault, words):
    text = outcomes[fault].error
    assert "timed out waiting for" in text
    assert f"rank 2: no progress, {words}" in text
    assert "deadline seconds: 4" in text


def test_a_lost_message_is_distinguished_from_a_slow_rank(outcomes):
    text = outcomes[losing].error
    assert "timed out waiting for" in text
    assert "message was lost" in text


def test_running_out_of_memory_comes_with_ways_out():
    text = broken(greedy)
    assert "memory" in text
    assert "recompute='full'" in text


def leaves_early():
    model = nn.Sequential(*[FaultyBlock() for _ in range(2)])
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss)
    for step in range(5):
        if step == 3 and dist.get_rank() == 1:
            return
        pipe.step(X, target=Y)


def test_a_rank_that_returns_early_is_named_with_the_step_it_did_not_come_to(outcomes):
    text = outcomes[leaves_early].error
    assert "rank 0 stopped because rank 1 finished before the start of step 3" in text


def sleeps_between_steps():
    model = nn.Sequential(*[FaultyBlock() for _ in range(2)])
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    options = penstock.RunOptions(deadline_seconds=4.0)
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, options=options)
    for step in range(3):
        if step == 2 and dist.get_rank() == 0:
            time.sleep(240)
        pipe.step(X, target=Y)


def test_a_rank_that_does_not_come_to_a_step_is_named_with_that_step(outcomes):
    text = outcomes[sleeps_between_steps].error
    assert text.startswith("a rank failed (rank: 1, step: 2)")
    assert "rank 1 timed out waiting for the other ranks at the start of step 2 (step: 2, deadline seconds: 4" in text
    assert "rank 0: has not reached the start of step 2, between steps for " in text
    assert "after step 1" in text


def fails_before_its_first_step():
    """Rank 1 catches its own error before its first step, and does not take the step with the others."""
    model = nn.Sequential(*[FaultyBlock() for _ in range(2)])
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    options = penstock.RunOptions(deadline_seconds=3.0, transport="distributed")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, options=options)
    if dist.get_rank() == 0:
        pipe.step(X, target=Y)
    time.sleep(240)


def test_the_deadline_holds_in_the_first_step_if_one_rank_does_not_take_it(outcomes):
    _, text, seconds = outcomes[fails_before_its_first_step]
    assert "timed out waiting for the other ranks at the start of step 0 (step: 0, deadline seconds: 3" in text
    assert "increase RunOptions(deadline_seconds=...), or --deadline" in text
    assert seconds < 60.0


def slow_to_record():
    """The model of one rank takes longer than the deadline to be recorded, and its first pass too."""
    model = nn.Sequential(*[FaultyBlock((lambda: time.sleep(4.0)) if index == 1 else None) for index in range(2)])
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    options = penstock.RunOptions(deadline_seconds=3.0)
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, options=options)
    model[1].calls = FAULTY_CALL - 1
    if dist.get_rank() == 0:
        model[1].fault = None
    return float(pipe.step(X, target=Y).loss)


def test_a_rank_that_records_or_computes_longer_than_the_deadline_is_awaited_in_the_first_step(outcomes):
    first, second = outcomes[slow_to_record].results
    assert first == second


def refused_and_going_on():
    model = nn.Sequential(*[FaultyBlock() for _ in range(2)])
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss)
    pipe.step(X, target=Y)
    try:
        pipe.step(X, target=Y, record=dist.get_rank() == 1)
    except RunError:
        # Longer than a rank looks on while another has failed.
        time.sleep(3.0 * dist.get_rank())
    return float(pipe.step(X, target=Y).loss)


def test_ranks_continue_after_an_error_that_all_of_them_raised(outcomes):
    first, second = outcomes[refused_and_going_on].results
    assert first == second


def different_batches():
    model = nn.Sequential(*[FaultyBlock() for _ in range(RANKS)])
    plan = quick_plan(model, (X,), ranks=RANKS, microbatches=MICROBATCHES, schedule="gpipe")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss)
    rows = 4 if dist.get_rank() == 2 else 8
    try:
        pipe.step(X[:rows], target=Y[:rows])
    except RunError as error:
        return str(error)


def test_ranks_with_batches_of_different_form_all_refuse_with_both_specs():
    texts = penstock.launch(different_batches, RANKS)
    assert len(set(texts)) == 1
    assert "input: input, rank 0: float32[8, 8], rank 2: float32[4, 8]" in texts[0]


def failing_and_going_on():
    fault = [True]

    def once():
        if fault.pop() if fault else False:
            raise ValueError("a bad sample")

    model = nn.Sequential(*[FaultyBlock(once if index == 1 else None) for index in range(2)])
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, local=True)
    pipe.step(X, target=Y)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model[1].calls = FAULTY_CALL - 1
    return model, pipe, before


def test_after_a_failed_step_inside_one_process_the_next_one_is_right(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    model, pipe, _ = failing_and_going_on()
    with pytest.raises(RunError, match="a bad sample") as caught:
        pipe.step(X, target=Y)
    assert caught.value.values["step"] == 1
    model.zero_grad()
    loss = pipe.step(X, target=Y).loss
    expected = functional.mse_loss(model(X), Y)
    torch.testing.assert_close(loss, expected.detach())
