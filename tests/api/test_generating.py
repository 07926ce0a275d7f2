"""generate_code takes a captured model, and a partition or a plan of it."""

import pytest
import torch

import penstock
from penstock.errors import CodeError, PartitionError
from penstock.partitioners import uniform
from tests.capture.models import Stack
from tests.codegen.generated import imported
from tests.plans import quick_plan

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_a_plan_is_written_with_its_placement(tmp_path):
    model = Stack(6)
    plan = quick_plan(model, (BATCH,), ranks=2, microbatches=2, schedule="zbv")
    captured = penstock.capture(model, (BATCH,))
    file = imported(penstock.generate_code(captured, plan, tmp_path / "stages.py"))
    assert file.PLACEMENT == (0, 1, 1, 0)
    assert "- rank 1: Stage2(" in file.__doc__


def test_without_a_plan_every_stage_is_on_a_rank_of_its_own(tmp_path):
    captured = penstock.capture(Stack(), (BATCH,))
    path = penstock.generate_code(captured, uniform(captured.graph, 3), str(tmp_path / "stages.py"))
    assert imported(path).PLACEMENT == (0, 1, 2)


def test_a_path_that_is_none_is_refused():
    captured = penstock.capture(Stack(), (BATCH,))
    with pytest.raises(CodeError, match="and a path"):
        penstock.generate_code(captured, uniform(captured.graph, 2), 5)


def test_things_that_are_no_model_or_cut_are_refused(tmp_path):
    captured = penstock.capture(Stack(), (BATCH,))
    with pytest.raises(CodeError, match="a captured model, a partition or plan"):
        penstock.generate_code(captured.model, uniform(captured.graph, 2), tmp_path / "stages.py")
    with pytest.raises(CodeError, match="a captured model, a partition or plan"):
        penstock.generate_code(captured, [["head"]], tmp_path / "stages.py")


def test_a_partition_of_another_model_is_refused(tmp_path):
    captured, other = penstock.capture(Stack(4), (BATCH,)), penstock.capture(Stack(5), (BATCH,))
    with pytest.raises(PartitionError):
        penstock.generate_code(captured, uniform(other.graph, 2), tmp_path / "stages.py")
    assert list(tmp_path.iterdir()) == []
