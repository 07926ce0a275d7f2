"""demo --schedules: every schedule compared, drawn and written."""

import json
from pathlib import Path

import pytest

from penstock import Schedule, verify
from penstock.cli import demo_schedules
from penstock.schedules import SCHEDULES


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra `plot` were not installed: also faster."""
    monkeypatch.setattr("penstock.cli.demo_schedules.find_spec", lambda name: None)


@pytest.mark.usefixtures("without_matplotlib")
def test_the_demo_compares_and_draws_schedules_and_suggests_commands_that_work(call, tmp_path: Path) -> None:
    result = call("demo", "--schedules")
    assert result.exit_code == 0
    assert not (tmp_path / "penstock-demo" / "schedules.png").exists()
    assert f"{len(demo_schedules.FORMULAS)} of {len(demo_schedules.FORMULAS)} agree" in result.output
    assert "zbv: makespan 25.5 s, bubble 5.9 %" in result.output
    assert "try next\n  penstock simulate" in result.output
    commands = [line.split()[1:] for line in result.output.splitlines() if line.startswith("  penstock ")]
    assert len(commands) == 5
    for command in commands:
        assert call(*command).exit_code == 0


def test_the_demo_writes_pictures_a_trace_and_every_order(call, tmp_path: Path) -> None:
    answer = json.loads(call("demo", "--schedules", "--out", "deep/er", "--json").stdout)
    out = tmp_path / "deep" / "er"
    assert {"schedules.svg", "memory.svg", "trace.json.gz", "orders"} <= {path.name for path in out.iterdir()}
    assert [row["schedule"] for row in answer["runs"]] == list(SCHEDULES)
    for name in SCHEDULES:
        verify(Schedule.from_csv(out / "orders" / f"{name}.csv"))


@pytest.mark.usefixtures("without_matplotlib")
def test_a_figure_that_is_not_as_known_fails_the_demo(call, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = demo_schedules.Formula("1f1b", "bubble", "0", lambda p, m: 0.0)
    monkeypatch.setattr(demo_schedules, "FORMULAS", (wrong,))
    result = call("demo", "--schedules")
    assert "the simulation disagrees with the known formulas (1f1b bubble)" in result.output
    assert result.exit_code == 5


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 16), (8, 32)])
def test_what_is_known_holds_at_other_sizes_too(ranks: int, microbatches: int) -> None:
    from penstock.cli.options import Sizes, Times
    from penstock.cli.simulate import simulate_schedule

    runs = [simulate_schedule(name, Sizes(ranks, microbatches), Times()) for name in SCHEDULES]
    assert [finding for finding in demo_schedules.compare_formulas(runs) if not finding.agrees] == []
