"""Models that `pipeline` records and cuts: tied weights, skip connections, means over labels; the same as torch's."""

import pytest
import torch

from penstock.errors import PartitionError
from penstock.pipelining import SplitPoint, pipe_split, pipeline
from tests.pipelining import features
from tests.pipelining.runs import PENSTOCK, TORCH, batch, blocks
from tests.process_pool import Pools


def test_a_pipe_called_like_the_model_returns_the_same() -> None:
    model, ids, mask, _ = features.tied_model()
    pipe = pipeline(model, (ids,), {"mask": mask})
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(ids, mask=mask), model(ids, mask), rtol=0, atol=0)
    names = [name for stage in range(2) for name, _ in pipe.get_stage_module(stage).named_parameters()]
    assert set(names) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert "0 -> 1" in str(pipe)


@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        ({"1": SplitPoint.BEGINNING}, 2),
        ({"1": SplitPoint.END}, 2),
        ({"0": SplitPoint.END, "1": SplitPoint.BEGINNING, "2.second": SplitPoint.BEGINNING}, 3),
    ],
)
def test_cuts_are_before_or_after_a_module_and_inside_of_blocks(spec: dict[str, SplitPoint], stages: int) -> None:
    model, (x, _) = blocks(4), batch(4)
    pipe = pipeline(model, (x,), split_spec=spec)
    assert pipe.num_stages == stages
    torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=0)


def test_unknown_modules_and_policies_are_refused() -> None:
    model, (x, _) = blocks(2), batch(4)
    with pytest.raises(PartitionError, match="must name modules that the forward calls"):
        pipeline(model, (x,), split_spec={"7": SplitPoint.END})
    with pytest.raises(PartitionError, match="split_policy is not supported"):
        pipeline(model, (x,), split_policy=lambda graph: graph)


class SplitTwice(torch.nn.Module):
    """Calls pipe_split twice between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two products."""
        x = self.first(x)
        pipe_split()
        x = torch.tanh(x)
        pipe_split()
        return self.second(x)


def test_calls_of_pipe_split_without_a_module_between_them_are_refused() -> None:
    with pytest.raises(PartitionError, match="must call a module between two calls of pipe_split"):
        pipeline(SplitTwice(), (torch.zeros(2, 4),))


@pytest.mark.gloo
def test_tied_weights_skips_and_uneven_means_have_the_gradients_of_the_unsplit_model(pools: Pools) -> None:
    model, ids, mask, labels = features.tied_model()
    for _ in range(2):
        features.loss_of(model(ids, mask), labels).backward()
    expected = features.gradients(model)
    expected["head.weight"] = expected["embedding.weight"]
    for found in pools[2].run(features.traced, ["Schedule1F1B", "ScheduleZBVZeroBubble"]):
        for gradients in found:
            assert gradients
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.gloo
def test_the_tracer_gives_the_gradients_that_torchs_gives(pools: Pools) -> None:
    ours, theirs = (pools[2].run(features.traced_script, library) for library in (PENSTOCK, TORCH))
    for (own, output), (other, other_output) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other)
        torch.testing.assert_close(output, other_output)


@pytest.mark.gloo
def test_microbatches_of_other_shapes_than_the_example_are_refused(pools: Pools) -> None:
    assert all("the shapes of the example" in error for error in pools[2].run(features.of_other_shapes))
