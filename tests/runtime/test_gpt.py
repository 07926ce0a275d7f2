"""GPTs as people write them by hand are cut between their blocks and trained like the whole model."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.ir import Plan, from_json, to_json
from tests.parity import Values, WholeModel, assert_close, assert_parts_close, held_by, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.runtime.gpt import LENGTH, VOCABULARY, Gpt, NestedBlock
from tests.selection import some
from tests.small_models import seeded, tokens

STEPS, MICROBATCHES = 2, 3
IDX, TARGETS = tokens(7, LENGTH, below=VOCABULARY), tokens(7, LENGTH, seed=1, below=VOCABULARY)
TARGETS[1, 2:] = -1


def gpt(dropout: float, **choices: Any) -> nn.Module:
    return seeded(Gpt(dropout=dropout, **choices))


def train(trained: Any) -> Values:
    optimizer = torch.optim.SGD(held_by(trained).parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(trained.step(IDX, TARGETS).loss)
        optimizer.step()
    return values(trained, losses)


def train_on_rank(dropout: float, plan: str) -> Values:
    return train(penstock.Pipeline(gpt(dropout), from_json(plan, Plan)))


def test_blocks_inside_a_module_dict_stay_whole() -> None:
    names = [node.name for node in penstock.capture(gpt(0.0), (IDX, TARGETS)).graph.nodes]
    assert names == [
        *("/arange", "transformer.wte", "transformer.wpe", "/add", "transformer.drop"),
        *(f"transformer.h.{number}" for number in range(4)),
        *("transformer.ln_f", "lm_head", "/view", "/view@2", "/cross_entropy"),
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("dropout", some([0.2], [0.0, 0.2]))
def test_a_gpt_is_planned_and_trained_on_two_processes(pools: Pools, dropout: float) -> None:
    model = gpt(dropout)
    plan = penstock.plan(model, (IDX, TARGETS), ranks=2, microbatches=MICROBATCHES, budget_seconds=0.5)
    parts = pools[2].run(train_on_rank, dropout, to_json(plan))
    whole: Any = WholeModel(model, forward=lambda *batch: model(*batch)[1])
    if dropout:
        # Random numbers depend on the seed, the microbatch and the block, so they are the same in a single stage.
        one_stage = quick_plan(model, (IDX, TARGETS), ranks=1, microbatches=MICROBATCHES, schedule="gpipe")
        whole = penstock.Pipeline(model, one_stage, local=True)
    expected = train(whole)
    losses = {name: value for name, value in expected.items() if name.startswith("loss")}
    for part in parts:
        assert_close({name: part.pop(name) for name in losses}, losses)
    assert_parts_close(parts, model)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_block_with_a_module_dict_stays_whole_and_is_exact(dropout: float) -> None:
    model = gpt(dropout, block=NestedBlock, tied=False, blocks=2)
    plan = quick_plan(model, (IDX, TARGETS), ranks=2, microbatches=MICROBATCHES, schedule="1f1b")
    assert "transformer.h.1" in [node.name for node in plan.graph.nodes]
    assert penstock.check(model, plan, (IDX, TARGETS)).ok


def test_without_targets_there_is_no_loss() -> None:
    model = gpt(0.0)
    plan = quick_plan(model, (IDX, TARGETS), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, local=True)
    result = pipe.eval(IDX, return_outputs=True)
    assert result.loss is None
    torch.testing.assert_close(result.outputs[0], model.eval()(IDX)[0])
    with pytest.raises(penstock.RunError, match="the model returned no loss"):
        pipe.step(IDX)
