"""How arguments are split is found by running the model, where their shapes leave it open."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Ragged, Rows
from penstock.batches import find_split
from penstock.errors import CaptureError, RunError
from tests.plans import quick_plan

START = 7
"""Stands in token ids where an image begins."""


class Blocks(nn.Module):
    """Two blocks, and what models have in common."""

    config: Any = SimpleNamespace(start_token_id=START)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.num_calls = 0

    def run(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Codebooks(Blocks):
    """Has rows for 3 codebooks of each sample, and labels for each of them."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(ids).unflatten(0, (-1, 3)).sum(1) * mask.unsqueeze(-1)
        x = self.run(x)
        if labels is None:
            return x
        return functional.cross_entropy(x.repeat_interleave(3, 0).flatten(0, 1), labels.flatten()), x


class Classes(Blocks):
    """Compares samples with the rows of a table."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.run(x) @ table.t()


class Patches(Blocks):
    """Adds the mean of the patches of its images to each sample; one token stands for each image."""

    def forward(self, ids: Tensor, patches: Tensor, grid: Tensor, counts: Tensor | None = None) -> Tensor:
        means = torch.stack([part.mean(0) for part in patches.split(grid.prod(1).tolist())])
        owners = torch.arange(len(ids)).repeat_interleave((ids == START).sum(1) if counts is None else counts)
        x = self.embedding(ids).sum(1)
        return self.run(x.index_add(0, owners, means))


class Detector(Blocks):
    """Its labels are a list with a dict for each image."""

    def forward(self, images: Any, labels: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        x = self.run(torch.stack([image.flatten(1).mean(1) for image in images]))
        assert len(x) == len(labels)
        losses = [(one - label["boxes"]).square().mean() for one, label in zip(x, labels, strict=True)]
        return {"loss": torch.stack(losses).mean(), "x": x}


class ComplexMean(Blocks):
    """Its only result is a complex mean; it does not notice if there are more labels than images."""

    def forward(self, images: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        x = self.run(images.flatten(2).mean(2))
        losses = [(one - label["boxes"]).square().mean() for one, label in zip(x, labels, strict=False)]
        return torch.complex(torch.stack(losses).mean(), x.mean())


class Positions(Blocks):
    """Has a position of three numbers for each token, as models of videos do."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.run(self.embedding(ids) * positions.sum(0).unsqueeze(-1))


class Masked(Blocks):
    """Its mask has no samples."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.run(x) * mask


class Stateful(nn.Module):
    """Its recurrent layer has the samples of its state in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
        self.num_calls = 0

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return self.head(self.rnn(x, state)[0])


IDS = torch.randint(0, 6, (2, 5), generator=torch.Generator().manual_seed(1))
GRID = torch.tensor([[1, 2, 2], [1, 1, 3], [2, 1, 1]])
LABELS = [{"boxes": torch.rand(4, 4)} for _ in range(4)]
IMAGES = torch.rand(4, 4, 2, 2)


def with_images(*counts: int) -> Tensor:
    ids = IDS[:1].repeat(len(counts), 1)
    for row, count in zip(ids, counts, strict=True):
        row[:count] = START
    return ids


