"""A request says what is wrong with it, before anything is measured."""

import pytest

from penstock.errors import PenstockError
from penstock.ir import Cluster
from penstock.planner import Request


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"schedule": ["1f1b"]}, "no schedule"),
        ({"schedule": "onef1b"}, "unknown schedule"),
        ({"partitioner": None}, "no partitioner"),
        ({"partitioner": []}, "no partitioner"),
        ({"partitioner": "metiss"}, "unknown partitioner"),
        ({"stages_per_rank": 0}, "stages per rank are a whole number"),
        ({"stages_per_rank": "2"}, "stages per rank are a whole number"),
        ({"stages_per_rank": 10**9}, "too many stages"),
        ({"recompute": "some"}, "unknown recompute"),
        ({"budget_seconds": -1.0}, "the budget is seconds"),
    ],
)
def test_a_wish_that_is_none_is_refused_with_the_way_out(wish: dict[str, object], words: str) -> None:
    with pytest.raises(PenstockError, match=rf"{words}(.|\n)*try: "):
        Request(Cluster(2), **wish)  # type: ignore[arg-type]


def test_case_and_punctuation_of_names_do_not_matter() -> None:
    asked = Request(Cluster(2), schedule="ZB-H1", partitioner="Pipe_Dream")
    assert (asked.schedule, asked.partitioner) == ("zb_h1", "pipedream")
    assert Request(Cluster(2), schedule="AUTO", partitioner="Auto") == Request(Cluster(2))
