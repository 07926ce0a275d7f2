"""When a rank of a pipeline breaks: every rank stops soon, and the error says who, where and why."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import penstock
from penstock.errors import RunError
from penstock.runtime import transport

RANKS, MICROBATCHES, FATEFUL = 4, 4, 6
X, Y = torch.randn(8, 8), torch.randn(8, 8)
pytestmark = [pytest.mark.usefixtures("tidy"), pytest.mark.xdist_group("gloo")]


class Fateful(nn.Module):
    """A block to which something happens at a certain call in training, once ranks are processes."""

    def __init__(self, fate=None):
        super().__init__()
        self.linear, self.fate, self.calls = nn.Linear(8, 8), fate, 0

    def forward(self, x):
        """A layer."""
        self.calls += dist.is_initialized()
        if self.fate and self.calls == FATEFUL:
            self.fate()
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


def losing():
    """From now on this rank's messages go nowhere."""
    transport.Between.send = lambda self, route, tensors: transport._GONE


def train(fate, schedule="1f1b"):
    blocks = [Fateful(fate if index == 2 else None) for index in range(RANKS)]
    model = nn.Sequential(*blocks)
    plan = penstock.plan(model, (X,), ranks=RANKS, microbatches=MICROBATCHES, schedule=schedule)
    options = penstock.RunOptions(deadline_seconds=1.5)
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, options=options)
    for block in blocks:
        block.calls = 0
    for _ in range(4):
        pipe.step(X, target=Y)


def broken(fate, **kwargs):
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        penstock.launch(train, RANKS, fate, **kwargs)
    return str(caught.value), time.monotonic() - began


def test_an_exception_shows_the_failing_rank_first_and_one_line_for_each_other():
    text, _ = broken(boom)
    first, *_ = text.splitlines()
    assert first == "a rank failed (rank: 2, step: 1, stage: 2, microbatch: 1, action: 2F1)"
    assert "KeyError: 'boom'" in text
    for rank in (0, 1, 3):
        assert sum(line.startswith(f"rank {rank}: ") for line in text.splitlines()) == 1


def test_a_killed_rank_is_named_with_its_signal():
    text, _ = broken(killed)
    assert text.startswith("a rank was killed (rank: 2, signal: SIGKILL)")


@pytest.mark.parametrize(("fate", "words"), [(stopped, "its process is stopped"), (endless, "working on 2F1")])
def test_a_rank_that_hangs_is_found_at_the_deadline(fate, words):
    text, _ = broken(fate)
    assert "waited in vain for" in text
    assert f"rank 2: did not move, {words}" in text
    assert "deadline seconds: 1.5" in text


def test_a_lost_message_is_told_apart_from_a_slow_rank():
    text, _ = broken(losing)
    assert "in vain" in text
    assert "message was lost" in text


def test_running_out_of_memory_comes_with_ways_out():
    text, _ = broken(greedy)
    assert "memory" in text
    assert "recompute='full'" in text


def different_batches():
    model = nn.Sequential(*[Fateful() for _ in range(RANKS)])
    plan = penstock.plan(model, (X,), ranks=RANKS, microbatches=MICROBATCHES, schedule="gpipe")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss)
    rows = 4 if dist.get_rank() == 2 else 8
    try:
        pipe.step(X[:rows], target=Y[:rows])
    except RunError as error:
        return str(error)


def test_ranks_with_batches_of_different_form_all_refuse_with_both_specs():
    texts = penstock.launch(different_batches, RANKS)
    assert len(set(texts)) == 1
    assert "producer: stage 0, consumer: stage 1" in texts[0]
    assert "float32[2, 8]" in texts[0]
    assert "float32[1, 8]" in texts[0]


def failing_and_going_on():
    fate = [True]

    def once():
        if fate.pop() if fate else False:
            raise ValueError("a bad sample")

    model = nn.Sequential(*[Fateful(once if index == 1 else None) for index in range(2)])
    plan = penstock.plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, local=True)
    pipe.step(X, target=Y)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model[1].calls = FATEFUL - 1
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