CASES = {
    "codebooks": (Codebooks, {"ids": IDS.repeat(6, 1), "mask": torch.ones(4, 5)}, {"ids": Rows(3)}),
    "labels of codebooks": (
        Codebooks,
        {"ids": IDS.repeat(6, 1), "mask": torch.ones(4, 5), "labels": torch.randint(0, 4, (12, 5))},
        {"ids": Rows(3), "labels": Rows(3)},
    ),
    "a table": (Classes, {"x": torch.randn(4, 4), "table": torch.randn(8, 4)}, {"table": None}),
    "patches": (
        Patches,
        {"ids": with_images(1, 1, 1), "patches": torch.randn(9, 4), "grid": GRID},
        {"patches": Ragged("grid")},
    ),
    "images by counts": (
        Patches,
        {"ids": IDS, "patches": torch.randn(9, 4), "grid": GRID, "counts": torch.tensor([1, 2])},
        {"patches": Ragged("grid"), "grid": Ragged("counts")},
    ),
    "images by tokens": (
        Patches,
        {"ids": with_images(2, 1), "patches": torch.randn(9, 4), "grid": GRID},
        {"patches": Ragged("grid"), "grid": Ragged("ids", START)},
    ),
    "as many boxes as images": (Detector, {"images": IMAGES, "labels": LABELS}, {"labels": "samples"}),
    "images in a list": (
        Detector,
        {"images": [torch.rand(4, size, size) for size in (2, 3)], "labels": LABELS[:2]},
        {"images": "samples", "labels": "samples"},
    ),
    "a complex mean": (
        ComplexMean,
        {"images": IMAGES, "labels": [{"boxes": torch.rand(4, 4) * scale} for scale in (1, 9, 5, 2)]},
        {"labels": "samples"},
    ),
    "the state of one layer": (
        Stateful,
        {"x": torch.randn(6, 3, 4), "state": (torch.randn(1, 6, 4), torch.randn(1, 6, 4))},
        {"state": "items", "state.0": 1, "state.1": 1},
    ),
    "a mask of as many positions as samples": (
        Masked,
        {"x": torch.randn(4, 4, 4), "mask": torch.rand(1, 4, 4)},
        {"mask": None},
    ),
    "positions": (Positions, {"ids": IDS, "positions": torch.rand(3, 2, 5)}, {"positions": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule_is_found_whose_results_are_those_of_the_whole_batch(case: str) -> None:
    kind, batch, expected = CASES[case]
    model = kind()
    assert find_split(model, (), batch) == expected
    assert model.training
    assert model.num_calls == 0


def mean_square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    ("case", "loss_fn"), [("labels of codebooks", None), ("images in a list", None), ("images by tokens", mean_square)]
)
def test_a_plan_holds_the_rules_and_its_pipeline_is_exact(case: str, loss_fn: Any, tmp_path: Any) -> None:
    kind, batch, expected = CASES[case]
    model = kind()
    plan = quick_plan(model, (), batch, ranks=2, microbatches=2, schedule="1f1b", loss_fn=loss_fn)
    assert dict(plan.split) == expected
    plan.save(tmp_path / "plan.json")
    plan = penstock.Plan.load(tmp_path / "plan.json")
    report = penstock.check(model, plan, (), batch, loss_fn=loss_fn)
    assert report.ok, str(report)
    assert report.whole is not None


class Rooted(Detector):
    """Its loss is not a weighted mean, and does not notice if there are more labels than images."""

    def forward(self, images: Tensor, labels: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        x = self.run(images.flatten(2).mean(2))
        losses = [(one - label["boxes"]).square().mean() for one, label in zip(x, labels, strict=False)]
        return {"loss": torch.stack(losses).mean().sqrt(), "x": x}


def test_a_list_of_dicts_is_split_by_entries_if_only_the_loss_depends_on_it() -> None:
    for seed in range(8):
        # With some seeds, splitting the boxes of one image gives nearly the same loss.
        torch.manual_seed(seed)
        labels = [{"boxes": torch.rand(count, 4)} for count in (4, 2, 1, 3)]
        assert find_split(Rooted(), (IMAGES, labels), {}) == {"labels": "samples"}
    with pytest.raises(RunError, match=r"arguments: labels of 4, batch: 4") as error:
        find_split(Rooted(), (IMAGES, [{"boxes": torch.rand(4, 4) * scale} for scale in (1, 9, 5, 2)]), {})
    assert error.value.hint.startswith("split={'labels': 'items'} or split={'labels': 'samples'} or microbatches=1")


def test_shapes_decide_if_the_model_cannot_run() -> None:
    class Failing(Blocks):
        def forward(self, ids: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
            raise RuntimeError("must not run")

    assert find_split(Failing(), (IDS, torch.ones(2, 5)), {"scale": torch.ones(1, 5)}) == {}
    assert find_split(Codebooks(), (), CASES["codebooks"][1], {"ids": Rows(3)}) == {}


class Weighted(Blocks):
    """Compares samples with classes, of which each has a weight, and has a matrix for all samples."""

    def forward(self, x: Tensor, classes: Tensor, weights: Tensor, mix: Tensor) -> Tensor:
        x = (self.run(x).unsqueeze(1) @ mix).squeeze(1)
        return functional.cross_entropy(x, classes, weights)


def test_a_table_with_as_many_rows_as_there_are_samples_is_passed_whole_if_the_model_runs_so_only() -> None:
    batch = (torch.randn(4, 4), torch.arange(4), torch.rand(4), torch.randn(4, 4))
    plan = quick_plan(Weighted(), batch, ranks=2, microbatches=2, schedule="1f1b")
    assert dict(plan.split) == {"weights": None, "mix": None}
    assert penstock.check(Weighted(), plan, batch).whole.ok


class TimeFirst(Blocks):
    """Adds up the states before each position; the first dimension is time."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.dropout(x).cumsum(0) * self.scale)


def test_samples_that_depend_on_each_other_are_warned_of_when_planning() -> None:
    x = torch.randn(6, 3, 4)
    with pytest.warns(penstock.PenstockWarning, match=r"depend on the samples beside it.*\ntry: split=\{'x': 1\}"):
        quick_plan(TimeFirst(), (x,), ranks=2, microbatches=2, schedule="1f1b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick_plan(TimeFirst(), (x,), ranks=2, microbatches=3, schedule="1f1b", split={"x": 1})
        quick_plan(TimeFirst(), (x,), ranks=2, microbatches=1, schedule="1f1b")


class Similarities(Blocks):
    """A result for each pair of samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) @ x.t()


def test_a_result_for_each_pair_of_samples_is_warned_of_when_planning() -> None:
    with pytest.warns(penstock.PenstockWarning, match="depend on the samples beside it"):
        assert find_split(Similarities(), (torch.randn(6, 4),), {}) == {}


class Keeping(Blocks):
    """Keeps a mean of what it has seen, which it subtracts or not."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.is_used = is_used
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.mean(0)
        return self.run(x - self.mean.clone() if self.is_used else x)


class Initialised(Blocks):
    """Takes a shift from the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.shift.copy_(x.mean(0))
            self.is_set.fill_(True)
        return self.run(x - self.shift.clone())


class Quantised(Blocks):
    """Rounds by the largest value that it has seen, as fake quantization does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        scale = self.largest / 127
        return self.run((x / scale).round() * scale)


class Replacing(Keeping):
    """Makes a new mean instead of writing into it."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.mean(0)
        return self.run(x - self.mean)


class Prices(Blocks):
    """Adds the sum of a table, which may be as long as the batch."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.run(x) + table.sum()


def test_a_table_as_long_as_the_batch_is_named_in_the_warning() -> None:
    model, batch = Prices(), (torch.randn(4, 4), torch.randn(4))
    with pytest.warns(penstock.PenstockWarning, match=r"\ntry: split=\{'table': None\}, with which they are equal; "):
        quick_plan(model, batch, ranks=2, microbatches=2, schedule="1f1b")
    plan = quick_plan(model, batch, ranks=2, microbatches=2, schedule="1f1b", split={"table": None})
    assert penstock.check(model, plan, batch, loss_fn=functional.mse_loss, target=torch.randn(4, 4)).whole.ok


class Centred(Blocks):
    """Subtracts the mean of the batch; each sample has some rows of a table."""

    def forward(self, x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        sums = torch.stack([part.sum(0) for part in rows.split(counts.tolist())])
        return self.run(x - x.mean(0) + sums)


def test_samples_with_ragged_rows_that_depend_on_each_other_are_warned_of() -> None:
    batch = (torch.randn(4, 4), torch.randn(10, 4), torch.tensor([1, 2, 3, 4]))
    with pytest.warns(penstock.PenstockWarning, match=r"depend on the samples beside it.*\ntry: split=\{'x': 1\}"):
        assert find_split(Centred(), batch, {}, {"rows": Ragged("counts")}) == {}


def test_buffers_that_are_written_and_used_are_warned_of_when_planning() -> None:
    batch = (torch.randn(4, 4),)
    with pytest.warns(penstock.PenstockWarning, match=r"uses buffers that it writes, .* for the batch: mean; results"):
        find_split(Keeping(True), batch, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_split(Keeping(False), batch, {})


@pytest.mark.parametrize(
    ("model", "names"), [(Initialised(), "shift, is_set"), (Quantised(), "largest"), (Replacing(True), "mean")]
)
def test_buffers_that_other_samples_change_are_warned_of_and_restored(model: nn.Module, names: str) -> None:
    batch = (torch.linspace(1, 0.1, 16).reshape(4, 4),)
    with pytest.warns(penstock.PenstockWarning, match=f"uses buffers that it writes, .* for the batch: {names}; "):
        find_split(model, batch, {})
    assert not any(buffer.any() for buffer in model.buffers())


def test_random_results_and_an_entry_per_sample_are_no_interaction_of_samples() -> None:
    sizes: list[int] = []

    class Noisy(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return self.run(x + torch.randn_like(x))

    class Listing(Blocks):
        def forward(self, x: Tensor) -> list[Tensor]:
            return list(self.run(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_split(Noisy(), (torch.randn(4, 4),), {}) == {}
        assert sizes == [4, 2, 2]  # no arguments are tried whole
        assert find_split(Listing(), (torch.randn(4, 4),), {}) == {}


class Rounded(nn.Module):
    """Blocks in float32 whose rounding differs with the samples beside it, and results in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """The rounding of float32, which a kernel that takes samples in groups of four has for whole groups only."""
        for block in self.blocks:
            x = block(x).tanh()
        return x.double() * (1 + (len(x) % 4) * torch.finfo(torch.float32).eps)


def test_rounding_in_the_precision_of_the_parameters_is_no_interaction_of_samples() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_split(Rounded(), (torch.randn(4, 4),), {}) == {}


def test_the_error_of_a_model_that_cannot_run_at_all_is_reported_by_planning() -> None:
    with pytest.raises(CaptureError, match=r"RuntimeError: .*cannot be multiplied"):
        penstock.plan(Classes(), (torch.randn(4, 4), torch.randn(8, 3)), ranks=1, microbatches=2)


def test_a_batch_that_no_rule_splits_is_refused_with_its_arguments() -> None:
    class Ranked(Blocks):
        """All samples and all rows depend on each other."""

        def forward(self, x: Tensor, others: Tensor) -> Tensor:
            return self.run(x - x.mean(0)) * others.std()

    with pytest.raises(RunError, match=r"arguments: others \(8, 4\), batch: 4") as error:
        penstock.plan(Ranked(), (torch.randn(4, 4), torch.randn(8, 4)), ranks=2, microbatches=2)
    assert error.value.hint.startswith("split={'others': None} or split={")
    assert "split={'others': penstock.Rows(2)} or microbatches=1" in error.value.hint


@pytest.mark.parametrize(
    ("batch", "hint"), [(2, "microbatches=1,"), (3, "microbatches=1,"), (5, "microbatches=2 or fewer,")]
)
def test_a_single_sample_under_batch_norm_is_refused_with_fewer_microbatches(batch: int, hint: str) -> None:
    model, count = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), batch // 2 + 1
    message = rf"single sample \(module: 1, batch: {batch}, microbatches: {count}\)"
    with pytest.raises(CaptureError, match=message) as error:
        penstock.plan(model, (torch.randn(batch, 4),), ranks=1, microbatches=count)
    assert error.value.hint.startswith(hint)
    plan = penstock.plan(model, (torch.randn(6, 4),), ranks=1, microbatches=3, partitioner="uniform", schedule="gpipe")
    with pytest.raises(CaptureError, match="single sample"):
        penstock.Pipeline(model, plan, loss_fn=mean_square, local=True).step(torch.randn(3, 4))


def test_the_error_of_a_model_that_cannot_run_on_a_microbatch_names_what_was_passed_whole() -> None:
    class Masked(Blocks):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.run(self.embedding(ids))
            return x if mask is None else x.flatten(0, 1)[mask]

    plan = penstock.plan(Masked(), (IDS,), ranks=1, microbatches=2, partitioner="uniform", schedule="gpipe")
    pipe = penstock.Pipeline(Masked(), plan, loss_fn=mean_square, local=True)
    with pytest.raises(CaptureError, match=r"passed whole: mask \(10,\), batch: 2") as error:
        pipe.step(IDS, torch.arange(10) % 2 == 0)
    assert "split={'mask': ...}" in error.value.hint
    pipe = penstock.Pipeline(Masked(), plan, loss_fn=mean_square, local=True, split={"mask": Rows(5)})
    assert pipe.step(IDS, torch.arange(10) % 2 == 0).loss is not None


def test_the_error_of_a_model_that_cannot_run_on_a_microbatch_names_the_dimension_as_long_as_the_batch() -> None:
    x, state = torch.randn(6, 3, 4), (torch.randn(1, 6, 4), torch.randn(1, 6, 4))
    options = {"ranks": 2, "microbatches": 2, "partitioner": "uniform", "schedule": "gpipe"}
    plan = penstock.plan(Stateful(), (x,), **options)
    with pytest.raises(CaptureError, match=r"passed whole: state.0 \(1, 6, 4\)") as error:
        penstock.Pipeline(Stateful(), plan, loss_fn=mean_square, local=True).step(x, state)
    assert "split={'state.0': 1, 'state.1': 1}" in error.value.hint
    split = {"state.0": 1, "state.1": 1}
    plan = penstock.plan(Stateful(), (x,), split=split, **options)  # the example leaves the state out
    model = Stateful()
    pipe = penstock.Pipeline(model, plan, loss_fn=mean_square, local=True)
    for batch in ((x, None), (x, state)):
        torch.testing.assert_close(pipe.step(*batch).loss, mean_square(model(*batch), None).detach())
