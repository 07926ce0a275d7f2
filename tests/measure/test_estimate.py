"""estimate: seconds from work, for a device that need not be here."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.ir import DeviceSpeed
from penstock.measure import estimate, measure_speed
from penstock.measure.work import WorkCounter, fused_attention
from tests.measure.subjects import ROWS, WIDTH, Block, chain, measured

ARITHMETIC = DeviceSpeed(1.0, 1e18)
"""one operation per second, and bytes for nothing"""
MEMORY = DeviceSpeed(1e18, 1.0)
FLOPS = 2 * ROWS * WIDTH * WIDTH
"""of one product of a batch with a square weight"""


def test_a_linear_takes_one_product_forward_and_one_for_each_gradient():
    cost = estimate(measured(chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))), ARITHMETIC)["1"]
    passes = (cost.forward, cost.backward, cost.input_grad, cost.weight_grad)
    assert passes == pytest.approx((FLOPS, 2 * FLOPS, FLOPS, FLOPS))


def test_the_first_layer_of_a_model_returns_no_gradient():
    cost = estimate(measured(chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))), ARITHMETIC)["0"]
    assert (cost.input_grad, cost.weight_grad) == pytest.approx((0.0, FLOPS))


def test_where_there_is_no_arithmetic_bytes_count():
    cost = estimate(measured(chain(Block(), nn.ReLU())), MEMORY)["1"]
    assert cost.forward == 2 * ROWS * WIDTH * 4


def test_an_embedding_reads_the_rows_that_it_picks_only():
    model = nn.Sequential(nn.Embedding(1000, WIDTH), nn.Linear(WIDTH, WIDTH))
    cost = estimate(measured(model, torch.arange(ROWS)), MEMORY)["0"]
    assert cost.forward == 8 * ROWS + 2 * 4 * ROWS * WIDTH


def test_the_same_model_has_the_same_profile_and_the_seconds_of_a_step_are_those_of_its_nodes():
    one, other = (estimate(measured(chain()), DeviceSpeed(1e10, 1e9, 1e-6)) for _ in range(2))
    assert one == other
    assert one.step_seconds == one.seconds


def test_views_are_free_and_what_is_expanded_is_read_once():
    work = WorkCounter(MEMORY)
    x = torch.ones(4, 1)
    seconds, _ = work.seconds(lambda: x.expand(4, 100).t().reshape(400))
    assert seconds == 4 * 4 + 4 * 400


def test_attention_without_numbers_has_the_form_and_the_work_of_attention_with_them():
    def run(device: str) -> tuple[torch.Size, int]:
        query, key = (torch.ones(2, heads, 6, 4, device=device, requires_grad=True) for heads in (4, 2))
        mask = torch.ones(6, 6, dtype=torch.bool, device=device)
        work = WorkCounter(ARITHMETIC)
        with fused_attention():
            call = lambda: functional.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=True)  # noqa: E731
            _, result = work.seconds(call)
            work.seconds(lambda: result.sum().backward())
        return key.grad.shape, work.flops

    assert run("meta") == run("cpu")


def test_attention_is_torchs_own_again_afterwards():
    before = functional.scaled_dot_product_attention
    with fused_attention():
        assert functional.scaled_dot_product_attention is not before
    assert functional.scaled_dot_product_attention is before


def test_a_model_without_numbers_is_estimated_on_a_batch_with_numbers():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1000, WIDTH), Block(), Block())
    profile = estimate(measured(model, torch.arange(ROWS)), ARITHMETIC)
    assert profile["1"].forward == FLOPS
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_speed_of_this_device_is_measured():
    speed = measure_speed("cpu")
    assert speed.flops_per_second > 1e6
    assert speed.bytes_per_second > 1e6
    assert 0 < speed.operation_seconds < 0.1
