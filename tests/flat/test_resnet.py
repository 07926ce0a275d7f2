"""The ResNet of penstock.flat trains and evaluates with the numbers of one process."""

import pytest
import torch

from tests.flat.resnet import Numbers, in_one_process, on_a_rank
from tests.process_pool import Pools


def joined(states: list[Numbers]) -> Numbers:
    return {name: value for state in states for name, value in state.items()}


@pytest.mark.gloo
@pytest.mark.parametrize(("ranks", "samples", "microbatches"), [(2, 8, 4), (3, 10, 4), (3, 4, 2)])
def test_a_resnet_on_several_ranks_has_the_numbers_of_one_process_bit_for_bit(
    pools: Pools, ranks: int, samples: int, microbatches: int
) -> None:
    found = pools[ranks].run(on_a_rank, ranks, samples, microbatches)
    losses, _, state, answers = in_one_process(samples, microbatches)
    assert torch.equal(torch.stack(found[-1][0]), torch.stack(losses))
    together = joined([own for _, _, own, _ in found])
    assert together.keys() == state.keys()
    assert [name for name in state if not torch.equal(together[name], state[name])] == []
    # One process answers for all samples at once: the kernels add in another order.
    torch.testing.assert_close(found[-1][3], answers, rtol=1e-9, atol=1e-12)
    assert all(losses == [None] * 3 and answers is None for losses, _, _, answers in found[:-1])


@pytest.mark.gloo
def test_gradients_are_clipped_by_the_norm_of_all_ranks(pools: Pools) -> None:
    found = pools[3].run(on_a_rank, 3, 4, 2, 0.5)
    losses, norms, state, _ = in_one_process(4, 2, 0.5)
    assert float(norms[0]) > 0.5
    for _, own, _, _ in found:
        assert float(own[0]) == pytest.approx(float(norms[0]), rel=1e-13)
        # Sums in another order are other numbers, which later steps make larger.
        torch.testing.assert_close(torch.stack(own), torch.stack(norms), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(torch.stack(found[-1][0]), torch.stack(losses), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(joined([own for _, _, own, _ in found]), state, rtol=1e-6, atol=1e-9)
