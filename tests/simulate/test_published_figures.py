"""Figures that others published or measured, reproduced to the digit."""

import csv
from pathlib import Path

import pytest

from penstock.ir import Cluster, StageCosts
from penstock.passes import lower
from penstock.schedules import build
from penstock.simulate import simulate

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden" / "zero_bubble_table.csv"


def run(name, ranks, microbatches):
    """Forward, input gradient and weight gradient of a stage take one second each, an activation is one byte."""
    schedule = build(name, ranks, microbatches)
    ones = (1,) * schedule.num_stages
    return simulate(lower(schedule), StageCosts(ones, ones, ones, activation_bytes=ones))


def most_in_flight(trace):
    """In units of one rank's layers for one microbatch."""
    stages_per_rank = trace.program.num_stages / trace.num_ranks
    return max(trace.peak_bytes(rank) for rank in range(trace.num_ranks)) / stages_per_rank


@pytest.mark.parametrize(
    ("name", "percent", "in_flight"),
    [
        ("gpipe", 27.3, 8),
        ("1f1b", 27.3, 4),
        ("looped_bfs", 15.8, 8),
        ("interleaved", 15.8, 5.5),
        ("interleaved_zb", 5.9, 4),
        ("zbv", 5.9, 4),
        ("dualpipe_v", 11.1, 4.5),
    ],
)
def test_bubble_and_in_flight_of_4_ranks_and_8_microbatches(name, percent, in_flight):
    trace = run(name, 4, 8)
    assert round(100 * trace.bubble, 1) == percent
    assert most_in_flight(trace) == in_flight


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("gpipe", 17.9),
        ("1f1b", 17.9),
        ("looped_bfs", 9.9),
        ("interleaved", 9.9),
        ("interleaved_zb", 3.5),
        ("zbv", 3.5),
        ("dualpipe_v", 6.8),
    ],
)
def test_bubble_of_8_ranks_and_32_microbatches(name, percent):
    assert round(100 * run(name, 8, 32).bubble, 1) == percent


# Qi et al. 2023, "Zero Bubble Pipeline Parallelism": profiled microseconds and the bubble rates simulated from them.
ZERO_BUBBLE = """
p,  m,   F_us,  I_us,  W_us,  comm_us, rate_1f1b, rate_zb_h1, rate_zb_h2
8,  24,  18522, 18086, 9337,  601,     0.2431,    0.1585,     0.1083
8,  64,  18546, 18097, 9321,  762,     0.1240,    0.0674,     0.0444
8,  24,  29718, 29444, 19927, 527,     0.2347,    0.1323,     0.0698
8,  32,  29802, 29428, 19530, 577,     0.1898,    0.1045,     0.0559
16, 48,  11347, 11248, 8132,  377,     0.2552,    0.1397,     0.0672
16, 64,  11307, 11254, 8101,  379,     0.2082,    0.1088,     0.0516
32, 96,  10419, 10207, 7715,  408,     0.2646,    0.1421,     0.0641
32, 128, 10408, 10204, 7703,  408,     0.2168,    0.1106,     0.0490
"""


def rows(text):
    return list(csv.DictReader(text.strip().splitlines(), skipinitialspace=True))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
@pytest.mark.parametrize("row", rows(ZERO_BUBBLE), ids=lambda row: f"p{row['p']}-m{row['m']}-F{row['F_us']}")
def test_bubble_rates_of_the_zero_bubble_paper(name, row):
    ranks, microbatches = int(row["p"]), int(row["m"])
    forward, input_grad, weight_grad, latency = (float(row[key]) for key in ("F_us", "I_us", "W_us", "comm_us"))
    costs = StageCosts.uniform(ranks, forward, input_grad, weight_grad)
    trace = simulate(lower(build(name, ranks, microbatches)), costs, Cluster(ranks, latency=latency))
    assert f"{trace.span_bubble:.4f}" == row[f"rate_{name}"]


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden files are not here")
def test_the_table_above_is_that_of_the_golden_file():
    golden = rows(GOLDEN.read_text(encoding="utf-8"))
    assert rows(ZERO_BUBBLE) == [{key: row[key] for key in rows(ZERO_BUBBLE)[0]} for row in golden]
