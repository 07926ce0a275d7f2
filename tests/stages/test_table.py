"""The table of architectures in the docs says what the trials assert."""

from tests.stages.survey import TABLE
from tests.stages.trials import DEPTHS, Trial
from tests.zoo import ZOO


def rows() -> dict[tuple[str, str], str]:
    cells = [line.strip("| ").split(" | ") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return {(line[0], line[1]): line[-1] for line in cells if len(line) == 5 and line[1] in DEPTHS}


def test_the_table_lists_every_model_at_every_granularity():
    assert list(rows()) == [(name, granularity) for name in ZOO for granularity in DEPTHS]


def test_the_table_shows_no_difference_beyond_what_the_trials_allow():
    for (name, granularity), shown in rows().items():
        assert (0.0 if shown == "exact" else float(shown)) <= Trial(name, granularity).tolerance


def test_at_least_forty_architectures_are_shown():
    assert len({name for name, _ in rows()}) >= 40
