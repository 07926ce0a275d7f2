"""The outputs of microbatches become the output of their batch, or are refused."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.modeling_outputs import CausalLMOutput

import penstock
from penstock.batches import microbatch_sizes
from penstock.errors import PenstockWarning, RunError
from penstock.ir import Parts, flatten_one_level
from penstock.runtime import merge
from tests.plans import quick_plan
from tests.process_pool import Pools


def shapes(thing: Any) -> Any:
    """The structure of an output with shapes in place of tensors."""
    parts = flatten_one_level(thing)
    if parts is not None:
        return Parts(parts.kind, parts.keys, tuple(map(shapes, parts.items)))
    return tuple(thing.shape) if isinstance(thing, Tensor) else None


def merged(outputs: Sequence[Any], sizes: Sequence[int], both: Any, output_dims: Any = None) -> Any:
    return merge(outputs, sizes, joined=lambda: shapes(both), output_dims=output_dims).output


@given(batch=st.integers(2, 12), asked=st.integers(2, 5), dim=st.integers(0, 2))
def test_tensors_are_concatenated_along_the_dimension_that_grows(batch: int, asked: int, dim: int) -> None:
    sizes = microbatch_sizes(batch, asked)
    shape = [sizes[0], sizes[0], sizes[0]]
    shape[dim] = batch
    whole, packed = torch.randn(shape), torch.randn(3 * batch, 5)
    pieces = [
        {"x": x, "packed": rows}
        for x, rows in zip(whole.split(sizes, dim), packed.split([3 * size for size in sizes]), strict=True)
    ]
    both = {"x": whole.narrow(dim, 0, sum(sizes[:2])), "packed": packed[: 3 * sum(sizes[:2])]}
    found = merged(pieces, sizes, both)
    assert torch.equal(found["x"], whole)
    assert torch.equal(found["packed"], packed)


def test_packed_outputs_of_any_length_are_concatenated() -> None:
    tokens = [torch.randn(5, 3), torch.randn(2, 3), torch.randn(4, 3)]
    assert torch.equal(merged(tokens, (2, 2, 2), torch.zeros(7, 3)), torch.cat(tokens))


def test_lists_with_an_entry_per_sample_are_concatenated() -> None:
    pieces = [[{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(1, 4)}], [{"boxes": torch.ones(2, 4)}]]
    found = merged(pieces, (2, 1), [*pieces[0], *pieces[1]])
    assert [len(one["boxes"]) for one in found] == [3, 1, 2]


@pytest.mark.parametrize("value", [torch.arange(4), torch.zeros(2, 2), "text", 7, None])
def test_a_value_without_a_batch_dimension_is_one_if_all_are_equal(value: Any) -> None:
    other = value.clone() if isinstance(value, Tensor) else value
    found = merged([value, other], (2, 2), value)
    assert torch.equal(found, value) if isinstance(value, Tensor) else found == value


@pytest.mark.parametrize(
    ("pieces", "both", "message"),
    [
        ([torch.ones(2, 2), torch.zeros(2, 2)], torch.ones(2, 2), "without a batch dimension differs"),
        ([torch.ones(2, 2), torch.zeros(2, 2)], torch.ones(4, 4), "no dimension along which"),
        ([torch.ones(2, 5), torch.zeros(2, 6)], torch.ones(4, 6), "no dimension along which"),
        ([torch.ones(5, 3), torch.zeros(6, 3)], torch.ones(6, 3), "no dimension along which"),
        ([torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 4)], torch.ones(4, 3), "cannot be concatenated"),
        ([3, 4], 5, "without a batch dimension differs"),
    ],
)
def test_an_output_that_cannot_be_merged_is_refused(pieces: list[Any], both: Any, message: str) -> None:
    with pytest.raises(RunError, match=message) as error:
        merged([{"y": piece} for piece in pieces], [2] * len(pieces), {"y": both})
    assert "output: y" in str(error.value)
    assert "output_dims={'y': ...}" in error.value.hint


def test_output_dims_override_what_is_found() -> None:
    pieces = [
        (torch.ones(2, 2), torch.tensor(1.0), torch.ones(3), torch.ones(1)),
        (torch.zeros(2, 2), torch.tensor(4.0), torch.zeros(3), torch.ones(1)),
    ]
    rules = {"0": 1, "1": "sum", "2": "list", "3": None}
    found = merge(pieces, (2, 2), joined=lambda: pytest.fail("nothing is open"), output_dims=rules).output
    assert found[0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert (found[1], [len(one) for one in found[2]], found[3]) == (5.0, [3, 3], torch.ones(1))
    assert merge([torch.tensor(1.0), torch.tensor(4.0)], (2, 1), (0.5, 0.5), output_dims={"": "mean"}).output == 2.0
    assert merge(pieces, (2, 2), output_dims={"0": 1, "1": "mean"}).output[1] == 2.5


def test_structures_stay_what_they_are_and_losses_are_weighted() -> None:
    outputs = [CausalLMOutput(loss=torch.tensor(float(n)), logits=torch.full((1, 2), float(n))) for n in (1, 3)]
    both = CausalLMOutput(loss=torch.tensor(0.0), logits=torch.zeros(2, 2))
    found = merge(outputs, (1, 1), None, lambda: shapes(both), losses={"loss": (0.75, 0.25)})
    assert isinstance(found.output, CausalLMOutput)
    assert (found.output.loss, found.output.logits.tolist()) == (1.5, [[1.0, 1.0], [3.0, 3.0]])
    assert found.averaged == frozenset()


def test_complex_numbers_are_averaged_like_real_ones() -> None:
    assert merge([torch.tensor(1 + 2j), torch.tensor(5 + 6j)], (1, 3)).output == 4 + 5j


def test_a_microbatch_of_weight_zero_does_not_count_even_if_it_is_not_a_number() -> None:
    assert merge([torch.tensor(2.0), torch.tensor(float("nan"))], (1, 1), (1.0, 0.0)).output == 2.0


def test_without_a_recording_the_first_dimension_is_the_batch() -> None:
    outputs = [
        (torch.ones(4, 5), torch.ones(3), 1, torch.ones(2, 5)),
        (torch.ones(2, 5), torch.ones(3), 1, torch.ones(1, 6)),
    ]
    for sizes in ((2, 1), (1, 1)):
        samples, others, number, ragged = merge(outputs, sizes).output
        assert samples.shape == (6, 5)
        assert others.shape == (6,)
        assert number == 1
        assert [one.shape for one in ragged] == [(2, 5), (1, 6)]


class SequenceFirst(nn.Module):
    """Its batch is the second dimension of what it is given and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {
            "x": x,
            "last": x[-1],
            "positions": torch.arange(len(x)),
            "packed": x.transpose(0, 1).flatten(0, 1),
            "samples": [x[:, sample] for sample in range(x.shape[1])],
            "spread": x.std(),
        }


