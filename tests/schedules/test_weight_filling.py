"""move_weight_grads: weight gradients move into gaps, everything else stays in order."""

from penstock.ir import Kind, Schedule, StageCosts, schedule_length
from penstock.passes import verify
from penstock.schedules import build
from penstock.schedules.weight_filling import move_weight_grads

WAITING = """
0F0 0F1 0I0 0I1 0W0 0W1
1F0 1F1 1I0 1I1 1W0 1W1
""".strip()


def without_weights(schedule):
    return [[str(action) for action in order if action.kind is not Kind.WEIGHT_GRAD] for order in schedule.orders]


def test_a_rank_that_would_wait_runs_a_weight_gradient_instead():
    # Rank 0 waits three seconds for the gradient of microbatch 1, with the weight gradient of microbatch 0 at hand.
    costs = StageCosts(forward=(1, 1), input_grad=(1, 3), weight_grad=(2, 1))
    filled = move_weight_grads(Schedule.from_csv(WAITING), costs)
    assert str(filled).splitlines()[0] == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert (schedule_length(Schedule.from_csv(WAITING), costs).makespan, schedule_length(filled, costs).makespan) == (
        14.0,
        12.0,
    )


def test_forwards_and_input_gradients_keep_their_order():
    costs = StageCosts((1, 3, 2, 1), (2, 1, 1, 3), (3, 2, 1, 1))
    plain = build("zb_h1", 4, 8)
    assert without_weights(move_weight_grads(plain, costs)) == without_weights(plain)


def test_a_schedule_that_cannot_get_faster_is_unchanged():
    plain = build("zb_h2", 4, 8)
    assert move_weight_grads(plain, StageCosts.uniform(4)) == plain


def test_a_full_rank_runs_weight_gradients_before_the_next_forward():
    # Forwards are long, so a rank without a limit would start the next one before it runs a weight gradient.
    costs = StageCosts((3, 3), (1, 1), (1, 1), activation_bytes=(1, 1))
    verify(move_weight_grads(build("zb_h1", 2, 6), costs), in_flight=2)


def test_stages_that_hold_nothing_are_still_run_in_order():
    costs = StageCosts((3, 3, 3, 3), (3, 1, 1, 3), (3, 2, 1, 1), activation_bytes=(1, 0, 0, 0))
    verify(move_weight_grads(build("zbv", 2, 2), costs))


def test_memory_released_by_an_input_gradient_is_not_counted_as_held():
    # Stage 3 keeps nothing for its weight gradients: putting them off makes no room for another forward.
    costs = StageCosts(
        forward=(2, 1, 2, 3),
        input_grad=(2, 3, 1, 2),
        weight_grad=(3, 1, 2, 1),
        activation_bytes=(2, 1, 4, 4),
        weight_grad_bytes=(1, 1, 4, 0),
    )
    plain = build("interleaved_zb", 2, 4)
    assert [peak(plain, costs, rank) for rank in (0, 1)] == [12, 7]
    assert [peak(move_weight_grads(plain, costs), costs, rank) for rank in (0, 1)] == [12, 7]


def peak(schedule, costs, rank):
    kept, late = costs.activation_bytes, costs.weight_grad_bytes
    change = {
        Kind.FORWARD: lambda stage: kept[stage],
        Kind.INPUT_GRAD: lambda stage: late[stage] - kept[stage],
        Kind.WEIGHT_GRAD: lambda stage: -late[stage],
    }
    held, most = 0, 0
    for action in schedule.orders[rank]:
        held += change[action.kind](action.stage)
        most = max(most, held)
    return most
