"""Whatever the schedule, the shape of the model, the costs and the links: times are those of an event queue."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir import Cluster, Cuts, Link, MessageCost, StageCosts
from penstock.passes import PASSES, lower
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate
from tests.simulate.reference import Reference

NEAR = {"rel": 1e-9, "abs": 1e-9}


def drawn(name, seed):
    """A program, costs and a cluster in which nothing is equal to anything else."""
    random = Random(seed)
    schedule = build(name, random.randint(1, 4), random.randint(1, 6))
    num_stages, num_ranks = schedule.num_stages, schedule.num_ranks
    skips = [edge for edge in combinations(range(num_stages), 2) if random.random() < 0.3]
    silent = [edge for edge in skips if random.random() < 0.3 and edge[1] - edge[0] > 1]
    cuts = Cuts.of(num_stages, (*Cuts.chain(num_stages).edges, *skips), silent)
    times = [[random.choice((0.0, random.uniform(0.1, 3.0))) for _ in range(num_stages)] for _ in range(4)]
    messages = [MessageCost(a, b, random.randrange(9), random.randrange(9)) for a, b in cuts.edges]
    links = [
        Link(a, b, random.choice((0.0, 0.5)), random.choice((None, 2.0, 5.0)))
        for a in range(num_ranks)
        for b in range(num_ranks)
        if random.random() < 0.7
    ]
    cluster = Cluster(num_ranks, latency=0.25, bandwidth=3.0, links=tuple(links), overlap=random.random())
    program = lower(schedule, cuts=cuts, passes=tuple(PASSES)[: random.randint(1, len(PASSES))])
    return program, StageCosts(*times, messages=messages), cluster


@pytest.mark.untraced
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_passes_start_and_end_as_in_an_event_queue(name, seed):
    program, costs, cluster = drawn(name, seed)
    trace, reference = simulate(program, costs, cluster), Reference(program, costs, cluster)
    expected = [span for spans in reference.spans for span in spans]
    assert [span.action for span in trace.spans] == [action for action, _, _ in expected]
    passes = [place for place, span in enumerate(trace.spans) if hasattr(span.action, "parts")]
    assert [trace.starts[k] for k in passes] == pytest.approx([expected[k][1] for k in passes], **NEAR)
    assert list(trace.ends) == pytest.approx([end for _, _, end in expected], **NEAR)


@pytest.mark.untraced
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_messages_leave_and_arrive_as_in_an_event_queue(name, seed):
    program, costs, cluster = drawn(name, seed)
    trace, reference = simulate(program, costs, cluster), Reference(program, costs, cluster)
    expected = [reference.messages[transfer.action] for transfer in trace.transfers]
    assert [transfer.start for transfer in trace.transfers] == pytest.approx([sent for sent, _ in expected], **NEAR)
    assert [transfer.end for transfer in trace.transfers] == pytest.approx([arrived for _, arrived in expected], **NEAR)
