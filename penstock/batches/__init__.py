"""Splits batches into microbatches.

    BatchSplitter(model.forward).split(Batch(args, kwargs, target), 4) --> 4 Microbatches

The files, in the order in which to read them:

    microbatches.py   BatchSplitter: splits the arguments of the model and the target of the loss; Microbatch
    sample_axes.py    finds the samples of a batch in its arguments, by the rules of `penstock.ir.SplitRule` or by shape
    split_search.py   finds these rules by running the model, where shapes allow several
    padding.py        the lengths of padded samples, and microbatches without the padding, for `budget_tokens`
"""

from penstock.batches.microbatches import (
    Batch,
    BatchSplitter,
    Microbatch,
    explain_failure,
    longest,
    microbatch_kinds,
    microbatch_sizes,
    split_tensor,
    with_columns_of,
)
from penstock.batches.padding import IGNORE_INDEX, Padding, find_padding
from penstock.batches.sample_axes import TARGET, SampleAxis, Split, is_of_target
from penstock.batches.split_search import additive_dim, find_split
