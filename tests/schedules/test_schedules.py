"""What holds for every schedule of the table, whatever its idea."""

from collections import Counter

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Kind
from penstock.passes import PASSES, lower, verify
from penstock.schedules import SCHEDULES, build
from tests.selection import covering

EVERY_PASS = tuple(PASSES)
SIZES = {ranks: range(1, 15) for ranks in range(1, 7)} | {8: (1, 5, 8, 13, 16, 27), 16: (3, 16, 35)}


def stages_per_rank(name):
    return SCHEDULES[name].allowed_stages_per_rank or (1, 2, 3, 4)


def each_size(name, ranks):
    return [(ranks, microbatches, stages) for stages in stages_per_rank(name) for microbatches in SIZES[ranks]]


every_schedule = pytest.mark.parametrize("name", SCHEDULES)
every_number_of_ranks = pytest.mark.parametrize("ranks", SIZES)


# Name, ranks, microbatches, stages per rank.
EVERY_SIZE = [(name, *size) for name in SCHEDULES for ranks in SIZES for size in each_size(name, ranks)]
SOME_SIZES = covering(EVERY_SIZE)


@pytest.mark.all_combinations
@pytest.mark.untraced
@every_number_of_ranks
@every_schedule
def test_orders_are_lawful_and_complete_before_and_after_lowering(name, ranks, is_whole):
    sizes = [size for one, *size in (EVERY_SIZE if is_whole else SOME_SIZES) if (one, size[0]) == (name, ranks)]
    assert sizes
    for size in sizes:
        schedule = build(name, *size)
        verify(schedule)
        verify(lower(schedule, passes=EVERY_PASS))


@every_schedule
def test_every_stage_runs_every_microbatch_forward_once_and_backward_once(name):
    for ranks, microbatches, stages in each_size(name, 3):
        done = Counter()
        for order in build(name, ranks, microbatches, stages).orders:
            done.update((part.kind, part.stage, part.microbatch) for action in order for part in action.parts)
        each = [(stage, microbatch) for stage in range(ranks * stages) for microbatch in range(microbatches)]
        assert set(done.values()) == {1}
        assert sorted((s, m) for kind, s, m in done if kind is Kind.FORWARD) == each
        assert sorted((s, m) for kind, s, m in done if kind in (Kind.BACKWARD, Kind.INPUT_GRAD)) == each
        assert sorted((s, m) for kind, s, m in done if kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)) == each


@every_schedule
def test_microbatches_go_forward_through_a_stage_in_ascending_order(name):
    for order in build(name, 4, 10).orders:
        forwards = [part for action in order for part in action.parts if part.kind is Kind.FORWARD]
        assert all(
            before.microbatch < after.microbatch
            for place, after in enumerate(forwards)
            for before in forwards[:place]
            if before.stage == after.stage
        )


@every_schedule
def test_the_sizes_are_those_asked_for(name):
    for stages in stages_per_rank(name):
        schedule = build(name, 5, 7, stages)
        assert (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages) == (5, 7, 5 * stages)


@every_schedule
def test_building_twice_gives_equal_schedules(name):
    assert build(name, 4, 9) == build(name, 4, 9)
    assert str(build(name, 4, 9)) == str(build(name, 4, 9))


@every_schedule
def test_a_member_knows_the_name_it_has_in_the_table(name):
    assert SCHEDULES[name].name == name
    assert SCHEDULES[name]().stages_per_rank in stages_per_rank(name)


@every_schedule
def test_only_split_backward_schedules_split_every_backward(name):
    kinds = {part.kind for order in build(name, 3, 6).orders for action in order for part in action.parts}
    if SCHEDULES[name].splits_backward:
        assert kinds == {Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}
    else:
        assert Kind.BACKWARD in kinds


@every_schedule
@pytest.mark.parametrize("size", [0, -1, True, 2.5, "4", None])
def test_sizes_that_are_no_counts_are_refused_with_their_value(name, size):
    for sizes, word in (((size, 4), "ranks"), ((4, size), "microbatches")):
        with pytest.raises(ScheduleError) as refused:
            build(name, *sizes)
        assert f"{word} must be a whole number, 1 or more" in str(refused.value)
        assert f"(schedule: {name}, {word}: {size!r})" in str(refused.value)


@every_schedule
@pytest.mark.parametrize("sizes", [(8193, 1), (1, 65537), (8192, 65536), (10**12, 10**12), (4000, 4000)])
def test_absurd_sizes_are_refused_at_once(name, sizes):
    with pytest.raises(ScheduleError, match="stages, microbatches and passes must be at most the limits") as refused:
        build(name, *sizes)
    assert f"microbatches: {sizes[1]}" in str(refused.value)


@every_schedule
@pytest.mark.parametrize("stages", [0, -1, True, 2.5])
def test_stages_per_rank_that_are_no_counts_are_refused(name, stages):
    with pytest.raises(ScheduleError, match="stages_per_rank must be a whole number, 1 or more"):
        build(name, 4, 4, stages)


@pytest.mark.parametrize("name", [name for name, member in SCHEDULES.items() if member.allowed_stages_per_rank])
def test_a_wrong_number_of_stages_per_rank_is_refused_with_the_right_one(name):
    (only,) = SCHEDULES[name].allowed_stages_per_rank
    *others, last = [other for other, member in SCHEDULES.items() if not member.allowed_stages_per_rank]
    with pytest.raises(ScheduleError) as refused:
        build(name, 4, 4, only + 1)
    assert str(refused.value) == (
        f"stages_per_rank must be {only} for this schedule "
        f"(schedule: {name}, stages per rank: {only + 1})\n"
        f"try: stages_per_rank={only}, or {', '.join(others)} or {last}, which take any"
    )
