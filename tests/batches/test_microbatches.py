"""A batch is cut into microbatches that together are the batch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from penstock.batches import Batch, BatchSplitter, Microbatch, microbatch_sizes
from penstock.errors import RunError
from penstock.ir import Ragged, Rows, named_leaves


def forward(x: Any, mask: Any = None, *rest: Any, scale: Any = 1, **more: Any) -> None:
    """Stands for the forward of a model."""


@dataclass
class Pair:
    """A structure of a user's own."""

    left: Tensor
    right: Tensor | None


def sizes(pieces: tuple[Microbatch, ...]) -> list[int]:
    return [piece.size for piece in pieces]


@pytest.mark.parametrize(
    ("batch", "asked", "expected"),
    [(8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 2, 2)), (7, 3, (3, 2, 2)), (3, 8, (1, 1, 1)), (1, 1, (1,)), (5, 1, (5,))],
)
def test_sizes_differ_by_at_most_one_and_the_larger_come_first(
    batch: int, asked: int, expected: tuple[int, ...]
) -> None:
    assert microbatch_sizes(batch, asked) == expected


def test_a_piece_of_a_tensor_that_requires_a_gradient_can_be_written_in_place() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    first, second = BatchSplitter(forward).split(Batch((2 * x,), {}), 2)
    (first.args[0].mul_(3).sum() + second.args[0].sum()).backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [6.0, 6.0, 2.0, 2.0]


@given(batch=st.integers(1, 40), asked=st.integers(1, 12), dim=st.integers(0, 2))
def test_the_pieces_are_views_that_make_up_the_batch(batch: int, asked: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = batch
    x, target = torch.randn(shape), torch.arange(batch)
    pieces = BatchSplitter(forward, {"x": dim}).split(Batch((x,), {}, target), asked)
    assert torch.equal(torch.cat([piece.args[0] for piece in pieces], dim), x)
    assert torch.equal(torch.cat([piece.target for piece in pieces]), target)
    assert sizes(pieces) == [len(piece.target) for piece in pieces] == list(microbatch_sizes(batch, asked))
    assert all(piece.args[0].untyped_storage()._cdata == x.untyped_storage()._cdata for piece in pieces)


@given(
    tree=st.recursive(
        st.sampled_from(["batch", "other", None, 3, "text"]),
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text("ab"), inner),
        max_leaves=8,
    ),
    asked=st.integers(1, 7),
)
def test_any_structure_is_cut_leaf_by_leaf(tree: Any, asked: int) -> None:
    tensors = {"batch": torch.arange(6), "other": torch.arange(7)}

    def filled(tree: Any, tensors: dict[str, Tensor]) -> Any:
        if isinstance(tree, list | tuple):
            return type(tree)(filled(item, tensors) for item in tree)
        if isinstance(tree, dict):
            return {key: filled(item, tensors) for key, item in tree.items()}
        return tensors.get(tree, tree) if isinstance(tree, str) else tree

    pieces = BatchSplitter(forward).split(Batch((torch.zeros(6), filled(tree, tensors)), {}), asked)
    for piece, part in zip(pieces, tensors["batch"].split(sizes(pieces)), strict=True):
        assert str(piece.args[1]) == str(filled(tree, {**tensors, "batch": part}))


def test_arguments_without_a_batch_dimension_are_not_split() -> None:
    table, number = torch.zeros(1, 5), torch.tensor(3.0)
    batch = Batch((torch.zeros(4, 5), table), {"scale": number, "flag": True, "none": None})
    pieces = BatchSplitter(forward).split(batch, 2)
    assert all(piece.args[1] is table and piece.kwargs["scale"] is number for piece in pieces)
    assert [(piece.kwargs["flag"], piece.kwargs["none"]) for piece in pieces] == [(True, None)] * 2


def test_dataclasses_and_model_outputs_stay_what_they_are() -> None:
    given = BaseModelOutput(last_hidden_state=torch.zeros(4, 2))
    first, _ = BatchSplitter(forward).split(Batch((Pair(torch.zeros(4), None),), {"more": given}), 2)
    assert isinstance(first.args[0], Pair)
    assert first.args[0].left.shape == (2,)
    assert isinstance(first.kwargs["more"], BaseModelOutput)
    assert first.kwargs["more"].last_hidden_state.shape == (2, 2)


def test_the_call_keeps_its_positions_and_keywords() -> None:
    x = torch.zeros(4)
    (piece,) = BatchSplitter(forward).split(Batch((x, x, 5), {"scale": 2, "other": x}), 1)
    assert (len(piece.args), list(piece.kwargs)) == (3, ["scale", "other"])