@pytest.mark.parametrize("length", [2, 3])
def test_a_sequence_first_model_returns_what_the_unsplit_model_returns(length: int) -> None:
    model, x = SequenceFirst(), torch.randn(length, 4, 4)
    plan = penstock.plan(model, (x,), ranks=2, microbatches=2, schedule="1f1b", partitioner="uniform", split={"x": 1})
    pipe = penstock.Pipeline(model, plan, local=True, output_dims={"spread": "list"})
    expected, found = model(x), pipe.eval(x, return_outputs=True).outputs
    assert len(found.pop("spread")) == 2
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])
    assert pipe.eval(x, return_outputs=True, output_dims={"spread": "mean"}).outputs["spread"].dim() == 0
    with pytest.warns(PenstockWarning, match="one number for each microbatch are averaged .*: spread"):
        penstock.Pipeline(model, plan, local=True).eval(x, return_outputs=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [("x", "must be a dimension or a dict"), ({"x": "rows"}, "must be a rule"), ({0: 1}, "must be a rule")],
)
def test_output_dims_that_mean_nothing_are_refused(given: Any, message: str) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(4, 2)
    plan = penstock.plan(model, (x,), ranks=1, microbatches=2, schedule="gpipe", partitioner="uniform")
    with pytest.raises(RunError, match=message):
        penstock.Pipeline(model, plan, local=True, output_dims=given)


class Spread(nn.Module):
    """Returns rows that belong to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"x": x, "spread": x.std(0), "scale": np.float64(2.0)}


def refused_and_continued(num_replicas: int) -> tuple[list[str], list[Any], list[bool]]:
    """The errors of steps whose outputs cannot be merged on one replica; outputs and gradients of later steps."""
    torch.manual_seed(0)
    model, x = Spread(), torch.randn(4, 4)
    plan = quick_plan(model, (x,), ranks=2, microbatches=2)
    mesh = init_device_mesh("cpu", (num_replicas, 2), mesh_dim_names=("dp", "pp")) if num_replicas > 1 else None
    pipe = penstock.Pipeline(model, plan, loss_fn=squares, mesh=mesh)
    # Rules may differ between replicas, which merge their own outputs.
    is_refused = mesh is None or mesh.get_local_rank("dp") == 1
    wrong = {"spread": None} if is_refused else {"spread": "mean"}
    errors = []
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(RunError) as caught:
            call(x, target=x, return_outputs=True, output_dims=wrong)
        errors.append(str(caught.value))
    gradients = [parameter.grad is None for parameter in pipe.parameters()]
    later = [call(x, target=x, return_outputs=True, output_dims={"spread": "mean"}) for call in (pipe.step, pipe.eval)]
    return errors, [(len(result.outputs["x"]), result.outputs["scale"]) for result in later], gradients


def squares(output: dict[str, Any], target: Tensor) -> Tensor:
    return (output["x"] - target).square().mean()


@pytest.mark.gloo
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_outputs_that_cannot_be_merged_are_an_error_on_all_ranks_after_which_they_continue(
    pools: Pools, num_replicas: int
) -> None:
    results = pools[2 * num_replicas].run(refused_and_continued, num_replicas)
    for rank, (errors, outputs, are_dropped) in enumerate(results):
        for error in errors:
            assert error.startswith("an output without a batch dimension differs between microbatches (")
            assert "output: spread" in error
            assert "try: output_dims={'spread': ...}" in error
        # Only the rank of the last stage has values that cannot be sent.
        assert outputs == [(4, 2.0 if rank % 2 else None)] * 2
        assert all(are_dropped)
