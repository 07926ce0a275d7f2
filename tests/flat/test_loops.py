"""The loops that users of flat pipelines write run as they are, with the numbers of one process."""

import pytest
import torch

from tests.flat import loops
from tests.process_pool import Pools


@pytest.mark.gloo
def test_training_and_evaluation_under_autocast_have_the_numbers_of_one_process_bit_for_bit(pools: Pools) -> None:
    (first, nothing), (second, losses) = pools[2].run(loops.train_and_evaluate)
    state, expected = loops.in_one_process()
    together = first | second
    assert together.keys() == state.keys()
    assert [name for name in state if not torch.equal(together[name], state[name])] == []
    assert nothing == []
    assert losses == expected