def test_the_first_tensor_of_the_signature_gives_the_batch_size() -> None:
    pieces = BatchSplitter(forward).split(Batch((), {"mask": torch.zeros(3), "x": torch.zeros(6, 3)}), 3)
    assert sizes(pieces) == [2, 2, 2]
    assert pieces[0].kwargs["mask"].shape == (3,)


def test_split_overrides_by_name_and_a_part_overrides_its_whole() -> None:
    x, table = torch.zeros(3, 4), torch.zeros(4, 4)
    batch = {"ids": torch.zeros(4), "table": torch.zeros(4)}
    split = {"x": 1, "mask": None, "batch": 0, "batch.table": None, "target.y": -1}
    first, _ = BatchSplitter(forward, split).split(Batch((x, table), {"batch": batch}, {"y": torch.zeros(2, 4)}), 2)
    assert (first.args[0].shape, first.args[1].shape) == ((3, 2), (4, 4))
    assert (len(first.kwargs["batch"]["ids"]), len(first.kwargs["batch"]["table"])) == (2, 4)
    assert first.target["y"].shape == (2, 2)


def test_an_entry_for_a_parameter_that_is_left_out_waits_for_another_step() -> None:
    splitter = BatchSplitter(forward, {"mask": None, "target": None})
    assert sizes(splitter.split(Batch((torch.zeros(2),), {}), 2)) == [1, 1]


def test_a_name_that_means_nothing_is_refused_with_the_closest_one() -> None:
    splitter = BatchSplitter(forward, {"atention_mask": None})
    with pytest.raises(RunError, match="'attention_mask'"):
        splitter.split(Batch((torch.zeros(2),), {"attention_mask": torch.zeros(2)}), 2)


