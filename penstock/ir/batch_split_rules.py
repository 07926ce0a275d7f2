"""How an argument of a model is split into microbatches: the values of `split`. `penstock.batches` splits."""

from dataclasses import dataclass
from typing import Literal

from penstock.errors import RunError


@dataclass(frozen=True)
class Rows:
    """A tensor with the same number of rows for every sample, those of one sample next to each other.

    `Rows(4)` takes a tensor of shape (4 * batch, ...), as the tokens of 4 codebooks or the beams of a search;
    `Rows()` any multiple of the batch.
    """

    per_sample: int | None = None
    """rows of each sample; None: the length of the dimension divided by the number of samples"""
    dim: int = 0
    """the dimension that holds the rows"""

    def __post_init__(self) -> None:
        is_count = self.per_sample is None or (type(self.per_sample) is int and self.per_sample > 0)
        if type(self.dim) is not int or not is_count:
            given = f"per_sample={self.per_sample!r}, dim={self.dim!r}"
            raise RunError("Rows must have a count of 1 or more and a dimension", got=given, hint="penstock.Rows(4)")


@dataclass(frozen=True)
class Ragged:
    """A tensor with a varying number of rows for each sample, as the patches of images of different sizes.

    `sizes` names an argument that is split by samples. Each of its entries is a number of rows; if it is a table, each
    of its rows has a number of rows that is the product of the row: `Ragged("image_grid_thw")` for patches, where the
    table has a row (time, height, width) for each image. The table may be ragged itself, as with a varying number of
    images: `Ragged("images_per_sample")`. With `token`, each sample has as many rows as `sizes` has entries of that
    value for it: `Ragged("input_ids", token=151652)` if one such token stands for each image.
    """

    sizes: str
    """name of the argument that holds the number of rows of each sample"""
    token: int | None = None
    """count the entries of this value in `sizes` instead"""
    dim: int = 0
    """the dimension that holds the rows"""

    def __post_init__(self) -> None:
        kinds = (type(self.sizes) is str, type(self.token) in (int, type(None)), type(self.dim) is int)
        if not all(kinds) or not self.sizes:
            given = f"sizes={self.sizes!r}, token={self.token!r}, dim={self.dim!r}"
            hint = 'penstock.Ragged("image_grid_thw")'
            raise RunError("Ragged must name the argument that holds the sizes", got=given, hint=hint)


SplitRule = int | None | Literal["samples", "items"] | Rows | Ragged
"""A dimension that is the batch; None: passed whole; "samples": a list or tuple with one entry per sample; "items": a
list or tuple of which each item is split by its own shape; Rows and Ragged: several rows for each sample."""
SPLIT_HINT = (
    '{"mask": 1}, {"table": None}, {"labels": "samples"}, {"ids": penstock.Rows(4)} or {"x": penstock.Ragged("sizes")}'
)


def is_split_rule(value: object) -> bool:
    """Whether a value can be one of `split`."""
    if isinstance(value, str):  # others, such as arrays, may not compare with a str
        return value in ("samples", "items")
    return value is None or type(value) is int or isinstance(value, Rows | Ragged)
