"""capture, split, explain and generate_code work as API.md writes them."""

import torch

import penstock
from penstock.partitioners import uniform
from tests.capture.models import Stack

BATCH = torch.randn(6, 4)


def test_capture_and_split_are_functions_of_the_package():
    captured = penstock.capture(Stack(), args=(BATCH,), kwargs={"scale": 2.0}, depth=None, basic_blocks=())
    assert len(penstock.split(captured, uniform(captured.graph, 3))) == 3


def test_explain_lists_what_crosses_tensor_by_tensor():
    captured = penstock.capture(Stack(), (BATCH,))
    text = penstock.explain(captured, uniform(captured.graph, 2))
    assert "1 message of 1 tensor per microbatch: 192 B forward, 192 B backward" in text
    assert "float32[6, 8]" in text


def test_explain_takes_a_graph_as_well():
    graph = penstock.capture(Stack(), (BATCH,)).graph
    assert penstock.explain(graph, uniform(graph, 1)) == "one stage: nothing crosses"
