"""A schedule is found by the words that people type."""

import pytest

from penstock.errors import ScheduleError
from penstock.schedules import SCHEDULES, build, find


@pytest.mark.parametrize("name", SCHEDULES)
def test_case_and_punctuation_do_not_matter(name):
    variants = [name, name.upper(), name.title(), name.replace("_", ""), name.replace("_", "-"), f" {name} "]
    assert [find(variant) for variant in variants] == [SCHEDULES[name]] * len(variants)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("interleaved1f1b", "interleaved"),
        ("Interleaved1F1B", "interleaved"),
        ("LoopedBFS", "looped_bfs"),
        ("interleavedzerobubble", "interleaved_zb"),
        ("InterleavedZeroBubble", "interleaved_zb"),
        ("zbvzerobubble", "zbv"),
        ("ZBVZeroBubble", "zbv"),
        ("ZB-H1", "zb_h1"),
        ("V-Half", "v_half"),
        ("DualPipeV", "dualpipe_v"),
        ("Schedule1F1B", "1f1b"),
        ("ScheduleGPipe", "gpipe"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleLoopedBFS", "looped_bfs"),
        ("ScheduleInterleavedZeroBubble", "interleaved_zb"),
        ("ScheduleZBVZeroBubble", "zbv"),
        ("ScheduleDualPipeV", "dualpipe_v"),
    ],
)
def test_the_names_of_torch_and_of_the_papers_work(typed, name):
    assert find(typed) is SCHEDULES[name]


def test_another_name_builds_the_same_schedule():
    assert build("ZBVZeroBubble", 4, 8) == build("zbv", 4, 8)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("gpip", "gpipe"), ("interleave", "interleaved"), ("zbvzerobuble", "zbv"), ("vhalf2", "v_half")],
)
def test_a_misspelt_name_is_met_with_the_one_that_was_meant(typed, meant):
    with pytest.raises(ScheduleError) as refused:
        find(typed)
    assert str(refused.value) == (
        f"unknown schedule (name: '{typed}')\ntry: did you mean {meant}? one of {', '.join(SCHEDULES)}"
    )


@pytest.mark.parametrize("typed", ["", "xyz", "?", None, 7])
def test_a_name_like_no_other_is_met_with_the_list(typed):
    with pytest.raises(ScheduleError, match=r"unknown schedule \(name: .*\)\ntry: one of ") as refused:
        find(typed)
    assert "did you mean" not in str(refused.value)