@pytest.mark.parametrize(
    ("args", "target", "split", "message"),
    [
        ((torch.zeros(0, 3),), None, {}, r"the batch is empty \(argument: x, shape: \(0, 3\)\)"),
        ((3, torch.tensor(1.0)), None, {}, "the size of the batch is unknown"),
        (
            (torch.zeros(4),),
            torch.zeros(3),
            {},
            r"must be the batch \(target: target, shape: \(3,\), batch: 4\)\ntry: ",
        ),
        ((torch.zeros(4), torch.zeros(3)), None, {"mask": 0}, r"must have 4 samples along dimension 0 .*\(name: mask"),
        ((torch.zeros(4),), None, {"x": 1}, r"must give a dimension of the tensor \(name: x, dim: 1, shape: \(4,\)\)"),
        ((torch.zeros(4),), None, {"x": "0"}, "a value of split must be a rule"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_cut_is_refused_with_its_sizes(args: Any, target: Any, split: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        BatchSplitter(forward, split).split(Batch(args, {}, target), 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_tensor_is_split_by_its_rows() -> None:
    dense = torch.eye(4)
    parts = BatchSplitter(forward).split(Batch((dense.to_sparse(),), {}), 2)
    assert torch.equal(torch.cat([part.args[0].to_dense() for part in parts]), dense)
    compressed = dense.to_sparse_csr()
    (whole,) = BatchSplitter(forward).split(Batch((compressed,), {}), 1)
    assert whole.args[0] is compressed
    with pytest.raises(RunError, match=r"layout torch.sparse_coo to be split \(argument: x, got: torch.sparse_csr\)"):
        BatchSplitter(forward).split(Batch((compressed,), {}), 2)


def test_a_nested_tensor_is_refused_by_its_name() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(RunError, match=r"a nested tensor cannot be split into microbatches \(argument: x\)"):
        BatchSplitter(forward).split(Batch((nested,), {}), 2)


def test_a_target_of_another_length_is_refused_with_its_rows_unless_the_batch_stays_whole() -> None:
    with pytest.raises(RunError, match=r"must be the batch \(target: target, shape: \(6,\), batch: 3\)") as error:
        BatchSplitter(forward).split(Batch((torch.ones(3),), {}, torch.ones(6)), 2)
    assert "penstock.Rows(2) if each sample has that number of rows" in error.value.hint
    assert len(BatchSplitter(forward).split(Batch((torch.ones(3),), {}, torch.ones(5)), 1)) == 1


def test_a_step_without_microbatches_is_refused() -> None:
    with pytest.raises(RunError, match="microbatches must be 1 or more"):
        BatchSplitter(forward).split(Batch((torch.zeros(4),), {}), 0)


def test_a_target_that_is_a_number_is_given_whole() -> None:
    first, _ = BatchSplitter(forward).split(Batch((torch.zeros(4),), {}, (torch.tensor(2.0), 7)), 2)
    assert first.target == (torch.tensor(2.0), 7)


# Lists


def boxes(*counts: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.full((count, 4), float(place))} for place, count in enumerate(counts)]


@pytest.mark.parametrize("place", ["argument", "target"])
def test_a_list_with_a_dict_for_each_sample_is_split_by_entries(place: str) -> None:
    # One sample has as many boxes as there are samples.
    labels, x = boxes(1, 3, 0), torch.zeros(3, 2)
    args, target = ((x, labels), None) if place == "argument" else ((x,), tuple(labels))
    pieces = BatchSplitter(forward).split(Batch(args, {}, target), 2)
    found = [piece.args[1] if place == "argument" else piece.target for piece in pieces]
    assert [[len(one["boxes"]) for one in own] for own in found] == [[1, 3], [0]]
    assert type(found[0]) is (list if place == "argument" else tuple)


@pytest.mark.parametrize(
    "features",
    [
        [torch.zeros(2, 8), torch.zeros(2, 4)],
        ((torch.zeros(2, 3), torch.zeros(2, 3)), (torch.zeros(2, 3), torch.zeros(2, 3))),
    ],
)
def test_whole_tensors_in_a_list_as_long_as_the_batch_are_split_each(features: Any) -> None:
    first, _ = BatchSplitter(forward).split(Batch((torch.zeros(2), features), {}), 2)
    assert len(first.args[1]) == 2
    assert all(len(leaf) == 1 for leaf in (first.args[1] if isinstance(features, list) else first.args[1][0]))


@pytest.mark.parametrize(
    "thing",
    [boxes(2, 2), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)), [torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)]],
)
def test_a_list_that_may_be_either_is_refused_and_split_by_its_rule(thing: Any) -> None:
    with pytest.raises(RunError, match=r"argument: mask, entries: 2, batch: 2") as error:
        BatchSplitter(forward).split(Batch((torch.zeros(2), thing), {}), 2)
    assert """split={'mask': "samples"}""" in error.value.hint
    first, _ = BatchSplitter(forward, {"mask": "samples"}).split(Batch((torch.zeros(2), thing), {}), 2)
    assert len(first.args[1]) == 1
    first, _ = BatchSplitter(forward, {"mask": "items"}).split(Batch((torch.zeros(2), thing), {}), 2)
    assert len(first.args[1]) == 2
    assert sizes(BatchSplitter(forward).split(Batch((torch.zeros(2), thing), {}), 1)) == [2]


def test_a_list_may_give_the_size_of_the_batch() -> None:
    images = [torch.zeros(3, size, size) for size in (4, 5, 6)]
    pieces = BatchSplitter(forward, {"x": "samples"}).split(Batch((images,), {}), 3)
    assert [[len(image[0]) for image in piece.args[0]] for piece in pieces] == [[4], [5], [6]]


# Several rows for each sample


def test_rows_of_a_sample_stay_together_and_give_the_size_of_the_batch() -> None:
    ids, mask = torch.arange(12), torch.arange(3)
    pieces = BatchSplitter(forward, {"x": Rows(4)}).split(Batch((ids, mask), {}), 2)
    assert [piece.args[0].tolist() for piece in pieces] == [list(range(8)), list(range(8, 12))]
    assert [len(piece.args[1]) for piece in pieces] == [2, 1]
    first, _ = BatchSplitter(forward, {"mask": Rows(dim=1)}).split(Batch((mask, ids.unsqueeze(0)), {}), 2)
    assert first.args[1].shape == (1, 8)


GRID = torch.tensor([[1, 2, 2], [1, 1, 3], [2, 1, 1], [1, 1, 1]])
"""Of 4 images with 4, 3, 2 and 1 patches."""


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"counts": torch.tensor([2, 0, 2])}, Ragged("counts")),
        ({"ids": torch.tensor([[9, 1, 9], [1, 2, 1], [9, 9, 3]])}, Ragged("ids", token=9)),
    ],
)
def test_ragged_tensors_follow_tables_that_may_be_ragged_too(more: dict[str, Tensor], rule: Ragged) -> None:
    patches, x = torch.arange(10), torch.zeros(3)
    split = {"patches": Ragged("grid"), "grid": rule}
    pieces = BatchSplitter(forward, split).split(Batch((x,), {"patches": patches, "grid": GRID, **more}), 3)
    assert [piece.kwargs["patches"].tolist() for piece in pieces] == [[*range(7)], [], [7, 8, 9]]
    assert [len(piece.kwargs["grid"]) for piece in pieces] == [2, 0, 2]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"patches": Rows(3)}, r"must have 3 \* 4 samples along dimension 0 .*\(name: patches, got: \(10,\)"),
        ({"patches": Rows()}, "must have a multiple of the 4 samples"),
        ({"patches": "samples"}, "must have a list or tuple of 4 entries"),
        ({"scale": "samples"}, r"must have a list or tuple of 4 entries .*\(name: scale, got: float\)"),
        ({"patches": Ragged("gird")}, "must name an argument that is a tensor .*\ntry: one of x, grid"),
        ({"patches": Ragged("grid"), "grid": None}, "must be split by samples"),
        ({"patches": Ragged("grid"), "grid": Ragged("patches")}, "must be split by samples"),
        ({"patches": Ragged("x")}, r"must add up to its rows \(name: patches, shape: \(10,\), sizes: x, sum: 4\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(split: Any, message: str) -> None:
    given = {"patches": torch.arange(10), "grid": GRID, "scale": 0.5}
    with pytest.raises(RunError, match=message):
        BatchSplitter(forward, split).split(Batch((torch.ones(4, dtype=torch.int64),), given), 2)


@pytest.mark.parametrize("make", [lambda: Rows(0), lambda: Rows(2, "0"), lambda: Ragged(""), lambda: Ragged("x", 1.5)])
def test_a_rule_without_meaning_is_refused(make: Any) -> None:
    with pytest.raises(RunError, match=r"must (have|name)"):
        make()


@given(asked=st.integers(1, 5), cut=st.integers(0, 4))
def test_samples_that_are_taken_and_joined_are_the_microbatch(asked: int, cut: int) -> None:
    labels, lengths = boxes(2, 0, 3, 1, 2), torch.tensor([2, 0, 3, 1, 2])
    more = {"packed": torch.arange(8), "lengths": lengths, "codes": torch.arange(10), "table": torch.zeros(3)}
    split = {"packed": Ragged("lengths"), "codes": Rows(2)}
    pieces = BatchSplitter(forward, split).split(Batch((torch.zeros(5),), {"labels": labels, **more}, lengths), asked)
    whole = Microbatch.join(pieces)
    again = Microbatch.join([whole.take(0, cut), whole.take(cut, 5 - cut)]) if cut else whole
    for one in (whole, again):
        assert (one.size, str(one.args), str(one.target)) == (5, str((torch.zeros(5),)), str(lengths))
        assert str(one.kwargs) == str({"labels": labels, **more})
    assert whole.take(2, 1).kwargs["packed"].tolist() == [2, 3, 4]


# Decisions that are kept


class Holder:
    """An object that may hold a tensor."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_kept_decision_is_used_for_batches_that_are_split_alike_only() -> None:
    x, pair, table = torch.arange(4), [torch.arange(2), torch.arange(2)], torch.arange(6)
    ragged = {"table": Ragged("mask")}
    cases: list[tuple[dict[str, Any], list[tuple[Batch, int]]]] = [
        (
            {},
            [
                (Batch((x, x), {}), 2),
                (Batch((x, torch.arange(2)), {}), 2),
                (Batch((x, x), {}), 3),
                (Batch((x, pair), {}), 2),
                (Batch((x, tuple(pair)), {}), 2),
                (Batch((torch.arange(2), dict(enumerate(pair))), {}), 2),
                (Batch((x, Holder(1)), {}), 2),
                (Batch((x, Holder(x)), {}), 2),
                (Batch((x,), {"scale": x}), 2),
                (Batch((x,), {"scale": None}, x), 2),
            ],
        ),
        (
            ragged,
            [
                (Batch((x,), {"mask": torch.tensor([1, 2, 1, 2]), "table": table}), 2),
                (Batch((x,), {"mask": torch.tensor([2, 2, 2, 0]), "table": table}), 2),
            ],
        ),
    ]
    for split, batches in cases:
        splitter = BatchSplitter(forward, split)
        for _ in range(2):
            for batch, count in batches:
                pieces = splitter.split(batch, count)
                expected = BatchSplitter(forward, split).split(batch, count)
                assert [shown(piece) for piece in pieces] == [shown(piece) for piece in expected]


def shown(piece: Microbatch) -> Any:
    """The leaves of a microbatch by name, with lists in place of tensors, and its axes."""
    values = named_leaves((piece.args, piece.kwargs, piece.target), "")
    plain = [(name, leaf.tolist() if isinstance(leaf, Tensor) else str(leaf)) for name, leaf in values]
    return plain, piece.axes
