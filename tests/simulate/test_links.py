"""Messages take their time on links: latency, bandwidth, one after another, both ways at once, beside compute."""

import pytest

from penstock.ir import Cluster, Link, MessageCost, Program, StageCosts
from penstock.simulate import simulate

# Two ranks, two microbatches; what rank 0 sends forward and rank 1 backward.
PROGRAM = Program.from_csv(
    """
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
""".strip()
)
UNIT = StageCosts.uniform(2)


def sized(forward_bytes, backward_bytes, forward=1.0):
    """Passes of one second (a backward of two), and messages of so many bytes."""
    message = MessageCost(0, 1, forward_bytes, backward_bytes)
    return StageCosts((forward, 1), (1, 1), (1, 1), messages=(message,))


def spans(trace):
    return {str(span.action): (span.start, span.end) for span in trace.spans if "SEND" not in str(span.action)}


def transfers(trace):
    return {str(transfer.action): (transfer.start, transfer.end) for transfer in trace.transfers}


def test_without_a_cluster_messages_take_no_time():
    trace = simulate(PROGRAM, sized(100, 100))
    assert transfers(trace) == {"0SEND_F0": (1, 1), "0SEND_F1": (2, 2), "1SEND_B0": (4, 4), "1SEND_B1": (7, 7)}
    assert trace.makespan == 9


def test_latency_delays_arrival():
    trace = simulate(PROGRAM, UNIT, Cluster(2, latency=0.5))
    assert transfers(trace)["0SEND_F0"] == (1, 1.5)
    assert spans(trace)["1F0"] == (1.5, 2.5)


def test_latency_does_not_occupy_the_link():
    # Both messages are under way at once.
    trace = simulate(PROGRAM, UNIT, Cluster(2, latency=10.0))
    assert transfers(trace)["0SEND_F0"] == (1, 11)
    assert transfers(trace)["0SEND_F1"] == (2, 12)


def test_bandwidth_stretches_a_message_by_its_bytes():
    trace = simulate(PROGRAM, sized(3, 5), Cluster(2, bandwidth=2.0))
    assert transfers(trace)["0SEND_F0"] == (1, 2.5)
    assert transfers(trace)["1SEND_B0"] == (5.5, 8)


def test_messages_on_one_link_go_one_after_another():
    trace = simulate(PROGRAM, sized(4, 0), Cluster(2, bandwidth=1.0))
    assert transfers(trace)["0SEND_F0"] == (1, 5)
    assert transfers(trace)["0SEND_F1"] == (5, 9)


def test_compute_goes_on_while_a_message_is_under_way():
    trace = simulate(PROGRAM, sized(4, 0), Cluster(2, bandwidth=1.0))
    assert spans(trace)["0F1"] == (1, 2)


def test_the_two_directions_of_a_link_do_not_delay_each_other():
    # 1SEND_B0 goes at 5 + 3 = 8, while 0SEND_F1 is still on its way from 5 to 9.
    trace = simulate(PROGRAM, sized(4, 4), Cluster(2, bandwidth=1.0))
    assert transfers(trace) == {"0SEND_F0": (1, 5), "0SEND_F1": (5, 9), "1SEND_B0": (8, 12), "1SEND_B1": (12, 16)}


def test_every_link_has_its_own_latency_and_bandwidth():
    slow_back = Cluster(2, latency=0.5, bandwidth=4.0, links=(Link(1, 0, latency=2.0, bandwidth=1.0),))
    trace = simulate(PROGRAM, sized(4, 4), slow_back)
    assert transfers(trace)["0SEND_F0"] == (1, 2.5)
    assert transfers(trace)["1SEND_B0"] == (5.5, 11.5)


def test_messages_to_different_ranks_leave_together():
    fan_out = Program.from_csv(
        "0F0,0SEND_F0,0SEND_F0>2,0RECV_B0,0RECV_B0<2,0B0\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n"
        "2RECV_F0,2RECV_F0<0,2F0,2B0,2SEND_B0,2SEND_B0>0"
    )
    messages = tuple(MessageCost(a, b, 6, 0) for a, b in ((0, 1), (0, 2), (1, 2)))
    costs = StageCosts((1,) * 3, (1,) * 3, (1,) * 3, messages=messages)
    trace = simulate(fan_out, costs, Cluster(3, bandwidth=2.0))
    assert (transfers(trace)["0SEND_F0"], transfers(trace)["0SEND_F0>2"]) == ((1, 4), (1, 4))
    assert spans(trace)["2F0"] == (8, 9)  # after 1F0 from 4 to 5 and its message from 5 to 8


def test_stages_of_one_rank_exchange_nothing():
    together = Program.from_csv("0F0,1F0,1B0,0B0")
    assert simulate(together, sized(100, 100), Cluster(1, latency=9.0, bandwidth=1.0)).makespan == 6


@pytest.mark.parametrize(("overlap", "makespan"), [(0.0, 9.0), (0.5, 8.5), (1.0, 8.0)])
def test_an_overlapped_pair_hides_a_share_of_its_shorter_half(overlap, makespan):
    pair = Program.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1,0F2,0B2")
    assert simulate(pair, None, Cluster(1, overlap=overlap)).makespan == makespan
