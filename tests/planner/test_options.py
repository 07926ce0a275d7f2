"""PlanOptions are checked before anything is measured."""

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.ir import Cluster
from penstock.planner import PlanOptions
from penstock.schedules import build


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"ranks": 0}, "ranks must be a whole number"),
        ({"microbatches": "many"}, "microbatches must be a whole number"),
        ({"microbatches": 10**9}, "microbatches must be at most"),
        ({"schedule": ["1f1b"]}, "schedule must be a name or a Schedule"),
        ({"schedule": "onef1b"}, "unknown schedule"),
        ({"partitioner": None}, "partitioner must be a name or stages"),
        ({"partitioner": []}, "partitioner must be a name or stages"),
        ({"partitioner": "metiss"}, "unknown partitioner"),
        ({"stages_per_rank": 0}, "stages_per_rank must be a whole number"),
        ({"stages_per_rank": "2"}, "stages_per_rank must be a whole number"),
        ({"stages_per_rank": 10**9}, "must have at most"),
        ({"recompute": "some"}, "recompute must be"),
        ({"budget_seconds": -1.0}, "budget_seconds must be 0 or more"),
    ],
)
def test_invalid_options_are_refused_with_a_hint(option: dict[str, object], words: str) -> None:
    with pytest.raises(PenstockError, match=rf"{words}(.|\n)*try: "):
        PlanOptions(**{"ranks": 2} | option)  # type: ignore[arg-type]


def test_case_and_punctuation_of_names_do_not_matter() -> None:
    asked = PlanOptions(2, schedule="ZB-H1", partitioner="Pipe_Dream")
    assert (asked.schedule, asked.partitioner) == ("zb_h1", "pipedream")
    assert PlanOptions(2, schedule="AUTO", partitioner="Auto") == PlanOptions(2)


def test_memory_is_part_of_the_cluster() -> None:
    assert PlanOptions(3, memory="1KiB").cluster == Cluster(3, memory=1024)
    assert PlanOptions(Cluster(3, latency=0.5), memory=7).cluster == Cluster(3, memory=7, latency=0.5)


def test_a_csv_is_read_as_a_schedule(tmp_path) -> None:
    schedule = build("gpipe", 2, 3)
    schedule.to_csv(tmp_path / "order.csv")
    for given in (tmp_path / "order.csv", str(tmp_path / "order.csv"), (tmp_path / "order.csv").read_text()):
        assert PlanOptions(2, schedule=given).schedule == schedule


def test_counts_are_stored_as_int():
    options = PlanOptions(np.int64(2), np.int64(4), stages_per_rank=np.int64(2))
    assert [type(each) for each in (options.ranks, options.microbatches, options.stages_per_rank)] == [int] * 3
